"""The script that makes the README's pictures, outputs and tables."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import make_readme
import pytest
import terminal
from pages import ROOT

MACHINE = {
    "versions": {"torch": "2.13", "transformers": "5.24"},
    "hardware": {"cpu": "AMD EPYC", "cores": 2, "cpu_flags": ["avx2", "avx512_bf16"]},
    "threads": {"torch_threads": 2},
    "dtype": "float32",
}


def cell(arm: str, category: str, speedup: float, **more: Any) -> dict[str, Any]:
    found = {
        "arm": arm, "category": category, "temperature": 0.0, "batch": 1, "prompts": 2, "new_tokens": 32,
        "tokens_per_s": 10.0, "speedup": speedup, "speedup_ci95": [speedup - 0.1, speedup + 0.1],
        "mean_acceptance_length": 2.0, "acceptance_rate": 0.5, "identical": True, "draft_s": 0.1, "target_s": 0.1,
        "overhead_s": 0.1, "predicted_speedup": speedup,
    }  # fmt: skip
    return {**found, **more}


def write_run(file: Path, cells: list[dict[str, Any]], finished: bool = True) -> Path:
    summary = {"summary": True, "target": "builtin", "machine": MACHINE, "arms": ["plain", "ngram"],
               "settings": {"prompts": {"categories": {"code": 2}}, "max_new_tokens": 32}}  # fmt: skip
    lines = [*cells, summary] if finished else cells
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_table_of_speeds(tmp_path: Path) -> None:
    cells = [cell("plain", "code", 1.0), cell("ngram", "code", 1.5), cell("ngram", "prose", 1.25)]
    runs = make_readme.figures_of([write_run(tmp_path / "a.jsonl", cells), write_run(tmp_path / "b.jsonl", cells[:2])])
    lines = make_readme.table(runs).splitlines()
    assert lines[0] == "| | code [1] | prose [1] | code [2] |"
    assert "| `ngram` | 1.50 (1.40 to 1.60) | 1.25 (1.15 to 1.35) | 1.50 (1.40 to 1.60) |" in lines
    assert lines[-1].startswith(
        "[2] AMD EPYC, 2 cores, avx512_bf16, 2 threads; builtin, float32, greedy; prompts: 2 code"
    )


def test_a_row_is_a_way_of_decoding_at_its_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MACHINE, "dtype", "bfloat16")
    cells = [
        cell("plain", "code", 1.0),
        cell("model,k=4", "code", 1.5, identical=False),
        cell("model,k=6", "code", 1.7),
    ]
    lines = make_readme.table(make_readme.figures_of([write_run(tmp_path / "a.jsonl", cells)])).splitlines()
    assert lines[2:4] == ["| `model` | 1.70 (1.60 to 1.80) |", ""]
    assert "`model,k=4`, `model,k=6`" in lines[-1] and "near-ties" in lines[-1]


@pytest.mark.parametrize(
    ("cells", "finished", "words"),
    [
        ([cell("ngram", "code", 2.0, identical=False)], True, "differs"),
        ([cell("ngram", "code", 2.0)], False, "unfinished"),
    ],
)
def test_runs_that_prove_nothing_are_refused(
    tmp_path: Path, cells: list[dict[str, Any]], finished: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_readme.figures_of([write_run(tmp_path / "a.jsonl", cells, finished)])


def test_the_table_of_real_models() -> None:
    run = {"title": "m.gguf", "machine": "a CPU", "prompts": 12, "new_tokens": 128}
    speed = {"0.0": {"plain": 10.0, "suffix": 20.4, "llama.cpp plain": 5.0}, "1.0": {"plain": 9.0}}
    lines = make_readme.real_table([{**run, "speed": speed}, {**run, "title": "n", "speed": {"0.0": {"suffix": 3.0}}}])
    assert lines.splitlines() == [
        "| tokens/s | m.gguf, greedy | m.gguf, T=1 | n, greedy |",
        "|---|---|---|---|",
        "| llama.cpp plain | 5 |  |  |",
        "| foretoken plain | 10 | **9** |  |",
        "| foretoken `suffix` | **20** |  | **3** |",
        "",
        "a CPU, 2 threads; 12 conversations of 128 tokens, arms in turns, prompt included, medians; same files.",
    ]


def test_parts_go_between_their_marks() -> None:
    text = "a\n<!-- begin: one -->\nold\n<!-- end: one -->\nb\n<!-- begin: two -->\n<!-- end: two -->\n"
    parts = {"one": lambda: "new \\1", "two": lambda: "2"}
    assert make_readme.filled(text, (), parts).count("new \\1") == 1
    assert "old" in make_readme.filled(text, ["two"], parts)
    with pytest.raises(ValueError, match="names a part 'one': choose one of two"):
        make_readme.filled(text, (), {"two": parts["two"]})
    with pytest.raises(ValueError, match="has no end"):
        make_readme.filled(text.replace("<!-- end: one -->", ""), (), parts)


def test_the_parts_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_readme, "FIGURES", tmp_path)
    assert "prediction" in make_readme.drafters() and make_readme.drafters().startswith("| what you have |")
    assert "docs/figures/readme.svg" in make_readme.picture()
    ElementTree.parse(tmp_path / "readme.svg")
    make_readme.recording()
    text = (tmp_path / "terminal.svg").read_text()
    ElementTree.fromstring(text)
    assert "url(" not in text.replace("url(#", "") and "font-face" not in text
    assert "round" in text and text.count("@keyframes") > 20 and len(text) < 200_000
    assert "prefers-color-scheme: dark" in text and "prefers-reduced-motion" in text


def test_the_readme_has_known_parts_only() -> None:
    make_readme.filled((ROOT / "README.md").read_text(), ["none of them"], make_readme.PARTS)


def test_a_recording_is_what_the_terminal_received() -> None:
    program = (
        "import sys, time; print('\\x1b[32mgreen\\x1b[0m'); time.sleep(0.3); print('x' * 25 + str(sys.stdout.isatty()))"
    )
    events = terminal.record([sys.executable, "-c", program], 20, os.environ)
    found = [(p.line, p.column, p.text, p.style) for p in terminal.pieces(events, 20)]
    assert found == [(0, 0, "green", "green"), (1, 0, "x" * 20, ""), (2, 0, "xxxxxTrue", "")]
    assert events[-1][0] - events[0][0] > 0.2
    shown, slower = terminal.paced(events, 1.0)
    assert slower > 1 and shown[-1][0] - shown[0][0] <= terminal.PAUSE_S + 0.1  # a silence is cut
    drawn = ElementTree.fromstring(terminal.drawn("program", events, 20, "title"))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"title", "green", "xxxxxTrue"} <= set(words) and "$ p" in words


def test_a_command_that_fails_is_not_recorded() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        terminal.record([sys.executable, "-c", "raise SystemExit(3)"], 80, os.environ)
