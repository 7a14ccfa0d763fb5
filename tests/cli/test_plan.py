"""``foretoken plan``: tables, JSON, pictures, profiles, and one line for everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.output import print_table, screen, table
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.lab.plan.roofline import Roofline
from foretoken.lab.plan.speedup import expected_tokens

COSTS = RoundCosts(
    TargetCost({1: 0.10, 8: 0.11, 32: 0.20}),
    {
        "model,k=4": DrafterCost(0.001, 0.010, (0.8, 0.6, 0.4, 0.3)),
        "ngram": DrafterCost(0.0005, 0.0, (0.2, 0.1), proposes=0.5),
    },
    rest_s=0.002,
)


DRAFTER = '{"costs": {"target_s": {"1": 1}, "drafters": {"x": {"call_s": 1, "step_s": 1, "survival": ?}}, "rest_s": 0}}'


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"format": 1, "drafter": "ngram", "costs": COSTS.as_dict()}))
    return file


def test_json_is_one_object_with_the_formulas(run: Any) -> None:
    result = run("plan", "--alpha", "0.7", "--c", "0.1", "--k", "2-9", "--overhead", "0.05", "--json")
    assert result.code == 0 and result.err == ""
    report = result.json
    assert [row["k"] for row in report["rows"]] == [0, *range(2, 10)]
    for row in report["rows"][1:]:
        assert row["tokens"] == pytest.approx(expected_tokens(0.7, row["k"]))
        assert row["speedups"]["1"] == pytest.approx(row["tokens"] / (1.05 + 0.1 * row["k"]) if row["k"] else 1.0)
    assert report["best"]["k"] == 4 and report["summary"].startswith("Draft k=4 tokens")
    assert (report["alpha"], report["c"], report["overhead"], report["drafter"], report["plot"]) == (
        0.7, 0.1, 0.05, None, None,
    )  # fmt: skip


def test_several_guesses_a_round(run: Any) -> None:
    """Seven chains of k tokens: more tokens, and 7 k + 1 nodes."""
    result = run("plan", "--alpha", "0.5", "--k", "4", "--guesses", "7", "--v", "1:1,29:1.5", "--json")
    assert result.code == 0
    row = result.json["rows"][1]
    assert row["nodes"] == 29 and row["tokens"] == pytest.approx(5 - sum((1 - 0.5**i) ** 7 for i in range(1, 5)))
    assert row["speedups"]["1"] == pytest.approx(row["tokens"] / 1.5)
    assert result.json["guesses"] == 7 and any("7 guesses" in note for note in result.json["notes"])
    refused = run("plan", "--alpha", "0.5", "--guesses", "0")
    assert refused.code == 2 and "guesses" in refused.err


def test_the_table_and_the_plain_words(run: Any) -> None:
    result = run("plan", "--alpha", "0.7", "--c", "0.1", "--v", "1:1,8:1.1,32:2", "--batch", "1,4,16", "--k", "1-8",
                 "--tree", "3x2x1", "--tree", "2x2")  # fmt: skip
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    row = next(line.split() for line in lines if line.split()[:1] == ["4"])
    assert row[:5] == ["4", "2.77", "1.90x", "1.47x", "0.89x"]
    assert any(line.split()[:3] == ["2x2", "6", "2.74"] for line in lines)
    assert "best by batch: k=4 at 1, k=2 at 4, k=1 at 16" in result.out
    assert "upper estimate" in result.out and "B=16" in result.out
    assert lines[-1].startswith("Draft k=4 tokens a round: 2.77 tokens a round, 1.90x plain decoding.")
    assert "reaches 16" in lines[-1] and lines[-1].endswith("The tree 2x2 is faster: 2.74 tokens a round, 2.13x.")


def test_a_narrow_terminal_loses_no_number(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("plan", "--alpha", "0.7", "--c", "0.1", "--k", "1-3", "--batch", "1,4,16", "--tree", "3x2x1")
    wide = run(*options).out
    monkeypatch.setenv("COLUMNS", "40")
    assert run(*options).out == wide and "3.48" in wide


def test_a_narrow_terminal_breaks_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = table(None, ("load", "words"), ("n",))
    shown.add_column("an arm with a long name", justify="right", overflow="fold")
    shown.add_row("first column", "words that can be broken", "123.45", "2222.2 tok/s")
    print_table(screen(), shown)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "first column" in line)
    assert row.split() == ["first", "column", "words", "that", "123.45", "2222.2", "tok/s"]
    assert any("can be" in line for line in lines)


def test_a_plan_that_says_no(run: Any) -> None:
    result = run("plan", "--alpha", "0.3", "--c", "0.4")
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("Do not draft")


def test_a_single_length_and_plain_alone(run: Any) -> None:
    assert [row["k"] for row in run("plan", "--alpha", "0.7", "--k", "4", "--json").json["rows"]] == [0, 4]
    result = run("plan", "--alpha", "0.7", "--k", "0")
    assert result.code == 0 and "Only plain decoding" in result.out


def test_survival_and_positions(run: Any) -> None:
    report = run("plan", "--survival", "0.8,0.5,0.2", "--c", "0.05", "--k", "1-3", "--tree", "2x1", "--positions",
                 "0.6,0.2", "--operations", "0.01", "--json").json  # fmt: skip
    assert [row["tokens"] for row in report["rows"]] == pytest.approx([1, 1.8, 2.3, 2.5])
    assert report["trees"][0]["tokens"] == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    assert report["rows"][2]["operations"] == pytest.approx((3 + 2 * 0.01) / 2.3)


def test_the_drafter_that_a_profile_names(run: Any, profile: Path) -> None:
    report = run("plan", "--profile", str(profile), "--k", "1-4", "--json").json
    assert report["drafter"] == "ngram" and not any("promises most" in note for note in report["notes"])
    assert report["rows"][2]["speedups"]["1"] == pytest.approx(COSTS.speedup("ngram", 2))
    assert "measured drafter: ngram" in run("plan", "--profile", str(profile), "--k", "1-4").out


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (None, "the profile chooses plain decoding"),
        ("router,drafters=(model|ngram)", "the profile has no costs of its drafter router,drafters=(model|ngram)"),
    ],
)
def test_another_drafter_than_the_profile_s_is_told(run: Any, profile: Path, named: str | None, reason: str) -> None:
    profile.write_text(json.dumps({"format": 1, "drafter": named, "costs": COSTS.as_dict()}))
    report = run("plan", "--profile", str(profile), "--k", "1-4", "--json").json
    assert report["drafter"] == "model,k=4"
    note = f"{reason}: this plan is for model,k=4, which promises most"
    assert report["notes"][0] == note
    assert f"note: {note}" in run("plan", "--profile", str(profile), "--k", "1-4").out


def test_the_best_drafter_of_a_profile_that_names_none(run: Any, profile: Path) -> None:
    profile.write_text(json.dumps({"format": 1, "costs": COSTS.as_dict()}))
    report = run("plan", "--profile", str(profile), "--batch", "1,2", "--k", "1-4", "--json").json
    assert report["drafter"] == "model,k=4" and report["survival"] == [0.8, 0.6, 0.4, 0.3]
    for row in report["rows"]:
        for batch in (1, 2):
            assert row["speedups"][str(batch)] == pytest.approx(COSTS.speedup("model,k=4", row["k"], batch))
    chosen = run("plan", "--profile", str(profile), "--drafter", "ngram", "--k", "2", "--json").json
    assert chosen["rows"][1]["speedups"]["1"] == pytest.approx(COSTS.speedup("ngram", 2))
    assert "measured drafter: model,k=4" in run("plan", "--profile", str(profile), "--k", "1-4").out


def test_options_replace_what_a_profile_says(run: Any, profile: Path) -> None:
    report = run("plan", "--profile", str(profile), "--alpha", "0.9", "--c", "0.02", "--overhead", "0", "--v", "flat",
                 "--k", "3", "--json").json  # fmt: skip
    assert report["rows"][1]["speedups"]["1"] == pytest.approx(expected_tokens(0.9, 3) / (1 + 3 * 0.02))


def test_roofline_costs(run: Any) -> None:
    v = Roofline(8e9, 3.35e12, 989e12, experts=8, active=2, expert_parameters=0.5)
    text = "roofline,parameters=8e9,bandwidth=3.35e12,flops=989e12,experts=8,active=2,expert_parameters=0.5"
    report = run("plan", "--alpha", "0.8", "--c", "0.05", "--v", text, "--k", "3", "--json").json
    assert report["rows"][1]["speedups"]["1"] == pytest.approx(expected_tokens(0.8, 3) / (v(4) + 3 * 0.05))


def test_a_picture(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.png"
    result = run("plan", "--alpha", "0.7", "--c", "0.1", "--k", "1-6", "--plot", str(file), "--json")
    assert result.json["plot"] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")


def check(result: Any, *words: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1 and "Traceback" not in result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("give --alpha", "--profile")),
        (("--alpha", "1.1"), ("--alpha must be in [0, 1]", "1.1")),
        (("--alpha", "-0.1"), ("--alpha must be in [0, 1]",)),
        (("--alpha", "nan"), ("--alpha must be in [0, 1]",)),
        (("--alpha", "much"), ("--alpha", "number")),
        (("--alpha", "0.7", "--survival", "0.7"), ("not both",)),
        (("--survival", "0.5,0.6"), ("survival", "0.6 after 0.5")),
        (("--survival", "0.5,x"), ("--survival", "commas")),
        (("--survival", "1.5"), ("--survival", "[0, 1]")),
        (("--alpha", "0.7", "--c", "-1"), ("--c must be", ">= 0")),
        (("--alpha", "0.7", "--c", "inf"), ("--c must be",)),
        (("--alpha", "0.7", "--overhead", "-1"), ("--overhead must be",)),
        (("--alpha", "0.7", "--operations", "nan"), ("--operations must be",)),
        (("--alpha", "0.7", "--v", "1:1"), ("--v", "two or more points")),
        (("--alpha", "0.7", "--v", "1:1,8"), ("--v", "1:1,8:1.1,32:2")),
        (("--alpha", "0.7", "--v", "2:1,8:2"), ("start at 1",)),
        (("--alpha", "0.7", "--v", "1:1,8:0"), ("--v",)),
        (("--alpha", "0.7", "--v", "1:1,0:1,4:2"), ("--v",)),
        (("--alpha", "0.7", "--v", "1:1,8:nan"), ("--v",)),
        (("--alpha", "0.7", "--v", "1:1,8:1,8:2"), ("--v",)),
        (("--alpha", "0.7", "--v", ""), ("--v",)),
        (("--alpha", "0.7", "--v", "roofline,parameters=7e9"), ("needs parameters, bandwidth, flops", "kv_bytes")),
        (("--alpha", "0.7", "--v", "roofline,parameters=7e9,bandwidth=x,flops=1"), ("is a number",)),
        (("--alpha", "0.7", "--v", "roofline,parameters=7e9,bandwidth=0,flops=1"), ("bandwidth must be",)),
        (("--alpha", "0.7", "--v", "roofline,parameters=7e9,bandwidth=1,flops=1,speed=2"), ("takes", "speed=2")),
        (
            ("--alpha", "0.7", "--v", "roofline,parameters=7e9,bandwidth=1,flops=1,context=1000.7"),
            ("context must be a whole number, not 1000.7",),
        ),
        (("--alpha", "0.7", "--k", "5-2"), ("--k", "1-16")),
        (("--alpha", "0.7", "--k", "-3"), ("--k", "1-16")),
        (("--alpha", "0.7", "--k", "many"), ("--k", "1-16")),
        (("--alpha", "0.7", "--k", "1-100000"), ("--k goes up to",)),
        (("--alpha", "0.7", "--batch", "0"), ("--batch", "1,4,16")),
        (("--alpha", "0.7", "--batch", "1,,2"), ("--batch", "1,4,16")),
        (("--alpha", "0.7", "--tree", "3x0"), ("--tree", "3x2x1")),
        (("--alpha", "0.7", "--tree", "3x"), ("--tree", "3x2x1")),
        (("--alpha", "0.7", "--tree", "99x99x99"), ("--tree", "too many nodes")),
        (("--alpha", "0.7", "--tree", "3x2", "--positions", "0.6,0.2"), ("tries 3 siblings",)),
        (("--alpha", "0.7", "--tree", "2", "--positions", "0.6,0.5"), ("sum to 1.1 > 1",)),
        (("--alpha", "0.7", "--positions", "a"), ("--positions",)),
        (("--alpha", "0.7", "--positions", "0.6,0.2"), ("--positions", "give --tree or --ahead")),
        (("--alpha", "0.7", "--drafter", "ngram"), ("--profile",)),
        (("--alpha", "0.7", "--plot", "plan.pdf"), (".png",)),
        (("--profile", "no/such/profile.json"), ("cannot read the profile", "no/such/profile.json")),
    ],
)
def test_bad_options(run: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check(run("plan", *arguments), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("contains no measured costs", "foretoken tune")),
        ("[]", ("contains no measured costs",)),
        ('{"drafter": "ngram"}', ("contains no measured costs",)),
        ('{"costs": {"target_s": {}, "drafters": {}, "rest_s": 0}}', ("cannot be used",)),
        ('{"costs": {"target_s": {"1": 1}, "drafters": {}, "rest_s": 0}}', ("no measured drafters",)),
        ('{"costs": {"target_s": {"1": 1}, "drafters": {"x": {"y": 1}}, "rest_s": 0}}', ("cannot be used",)),
        (DRAFTER.replace("?", "[0.5]").replace("{", '{"drafter": 3, ', 1), ("drafter in the profile", "not 3")),
        (DRAFTER.replace("?", '["a"]'), ("cannot be used",)),
        (DRAFTER.replace("?", "[2]"), ("cannot be used", "survival")),
        (DRAFTER.replace("?", "[0.5, 0.6]"), ("cannot be used", "survival")),
    ],
)
def test_bad_profiles(run: Any, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    check(run("plan", "--profile", str(file)), *words)


def test_files_that_are_no_profile(run: Any, tmp_path: Path, profile: Path) -> None:
    check(run("plan", "--profile", str(tmp_path)), "cannot read the profile")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    check(run("plan", "--profile", str(tmp_path / "bytes")), "cannot read the profile")
    check(run("plan", "--profile", str(profile), "--drafter", "medusa"), "was not measured", "model,k=4, ngram")


def test_a_picture_that_cannot_be_written(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for place in (tmp_path / "file" / "plan.png", tmp_path / "file" / "new" / "plan.png", Path("/proc/plan.png")):
        words = f"--plot {place} cannot be written", "choose another folder"
        check(run("plan", "--alpha", "0.7", "--plot", str(place)), *words)
    check(run("plan", "--alpha", "0.7", "--plot", str(tmp_path / "folder.png")), "folder.png is a folder")


def test_a_refused_plan_leaves_no_folder(run: Any, tmp_path: Path) -> None:
    check(run("plan", "--plot", str(tmp_path / "new" / "plan.png")), "give --alpha")
    assert not list(tmp_path.iterdir())


def test_drafting_ahead(run: Any) -> None:
    """A table beside the plan's, and one line that says yes or no."""
    options = ("plan", "--alpha", "0.7", "--c", "0.1", "--k", "1-4", "--ahead", "2", "--positions", "0.7,0.12,0.05")
    apart, shared = run(*options), run(*options, "--contention", "1.9")
    assert apart.code == shared.code == 0
    assert apart.out.splitlines()[-1].startswith("Draft ahead: k=4 with ")
    assert shared.out.splitlines()[-1].startswith("Do not draft ahead at a contention factor of 1.9: ")
    rows = run(*options, "--json").json["ahead"]
    assert [row["k"] for row in rows] == [1, 2, 3, 4] and all(row["pays"] for row in rows)
    assert rows[3]["rows"] == 10 and rows[3]["hits"] == pytest.approx((1 - 0.7**4) * 0.17 / 0.3 + 0.7**4 * 0.82)
    assert run("plan", "--alpha", "0.7", "--json").json["ahead"] == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--contention", "1.5"), "--contention goes with --ahead"),
        (("--ahead", "2", "--contention", "0.5"), "a contention factor must be a number >= 1"),
        (("--ahead", "2", "--batch", "4"), "leave out --batch and --guesses"),
        (("--ahead", "2", "--k", "0"), "give a --k above 0"),
        (("--ahead", "2", "--positions", "0.7,0.1"), "need the probabilities of 3 candidates, not 2"),
    ],
)
def test_what_ahead_refuses(run: Any, more: tuple[str, ...], says: str) -> None:
    result = run("plan", "--alpha", "0.7", *more)
    assert result.code == 2 and says in result.err and len(result.err.strip().splitlines()) == 1
