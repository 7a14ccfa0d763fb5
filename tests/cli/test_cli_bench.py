"""``foretoken bench``: the contract of its lines, its errors, and going on after an interrupt."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken.lab.bench import run as bench_run

CELL = {
    "arm", "category", "temperature", "batch", "prompts", "new_tokens", "tokens_per_s", "speedup", "speedup_ci95",
    "mean_acceptance_length", "acceptance_rate", "identical", "draft_s", "target_s", "overhead_s", "predicted_speedup",
}  # fmt: skip
SUMMARY = {"summary", "target", "machine", "arms", "settings", "cells", "costs", "positions", "rounds", "traces"}


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [("code", "def add(a, b):"), ("code", "for item in items:"), ("prose", "a return, a b")]
    file.write_text("".join(json.dumps({"category": c, "prompt": p}) + "\n" for c, p in rows))
    return str(file)


def bench(run: Any, target: str, *more: str) -> Any:
    return run("bench", "--target", target, "--max-new-tokens", "6", *more)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_file_the_table_and_the_card(run: Any, target: str, draft: str, prompts: str, tmp_path: Path) -> None:
    out, spec = tmp_path / "run.jsonl", f"model:{draft},k=3"
    result = bench(
        run, target, "--drafter", spec, "--drafter", "ngram@constant,k=2", "--prompts", prompts, "--out", str(out),
        "--temperature", "0,1", "--batch", "1", "--batch", "2", "--card", str(tmp_path / "run.md"),
    )  # fmt: skip
    assert result.code == 0, result.err
    *cells, summary = lines(out.read_text())
    assert len(cells) == 3 * 2 * 2 * 2 == summary["cells"]
    assert all(set(cell) == CELL for cell in cells)
    assert set(summary) >= SUMMARY
    assert summary["arms"] == ["plain", spec, "ngram@constant,k=2"]
    assert {cell["identical"] for cell in cells if cell["temperature"] == 0} == {True}
    assert any(cell["acceptance_rate"] > 0.5 for cell in cells if cell["arm"] == spec)
    assert "speed-up, T=1, batch 2" in result.out and "prose" in result.out and "foretoken bench report" in result.out
    card = (tmp_path / "run.md").read_text()
    assert all(word in card for word in ("threads", "load", "dtype", "torch", "| `plain` |", spec))
    assert not (tmp_path / "run.jsonl.partial").exists()
    page = tmp_path / "report.html"
    reported = run("bench", "report", str(out), "--out", str(page))
    assert reported.code == 0 and "<html" in page.read_text().lower() and str(page) in reported.out
    assert run("bench", "report", str(out), "--out", str(page), "--json").json["out"] == str(page)


def test_quantised_weights_are_recorded_and_shown(run: Any, target: str, prompts: str, tmp_path: Path) -> None:
    """They are another model's: neither the file, nor the card, nor the page may call it the one of full weights."""
    out, card, page = (tmp_path / name for name in ("run.jsonl", "run.md", "report.html"))
    measured = bench(
        run, target, "--drafter", "ngram", "--prompts", prompts, "--max-prompts", "1", "--quantize", "int8",
        "--out", str(out), "--card", str(card),
    )  # fmt: skip
    assert measured.code == 0, measured.err
    summary = lines(out.read_text())[-1]
    settings = summary["settings"]
    assert (settings["quantize"], settings["backend"], settings["device"]) == ("int8", "auto", "cpu")
    assert settings["chat"] is True
    weights = f"int8, with activations in {settings['dtype']}"
    assert settings["weights"] == summary["runs_as"]["weights"] == weights
    assert f"weights: {weights}" in card.read_text()
    assert run("bench", "report", str(out), "--out", str(page)).code == 0
    assert f"<dt>weights</dt><dd>{weights}</dd>" in page.read_text()


def test_json_lines_on_stdout(run: Any, target: str, prompts: str) -> None:
    for more in (("--json",), ()):  # a pipe gets lines without being asked
        result = bench(run, target, "--drafter", "ngram", "--prompts", prompts, "--category", "prose", *more)
        assert result.code == 0, result.err
        *cells, summary = lines(result.out)
        assert [(c["arm"], c["category"]) for c in cells] == [("plain", "prose"), ("ngram", "prose")]
        assert summary["summary"] is True
    assert "speed-up" in result.err


OWN = """
from foretoken import Drafter, TokenTree


class Own(Drafter):
    name = "own"

    def __init__(self, fails_at: int = 0) -> None:
        self.rounds_left = fails_at

    def propose(self, context, budget):
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise KeyError("lost")
        return TokenTree.root_only(context.root)
"""


@pytest.mark.parametrize("fails_at", [0, 15])
def test_an_arm_whose_code_fails_costs_no_other(
    run: Any, target: str, prompts: str, tmp_path: Path, fails_at: int
) -> None:
    """In its warm-up, or later on."""
    (tmp_path / "own.py").write_text(OWN)
    out, spec = tmp_path / "run.jsonl", f"{tmp_path / 'own.py'}:Own,fails_at={fails_at}"
    arms = ("--drafter", f"{spec}@constant,k=2", "--drafter", "ngram")
    result = bench(run, target, *arms, "--prompts", prompts, "--out", str(out))
    assert result.code == 1 and "Own.propose (own.py, line " in result.out, result.err
    *cells, summary = lines(out.read_text())
    assert {cell["arm"] for cell in cells} == {"plain", "ngram"} == set(summary["arms"])
    assert all(cell["identical"] for cell in cells)
    assert run("bench", "report", str(out), "--out", str(tmp_path / "run.html")).code == 0
    assert not (tmp_path / "run.jsonl.partial").exists()


def test_other_engines_beside_ours(run: Any, target: str, prompts: str) -> None:
    result = bench(
        run,
        target,
        "--arm",
        "transformers:plain",
        "--prompts",
        prompts,
        "--max-prompts",
        "1",
        "--batch",
        "1,2",
    )
    assert result.code == 0, result.err
    assert result.err.count("the prefill of other engines includes the first token") == 1  # at batch 1
    *cells, summary = lines(result.out)
    transformers_cells = [c for c in cells if c["arm"] == "transformers:plain"]
    assert {c["batch"] for c in transformers_cells} == {1}
    assert all(c["identical"] and c["speedup"] > 0 and c["draft_s"] is None for c in transformers_cells)
    assert summary["skipped"] == ["transformers:plain at batch 2: it serves one request at a time"]
    filtered = bench(run, target, "--arm", "transformers:plain", "--prompts", prompts, "--top-k", "5")
    assert filtered.code == 2 and "supports temperature only" in filtered.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_resumed(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    out = tmp_path / "run.jsonl"
    arguments = ("--drafter", "ngram", "--prompts", prompts, "--out", str(out))
    real, calls = bench_run.make_arm, []

    def stopping(name: str, shared: Any) -> Any:
        arm = real(name, shared)
        decode = arm.run

        def counted(unit: Any, setting: Any, tracing: bool) -> Any:
            if unit.category != "warm-up":
                calls.append((name, unit.category, unit.number))
                if len(calls) == 4 and not resuming:
                    os.kill(os.getpid(), number)
            return decode(unit, setting, tracing)

        arm.run = counted
        return arm

    resuming = False
    monkeypatch.setattr(bench_run, "make_arm", stopping)
    stopped = bench(run, target, *arguments, "--resume")
    assert stopped.code == code and "--resume continues from here" in stopped.err
    assert f"nothing to resume: {out}.partial does not exist; the run starts anew" in stopped.err
    assert not out.exists()
    resuming, again = True, bench(run, target, *arguments)
    assert again.code == 2 and "add --resume" in again.err
    first = calls[:3]
    calls.clear()
    other = bench(run, target, *arguments, "--resume", "--seed", "3")
    assert other.code == 2 and "other settings (seed)" in other.err and calls == []
    finished = bench(run, target, *arguments, "--resume")
    assert finished.code == 0 and "nothing to resume" not in finished.err, finished.err
    assert len(calls) == 3 and not set(first) & set(calls)
    *cells, summary = lines(out.read_text())
    assert {(c["arm"], c["category"]) for c in cells} == {(a, c) for a in ("plain", "ngram") for c in ("code", "prose")}
    assert summary["cells"] == 4 and len(summary["traces"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--category", "poems"), "no prompts of category 'poems': choose from code (2), prose (1)"),
        (("--drafter", "nothing"), "unknown drafter 'nothing': choose one of"),
        (("--drafter", "transformers:fast"), "unknown arm transformers:fast"),
        (("--drafter", "ngram,x=1"), "unknown option 'x'"),
        (("--temperature", "warm"), "--temperature takes numbers joined by commas, not 'warm'"),
        (("--temperature", "-1"), "a temperature must be 0 or more"),
        (("--batch", "1,two"), "--batch takes whole numbers joined by commas, not '1,two'"),
        (("--batch", "0"), "a batch size must be 1 to 64"),
        (("--format", "xml"), "unknown prompt format 'xml'"),
        (("--format", "gsm8k"), "line 1: 'question' must be a string"),
        (("--resume",), "give --out too"),
        (("--max-new-tokens", "0"), "max_new_tokens must be 1 to"),
        (("--prompts", "missing.jsonl"), "missing.jsonl"),
        (("--controller", "nothing"), "unknown controller 'nothing'"),
        (("--drafter", "ngram", "--profile", "p.json"), "--profile is used by the arm auto only"),
    ],
)
def test_mistakes_are_one_line(run: Any, target: str, prompts: str, arguments: tuple[str, ...], words: str) -> None:
    result = bench(run, target, "--prompts", prompts, *arguments)
    assert result.code == 2 and result.out == ""
    assert words in result.err and result.err.count("\n") == 1, result.err


@pytest.mark.parametrize("arms", [(), ("--drafter", "ngram", "--drafter", "auto@constant,k=2")])
def test_the_arm_auto_takes_a_profile(run: Any, target: str, prompts: str, tmp_path: Path, arms: Sequence[str]) -> None:
    profile = tmp_path / "p.json"
    profile.write_text('{"drafter": "ngram"}')
    result = bench(run, target, "--prompts", prompts, "--max-prompts", "1", "--profile", str(profile), *arms)
    assert result.code == 0, result.err


def test_files_that_cannot_be_read_or_written(run: Any, target: str, prompts: str, tmp_path: Path) -> None:
    empty, wrong = tmp_path / "empty.jsonl", tmp_path / "wrong.jsonl"
    empty.write_text("")
    wrong.write_text('{"prompt": "a"}\n{"title": "b"}\n')
    for arguments, words in (
        (("--prompts", str(empty)), f"{empty} contains no prompts"),
        (("--prompts", str(wrong)), f"{wrong}, line 2: no known prompt in the keys 'title'"),
        (("--prompts", prompts, "--out", str(tmp_path)), "is a folder"),
        (("--prompts", prompts, "--out", str(tmp_path / "no" / "run.jsonl")), "no does not exist"),
    ):
        result = bench(run, target, *arguments)
        assert result.code == 2 and words in result.err and result.err.count("\n") == 1, result.err


@pytest.mark.parametrize("before", [("--repeat", "3"), ("--json",), ("nosuchmodel",), ("--target", "builtin")])
def test_options_before_a_subcommand_are_refused(run: Any, tmp_path: Path, before: tuple[str, ...]) -> None:
    """They are the measurement's and would be lost."""
    result = run("bench", *before, "report", str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "r.html"))
    assert result.code == 2 and f"put {before[0]} after the subcommand: foretoken bench report" in result.err


def test_a_report_of_nothing(run: Any, tmp_path: Path) -> None:
    result = run("bench", "report", str(tmp_path / "missing.jsonl"), "--out", str(tmp_path / "r.html"))
    assert result.code == 2 and "missing.jsonl" in result.err and result.err.count("\n") == 1


def test_a_card_and_the_page_of_cards(run: Any, target: str, draft: str, prompts: str, tmp_path: Path) -> None:
    file, page = tmp_path / "mine.json", tmp_path / "page.html"
    spec = f"model:{draft},k=3"
    result = bench(run, target, "--drafter", spec, "--prompts", prompts, "--card", str(file))
    assert result.code == 0, result.err
    card = json.loads(file.read_text())
    (figure,) = card["figures"]
    assert figure["drafter"] == "model:draft,k=3" and figure["fingerprint"].startswith("sha256:")
    assert card["model"]["name"] == "target" and card["model"]["kind"] == "transformers"
    assert figure["equality"] == {"identical": 3, "ties": 0, "differences": 0}
    assert str(tmp_path) not in file.read_text() and str(Path(target).parent) not in file.read_text()
    (tmp_path / "edited.json").write_text(file.read_text().replace('"method": "model"', '"method": "magic"'))
    page_result = run("bench", "cards", str(tmp_path), "--out", str(page), "--json")
    assert page_result.code == 0, page_result.err
    assert (page_result.json["cards"], page_result.json["rows"]) == (1, 1)
    assert page_result.err.count("\n") == 1 and "edited.json was changed after it was written" in page_result.err
    assert "magic" not in page.read_text()


def test_a_card_that_cannot_be_written_costs_no_results(
    run: Any, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may vanish or fill up while the benchmark runs."""
    folder, measure = tmp_path / "cards", bench_run.run_bench
    folder.mkdir()

    def vanishing(*arguments: Any) -> Any:
        folder.rmdir()
        return measure(*arguments)

    monkeypatch.setattr(bench_run, "run_bench", vanishing)
    result = bench(run, target, "--drafter", "ngram", "--prompts", prompts, "--card", str(folder / "a.json"), "--json")
    assert result.code == 2 and "a.json cannot be written" in result.err.splitlines()[-1]
    assert lines(result.out)[-1]["summary"] is True


def test_a_card_is_tried_before_the_run(run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    monkeypatch.setattr(bench_run, "run_bench", lambda *_: pytest.fail("it ran"))
    result = bench(run, target, "--card", str(tmp_path / "a.json"))
    assert result.code == 2 and "--card" in result.err and "Permission denied" in result.err, result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--card", "card.txt"), "--card card.txt must end in .json or .md"),
        (("--card", "a.json", "--card", "b.json"), "--card names two .json files"),
        (("--card", "no/such/a.json"), "--card no/such/a.json cannot be written: no such folder"),
        (("--card", "a.json", "--drafter", "none"), "a card compares a drafter with plain decoding"),
    ],
)
def test_mistakes_with_cards_are_one_line(run: Any, target: str, arguments: tuple[str, ...], words: str) -> None:
    result = bench(run, target, *arguments)
    assert result.code == 2 and words in result.err and result.err.count("\n") == 1, result.err
