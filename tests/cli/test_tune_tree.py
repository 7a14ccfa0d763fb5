"""``foretoken tune tree``: a tree from measured accuracies that the drafter then fills."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import foretoken as ft
from foretoken.cli.main import main
from foretoken.cli.tune import workload_of
from foretoken.lab.tune.choices import with_tree
from foretoken.lab.tune.tree import SizeCost, TunedTree
from foretoken.lab.workload import Speed
from foretoken.loading.tree_files import TreeWarning
from foretoken.methods.trees.sequoia import solve
from foretoken.methods.trees.shapes import expected_length, medusa_choices, read_tree

SMALL = ["tune", "tree", "--max-prompts", "1", "--new-tokens", "12", "--max-nodes", "4", "--json"]


def test_from_prompts_to_a_tree_that_is_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tree.json"
    assert main([*SMALL, "--out", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    stored = json.loads(file.read_text())
    assert report == {**stored, "out": str(file)}
    assert [tuple(c) for c in stored["choices"]] == medusa_choices(stored["accuracies"], stored["nodes"])
    rates = {int(n): row["expected_length"] / row["round_ms"] for n, row in stored["sizes"].items()}
    assert stored["nodes"] == max(rates, key=lambda n: rates[n]) and set(rates) == {1, 2, 3, 4}
    assert set(stored["speeds"]) == {"plain", "default", "tuned"}
    llm = ft.load("builtin", drafter=f"medusa,tree={file}", dtype="float32")
    assert llm.drafter is not None and llm.drafter.max_nodes == stored["nodes"]
    prompt = "The old man said"
    assert llm.generate(prompt, max_new_tokens=16).token_ids == llm.plain.generate(prompt, max_new_tokens=16).token_ids


def test_chat_models_are_measured_on_chats() -> None:
    """On texts without the template a head for chats has other acceptance, and other limits are the fastest."""
    seen: list[list[dict[str, str]]] = []

    class Templated:
        chat_template = "there is one"

        def apply_chat_template(self, messages: list[dict[str, str]], **how: object) -> str:
            seen.append(messages)
            return "a chat"

        def __call__(self, text: str, **how: object) -> dict[str, list[int]]:
            assert text == "a chat"
            return {"input_ids": [1, 2, 3]}

    subject = SimpleNamespace(tokenizer=Templated(), target=SimpleNamespace(context_length=100))
    common = SimpleNamespace(subject=lambda: subject, temperature=0.0, seed=None)
    work = workload_of(common, None, 24, 4)  # type: ignore[arg-type]
    assert len(work.prompts) == 4 and all(messages[-1]["role"] == "user" for messages in seen) and len(seen) > 4


def test_a_tree_of_another_target_is_told(target: str, draft: str, tmp_path: Path) -> None:
    """It fills as before: only that its places may not be the best ones is said, once."""
    file = tmp_path / "tree.json"
    assert main([*SMALL, "--target", target, "--drafter", f"model:{draft}", "--out", str(file)]) == 0
    stored = json.loads(file.read_text())
    assert stored["target"]["source"] == target
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeWarning)
        ft.load(target, drafter=f"model:{draft},tree={file}", dtype="float32")
        ft.load(target, drafter=f"model:{draft},tree={file}", dtype="bfloat16")
    with pytest.warns(TreeWarning, match=f"measured for another target, {target}: its nodes may not") as told:
        llm = ft.load(draft, drafter=f"model:{draft},tree={file}", dtype="float32")
    assert len([one for one in told if one.category is TreeWarning]) == 1
    assert llm.drafter is not None and llm.drafter.max_nodes == stored["nodes"]
    file.write_text(json.dumps({key: value for key, value in stored.items() if key != "target"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreeWarning)
        ft.load(draft, drafter=f"model:{draft},tree={file}", dtype="float32")


def test_nothing_is_redrawn_while_trees_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An animation's thread would take time from the measurements."""
    told: list[int] = []

    def tuned(work: object, drafter: object, sizes: object, tell: Callable[[str], None]) -> None:
        before = threading.active_count()
        tell("timing trees")
        told.append(before)
        raise ValueError("far enough")

    monkeypatch.setattr("foretoken.lab.tune.tree.tune", tuned)
    here = threading.active_count()
    assert main([*SMALL, "--out", str(tmp_path / "tree.json")]) == 2
    assert told == [here]


@pytest.mark.parametrize(("shape", "temperature"), [("sequoia", 1.0), ("medusa", 0.0)])
def test_a_tree_for_a_draft_model(
    shape: str, temperature: float, target: str, draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tree.json"
    command = [*SMALL, "--target", target, "--drafter", f"model:{draft}", "--shape", shape, "--out", str(file)]
    assert main([*command, "--temperature", str(temperature), "--max-depth", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    stored = json.loads(file.read_text())
    assert report == {**stored, "out": str(file)}
    assert (stored["method"], stored["shape"], stored["temperature"]) == ("model", shape, temperature)
    (acceptance,) = {tuple(row) for row in stored["accuracies"]}
    assert len(stored["accuracies"]) == 3 and 0 < sum(acceptance) <= 1 and min(acceptance) >= 0
    choices = [tuple(choice) for choice in stored["choices"]]
    assert expected_length(choices, stored["accuracies"]) == pytest.approx(stored["expected_length"])
    for size, row in stored["sizes"].items():
        assert row["expected_length"] <= solve(acceptance, int(size), 3).expected_length(int(size), 3) + 1e-9
    llm = ft.load(target, drafter=f"model:{draft},tree={file}", controller="constant", dtype="float32")
    assert llm.drafter is not None
    assert (llm.drafter.max_nodes, llm.drafter.max_depth) == (len(choices), max(map(len, choices)))
    out, plain = (model.generate("for item in", max_new_tokens=12) for model in (llm, llm.plain))
    assert out.token_ids == plain.token_ids and out.stats.num_accepted_tokens > 0


def test_limits_for_a_tree_that_follows_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "limits.json"
    command = [*SMALL, "--drafter", "eagle3,width=2", "--max-depth", "2", "--out", str(file)]
    assert main(command) == 0
    report, stored = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert report == {**stored, "out": str(file)} and stored["method"] == "eagle3"
    assert set(stored["speeds"]) == {"plain", "default", "tuned"} and "width" not in stored["limits"]
    assert all(row["tokens_per_s"] > 0 and "width=2" in row["drafter"] for row in stored["raced"])
    assert {row["drafter"] for row in stored["raced"]} >= {
        "eagle3,width=2,nodes=4",
        *(f"eagle3,width=2,nodes=4,depth={d}" for d in (1, 2)),
    }
    assert stored["limits"]["nodes"] <= 4 and max(row["nodes"] for row in stored["raced"]) <= 4
    file.write_text(json.dumps({**stored, "limits": {"depth": 2, "nodes": 3}}))
    llm = ft.load("builtin", drafter=f"eagle3,tree={file}", dtype="float32")
    assert llm.drafter is not None and (llm.drafter.max_depth, llm.drafter.max_nodes) == (2, 3)
    prompt = "The old man said"
    assert llm.generate(prompt, max_new_tokens=16).token_ids == llm.plain.generate(prompt, max_new_tokens=16).token_ids
    beside = ft.load("builtin", drafter=f"eagle3,tree={file},depth=4,draw=without_replacement", dtype="float32")
    assert beside.drafter is not None and (beside.drafter.max_depth, beside.drafter.max_nodes) == (4, 3)
    with pytest.raises(ValueError, match="was made for 'eagle3', not for 'eagle'"):
        ft.load("builtin", drafter=f"eagle,tree={file}", dtype="float32")
    file.write_text(json.dumps({**stored, "limits": {"dept": 2}}))
    with pytest.raises(ValueError, match="unknown option 'dept' of drafter 'eagle3'"):
        ft.load("builtin", drafter=f"eagle3,tree={file}", dtype="float32")
    file.write_text(json.dumps({**stored, "limits": {}, "target": {"source": "x", "fingerprint": "y"}}))
    with pytest.warns(TreeWarning, match="measured for another target, x"):
        ft.load("builtin", drafter=f"eagle3,tree={file}", dtype="float32")


def test_the_spec_that_is_printed_names_what_was_measured(
    target: str, draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, shown = tmp_path / "tree.json", [part for part in SMALL if part != "--json"]
    assert main([*shown, "--target", target, "--drafter", f"model:{draft},k=2,quantize=none", "--out", str(file)]) == 0
    assert f"--drafter model:{draft},quantize=none,tree={file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "filled"),
    [
        ("quantized,bits=8,k=3", "quantized,bits=8,tree=t.json"),
        ("model:./d,vocab=100,tree=3x2,draw=iid", "model:./d,vocab=100,tree=t.json"),
        ("model:./d,draw=greedy", "model:./d,draw=greedy,tree=t.json"),
        ("hydra,nodes=4,width=2,window=64", "hydra,window=64,tree=t.json"),
    ],
)
def test_a_tuned_tree_leaves_the_options_that_shape_no_tree(spec: str, filled: str) -> None:
    assert with_tree(spec, "t.json") == filled


def test_what_was_only_right_behind_its_siblings_fills_no_small_tree(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best tree of one node is then the root alone, and its levels cannot be counted."""
    file = tmp_path / "tree.json"
    command = [*SMALL, "--target", target, "--drafter", f"model:{draft}", "--out", str(file)]
    monkeypatch.setattr("foretoken.lab.tune.positional.measured_acceptance", lambda *_: (0.0, 0.4, 0.1))
    assert main(command) == 0
    assert set(json.loads(capsys.readouterr().out)["sizes"]) == {"2", "3", "4"}
    monkeypatch.setattr("foretoken.lab.tune.positional.measured_acceptance", lambda *_: (0.0,) * 5 + (0.4,))
    assert main(command) == 2
    assert "no tree of 4 nodes has a node that was ever accepted: allow more nodes" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_found_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--prompts", "none.txt", "--out", str(tmp_path)]) == 2
    stderr = capsys.readouterr().err
    assert stderr == f"error: --out {tmp_path} is a folder: give the name of a file\n"


@pytest.mark.parametrize(
    ("speeds", "line"),
    [
        ({"plain": 3.0, "default": 1.0, "tuned": 2.0}, "plain decoding is faster than this tree"),
        ({"plain": 1.0, "default": 3.0, "tuned": 2.0}, "the default tree is faster than this tree"),
        ({"plain": 1.0, "default": 2.0, "tuned": 3.0}, None),
    ],
)
def test_a_tree_that_does_not_pay_is_told(
    speeds: dict[str, float],
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = {name: Speed(speed) for name, speed in speeds.items()}
    tuned = TunedTree("medusa", [(0,)], [[0.5]], {1: SizeCost(1.0, 1.5)}, measured)
    monkeypatch.setattr("foretoken.cli.tune._tuned_tree", lambda *_: tuned)
    assert main(["tune", "tree", "--out", str(tmp_path / "tree.json")]) == 0
    out = capsys.readouterr().out
    assert line in out if line else "is faster" not in out


def test_what_a_shape_promises_by_hand() -> None:
    accuracies = [[0.5, 0.2], [0.4, 0.1]]
    assert expected_length([(0,), (1,), (0, 0)], accuracies) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "contains no tree"),
        ('{"method": "hydra", "choices": [[0]]}', "made for 'hydra'"),
        ('{"method": "medusa", "choices": [[0, 0, 0]]}', "lacks the parent"),
        ('{"method": "medusa", "choices": [[0], [0, 0]]}', "does not fit 1 heads"),
        ('{"method": "medusa", "choices": []}', "does not fit"),
        ('{"method": "medusa", "choices": [[0], [0]]}', "twice"),
        ('{"method": "medusa", "choices": [[], [0]]}', "twice: list every node once, and the root"),
        ('{"method": "medusa", "choices": [[0], [1.9]]}', "contains no tree"),
        ('{"method": "medusa", "choices": [[true]]}', "contains no tree"),
        ('{"method": "medusa", "choices": ["0", "1"]}', "contains no tree"),
    ],
)
def test_a_bad_file(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_tree(file, "medusa", heads=1)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, words in (
        (["--drafter", "ngram"], "choose one of model"),
        (["--drafter", "early_exit"], "choose one of model"),
        (["--drafter", "ahead"], "'ahead' has no tree to tune: choose one of model"),
        (["--drafter", "eagle3,tree=3x2,draw=without_replacement"], "has a tree already: leave tree out"),
        (
            ["--drafter", "eagle3", "--shape", "sequoia"],
            "the tree of eagle3 follows its probabilities: leave out --shape",
        ),
        (["--drafter", "eagle3,nodes=5"], "has more nodes than --max-nodes 4: leave nodes=5 out"),
        (["--drafter", "eagle3,depth=2,width=2,nodes=4"], "sets depth, width, nodes: leave out those to tune"),
        (["--shape", "sequoia"], "choose one of medusa"),
        (["--drafter", "model", "--shape", "oak"], "choose one of sequoia, medusa"),
        (["--temperature", "1"], "measured greedily"),
        (["--drafter", f"medusa:{tmp_path / 'none'}"], "not a folder"),
        (["--prompts", str(tmp_path / "none")], "none"),
    ):
        assert main([*SMALL, "--out", str(tmp_path / "x.json"), *more]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("error:") == 1
    with pytest.raises(ValueError, match="cannot read the tree"):
        ft.load("builtin", drafter=f"medusa,tree={tmp_path / 'none'}")
