"""The script that makes the README's pictures, outputs and tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import make_readme
import pytest
import terminal
from pages import ROOT


def test_the_table_of_real_models() -> None:
    run = {
        "title": "m.gguf",
        "machine": "Intel(R) Xeon(R) Processor, x86_64 with AMX, AVX2",
        "prompts": 12,
        "new_tokens": 128,
        "commit": "abc",
    }
    speed = {
        "0.0": {
            "plain": 10.0,
            "suffix": 20.4,
            "llama.cpp plain": 4.6,
            "llama.cpp prompt lookup": 5.0,
            "transformers plain": 2.0,
        },
        "1.0": {"plain": 9.0, "auto": 9.4, "ngram": 8.0},
    }
    other = {**run, "title": "n", "machine": "a CPU", "speed": {"0.0": {"suffix": 3.0}}}
    lines = make_readme.real_table([{**run, "speed": speed}, other])
    assert lines.splitlines()[:-1] == [
        "| tokens/s | Transformers | llama.cpp | foretoken plain decoding | `auto` | its best | best over theirs |",
        "|---|---|---|---|---|---|---|",
        "| m.gguf, greedy (Intel Xeon, AMX) | 2 | 5 | 10 |  | 20 (`suffix`) | **4.1** |",
        "| m.gguf, T=1 (Intel Xeon, AMX) |  |  | 9 | 9 | 9 (`auto`) |  |",
        "| n, greedy (a CPU) |  |  |  |  | 3 (`suffix`) |  |",
        "",
    ]
    assert lines.splitlines()[-1].startswith(
        "Two threads; 12 conversations of 128 tokens; all ways in turns in one run"
    )


def test_the_table_in_chinese() -> None:
    run = {"title": "m.gguf", "machine": "a CPU", "prompts": 12, "new_tokens": 128, "commit": "abc"}
    speed = {"0.0": {"plain": 10.0, "ngram": 20.4, "llama.cpp prompt lookup": 5.0}}
    lines = make_readme.real_table([{**run, "speed": speed}], make_readme.CHINESE_WORDS)
    assert lines.splitlines()[:3] == [
        "| 每秒 token 数 | Transformers | llama.cpp | foretoken 普通解码 | `auto` | 最快的方法 | 与对方最快之比 |",
        "|---|---|---|---|---|---|---|",
        "| m.gguf，贪心（a CPU） |  | 5 | 10 |  | 20 (`ngram`) | **4.1** |",
    ]
    assert "2 个线程；12 段对话、每段 128 个 token；" in lines


def test_the_figures_of_the_front_pages_are_those_that_were_kept() -> None:
    """No figure of a run is typed: tables are of ``real_models.json``, the Chinese page has the README's demo."""
    readme = make_readme.README.read_text(encoding="utf-8")
    assert make_readme.part_of(readme, "real") == make_readme.real(), "make_readme.py --only real"
    assert make_readme.part_of(readme, "drafters") == make_readme.drafters(), "make_readme.py --only drafters"
    page = make_readme.CHINESE.read_text(encoding="utf-8")
    assert page == make_readme.chinese(page, readme), "make_readme.py --only chinese"
    assert "每秒 token 数" in page and "output identical: yes" in make_readme.part_of(page, "demo")
    with pytest.raises(ValueError, match="there is no part 'demo'"):
        make_readme.part_of("", "demo")


def test_a_demo_is_shown_without_repetition() -> None:
    long = "word " * 30 + "end"
    printed = f"model\n\n\n{long}\nplain ────\n{long}\n────\n1.0x\n1.0x\n"
    assert make_readme.shortened(printed).splitlines() == ["model", long, "1.0x", "1.0x"]


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
    pieces = [(p.line, p.column, p.text, p.style) for p in terminal.pieces(events, 20)]
    assert pieces == [(0, 0, "green", "green"), (1, 0, "x" * 20, ""), (2, 0, "xxxxxTrue", "")]
    assert events[-1][0] - events[0][0] > 0.2
    shown, slower = terminal.paced([(0.1, "a"), (0.4, "b")], 1.0)  # not as they came: a busy machine is slow itself
    assert slower > 1 and shown[-1][0] - shown[0][0] <= terminal.PAUSE_S + 0.1  # a silence is cut
    drawn = ElementTree.fromstring(terminal.drawn("program", events, 20, "title"))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"title", "green", "xxxxxTrue"} <= set(words) and "$ p" in words


def test_a_command_that_fails_is_not_recorded() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        terminal.record([sys.executable, "-c", "raise SystemExit(3)"], 80, os.environ)
