"""``foretoken show`` and the trees of ``generate --explain``."""

from __future__ import annotations

import copy
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PROMPT = "for item in"


def command(target: str, draft: str, *more: str) -> list[str]:
    drafts = ["--drafter", f"model:{draft},k=3", "--controller", "constant"]  # `auto` need not draft with tiny models
    return ["show", PROMPT, "--target", target, *drafts, "--max-new-tokens", "12", *more]


def test_a_page(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    result = run(*command(target, draft, "--out", str(file), "--json"))
    assert result.code == 0, result.err
    assert result.json["out"] == str(file)
    assert file.read_text().count("<section") == result.json["rounds"] == result.json["stats"]["num_drafts"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("rule", ["rejection", "block", "auto"])
def test_a_picture(run: Any, target: str, draft: str, tmp_path: Path, rule: str) -> None:
    file = tmp_path / "run.svg"
    result = run(*command(target, draft, "--out", str(file), "--temperature", "1", "--verifier", rule))
    assert result.code == 0, result.err
    match = re.search(r"(\d+) rounds, (\d+) tokens -> (.+)", result.err)  # unseeded, so a text may end early
    assert match and 1 <= int(match[1]) <= int(match[2]) <= 12 and match[3] == str(file), result.err
    ElementTree.fromstring(file.read_text())


def test_mistakes_are_one_line(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    for more, words in (
        (["--out", "run.png"], "must end in .html, .svg or .jsonl"),
        (["--out", str(tmp_path / "a.svg"), "--round", "99"], "round 99 does not exist: the run has"),
        (["--out", str(tmp_path / "a.html"), "--round", "2"], "--round is for .svg files"),
        (["--round", "2"], "show.html has all rounds"),
        (["--out", str(tmp_path / "no" / "a.svg")], "cannot be written: No such file or directory"),
    ):
        result = run(*command(target, draft, *more))
        assert result.code == 2 and words in result.err and result.err.count("error: ") == 1
    assert not list(tmp_path.iterdir())


def test_rounds_that_auto_left_plain_are_told(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run.html"))
    assert "rounds: plain" not in run(*command(target, draft, *out)).err
    nothing = ("--drafter", "prediction", "--max-new-tokens", "12", "--json")  # it drafts from what is not given here
    result = run("show", PROMPT, "--target", target, *nothing, *out)
    assert "drafted in 0 of 12 rounds: plain decoding may be faster here; --controller constant" in result.err


def test_a_row_of_a_prompt_file_is_drawn(run: Any, target: str, tokenizer: Any, tmp_path: Path) -> None:
    """A conversation is shown as the template writes it."""
    talking = tmp_path / "talking"
    shutil.copytree(target, talking)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(talking)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run.html"
    words = ("show", "--prompt-file", str(rows), "--target", str(talking), "--max-new-tokens", "4", "--out", str(out))
    rows.write_text(json.dumps({"conversations": [{"from": "human", "value": "for item"}]}))
    result = run(*words)
    assert result.code == 0, result.err
    assert "[user] for item" in out.read_text()
    rows.write_text('{"prompt": "for item"}\n')
    assert run(*words).code == 0
    assert 'class="prompt">for item</span>' in out.read_text()
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "for item"}'))
    out.unlink()
    assert run(*words[:2], str(packed), *words[3:]).code == 0
    assert 'class="prompt">for item</span>' in out.read_text()
    assert "give a prompt or --prompt-file, not both" in run(*words, "a prompt").err
    system = ("--system", "be brief")
    assert run(*words, *system).code == 0
    assert "[system] be brief [user] for item" in out.read_text()
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "for item"}]}))
    assert run(*words, *system).code == 0
    assert "[system] be brief [user] for item" in out.read_text()
    assert run(*words, "--raw").code == 0
    assert 'class="prompt">user: for item' in out.read_text() and "[user]" not in out.read_text()
    rows.write_text(json.dumps({"messages": [{"role": role, "content": "for item"} for role in ("system", "user")]}))
    assert "has a system message: leave out --system" in run(*words, *system).err
    plain = (*words[:4], target, *words[5:])
    rows.write_text('{"prompt": "for item"}\n')
    assert "has no chat template, which --system needs" in run(*plain, *system).err
    rows.write_text('{"messages": [{"role": "user"}]}')
    assert "rows.jsonl, line 1: message 1 needs a 'content'" in run(*words).err
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    result = run(*words)
    assert result.code == 2 and "has 2 prompts: give a file with one row" in result.err


def test_explain_prints_trees(run: Any, target: str, draft: str) -> None:
    result = run("generate", *command(target, draft)[1:], "--explain")
    assert "round 1: model: " in result.out
    assert "└─ " in result.out
    rounds = result.out.count("\nround ")
    assert rounds == 3 or "more rounds: foretoken show" not in result.out


def test_a_trace_is_written_and_shown_again(run: Any, target: str, draft: str, tmp_path: Path) -> None:
    trace, page, picture = (tmp_path / f"run.{kind}" for kind in ("jsonl", "html", "svg"))
    result = run(*command(target, draft, "--out", str(trace), "--json"))
    assert result.code == 0, result.err
    seen = run("show", str(trace))
    assert seen.code == 0, seen.err
    assert seen.out.startswith("engine: foretoken ") and "round 1: model: 3 drafted" in seen.out
    assert "--round N, or --out page.html" in seen.out or result.json["rounds"] <= 3
    rounds = f"{result.json['rounds']} round{'s' * (result.json['rounds'] != 1)}"
    assert run("show", str(trace), "--out", str(page)).err == f"1 request, {rounds} drawn -> {page}\n"
    assert page.read_text().count("<section") == result.json["rounds"]
    assert run("show", str(trace), "--out", str(picture), "--round", "1").code == 0
    (total,) = run("show", str(trace), "--json").json["totals"]
    stats = result.json["stats"]
    assert total["rounds"] == result.json["rounds"] and total["accepted"] == stats["num_accepted_tokens"]
    assert total["acceptance_rate"] == pytest.approx(stats["acceptance_rate"])
    assert total["tokens_per_round"] == pytest.approx(1 + total["accepted"] / total["rounds"])


def test_heads_of_a_narrow_table_break_between_words(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    trace, numbers = tmp_path / "run.jsonl", {"tokens_per_s": 65.5, "per_position": [0.83, 0.67, 0.17]}
    total = {"type": "total", "label": "1", "rounds": 6, "drafted": 10, "accepted": 10, **numbers}
    trace.write_text(f'{{"foretoken_trace": 1}}\n{json.dumps(total)}\n')
    words = set(run("show", str(trace)).out.split())
    assert {"rounds", "drafted", "accepted", "rate", "tokens", "tokens/s", "position"} <= words


def test_mistakes_with_traces_are_one_line(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    trace.write_text('{"foretoken_trace": 1}\n{"type": "total", "rounds": 3}\n')
    for more, words in (
        ((str(tmp_path / "no.jsonl"),), "no such trace"),
        ((str(trace), "--drafter", "ngram", "--raw"), "of a finished run: leave out --drafter, --raw"),
        ((str(trace), "--round", "1"), "round 1 does not exist: the request has 0"),
        ((str(trace), "--request", "x"), "the trace has no request 'x'; it has none with rounds"),
        ((str(trace), "--out", "a.jsonl"), "must end in .html or .svg"),
        ((str(trace), "--out", str(tmp_path / "a.svg")), "has only totals and no rounds"),
        ((str(trace), "--out", str(tmp_path / "a.html"), "--round", "1"), "--round is for .svg files"),
        ((str(trace), "--json", "--request", "x"), "--json prints the totals of the whole trace"),
        ((str(trace), "--json", "--round", "1"), "--json prints the totals of the whole trace"),
        (("a prompt", "--request", "x"), "--request chooses from a trace"),
    ):
        result = run("show", *more)
        assert result.code == 2 and words in result.err and result.err.count("\n") == 1, result.err
    trace.write_text('{"foretoken_trace": 9}\n')
    assert f"{trace}, line 1: a trace of version 9" in run("show", str(trace)).err
