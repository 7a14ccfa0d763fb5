"""``foretoken batch``: every line is answered once, whatever kills the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foretoken as ft
import foretoken.cli.batch as batch_module
from foretoken.cli.batch import finished_ids, read_jobs
from foretoken.core.io.journal import open_locked

PROMPTS = [f"for item in {word}" for word in ("range(3):", "list:", "self.items:", "x", "names", "(1, 2)")]


def write_lines(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def answers(file: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "an id was answered twice"
    return {row["id"]: row for row in rows}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [{"id": f"job-{i}", "prompt": p} for i, p in enumerate(PROMPTS)])


def test_every_line_is_answered_as_the_library_answers(run: Any, target: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("batch", str(source), str(out), "--target", target, "--max-new-tokens", "12", "--max-running", "4",
                 "--json")  # fmt: skip
    assert result.code == 0, result.err
    assert (result.json["jobs"], result.json["skipped"], result.json["answered"]) == (6, 0, 6)
    by_id = answers(out)
    plain = ft.load(target, drafter=None)
    for i, prompt in enumerate(PROMPTS):
        expected = plain.generate(prompt, max_new_tokens=12)
        assert by_id[f"job-{i}"]["text"] == expected.text
        assert by_id[f"job-{i}"]["finish_reason"] == expected.finish_reason


def test_lines_have_options_of_their_own_and_seeds_by_number(run: Any, target: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": PROMPTS[0]},
        {"prompt": PROMPTS[0], "max_new_tokens": 3},
        {"prompt": [5, 6, 7], "temperature": 0.0},
        {"prompt": PROMPTS[0], "seed": 70},
    ]
    out = tmp_path / "out.jsonl"
    source = write_lines(tmp_path / "in.jsonl", lines)
    command = ("--target", target, "--max-new-tokens", "12", "--temperature", "1", "--seed", "70")
    assert run("batch", str(source), str(out), *command).code == 0
    by_id = answers(out)
    assert set(by_id) == {"1", "2", "3", "4"}
    assert by_id["1"]["text"] == by_id["4"]["text"] and by_id["1"]["seed"] == 70
    assert (by_id["2"]["num_new_tokens"], by_id["2"]["seed"]) == (3, 71)
    assert "seed" not in by_id["3"]


def test_a_line_that_fails_says_why_and_the_others_go_on(run: Any, target: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    lines = [{"prompt": ""}, {"prompt": PROMPTS[0]}, {"prompt": "x", "min_tokens": -1}, {"messages": chat}]
    out = tmp_path / "out.jsonl"
    result = run("batch", str(write_lines(tmp_path / "in.jsonl", lines)), str(out), "--target", target,
                 "--max-new-tokens", "4")  # fmt: skip
    assert result.code == 1
    assert "1 answered, 3 failed" in result.err
    by_id = answers(out)
    assert "prompt is empty" in by_id["1"]["error"]
    assert by_id["2"]["text"]
    assert "min_tokens" in by_id["3"]["error"]
    assert "chat template" in by_id["4"]["error"]
    command = ("batch", str(tmp_path / "in.jsonl"), str(out), "--target", target, "--max-new-tokens", "4")
    again = run(*command)
    assert again.code == 1 and "4 were there (3 failed: delete them to ask again), 0 answered, 0 failed" in again.err
    again = run(*command, "--json")
    counts = {"jobs": 4, "skipped": 4, "skipped_failed": 3, "answered": 0, "failed": 0}
    assert again.code == 1 and counts.items() <= again.json.items()
    out.write_text(json.dumps(by_id["2"]) + "\n" + json.dumps({**by_id["2"], "id": "3"}) + "\n")
    write_lines(tmp_path / "in.jsonl", [{"id": "2", "prompt": "x"}, {"id": "3", "prompt": "x"}])
    assert run(*command).code == 0


def test_what_is_there_is_not_asked_again_and_half_a_line_is(
    run: Any, target: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    kept = {"id": "job-1", "text": "kept", "finish_reason": "stop"}
    out.write_text(json.dumps(kept) + '\n{"id": "job-2", "te')
    result = run("batch", str(source), str(out), "--target", target, "--max-new-tokens", "4", "--json")
    assert (result.json["skipped"], result.json["answered"]) == (1, 5)
    by_id = answers(out)
    assert len(by_id) == 6 and by_id["job-1"] == kept
    assert "num_new_tokens" in by_id["job-2"]
    monkeypatch.setattr(batch_module, "_run", lambda *_: pytest.fail("a model is loaded for nothing"))
    again = run("batch", str(source), str(out), "--target", target, "--json")
    assert again.json["skipped"] == 6


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_a_killed_run_goes_on(target: str, source: Path, tmp_path: Path, kill: signal.Signals) -> None:
    """Killed after two answers; the file then has whole lines, and the second run adds the others."""
    out, prompts = tmp_path / "out.jsonl", [f"{prompt} {i}" for i, prompt in enumerate(PROMPTS * 4)]
    write_lines(source, [{"id": f"job-{i}", "prompt": prompt} for i, prompt in enumerate(prompts)])
    command = [sys.executable, "-m", "foretoken", "batch", str(source), str(out), "--target", target,
               "--max-running", "1", "--temperature", "1", "--seed", "3", "--max-new-tokens", "48"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A test run in the background ignores Ctrl-C, and so would what it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    until = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None and time.monotonic() < until, process.stderr and process.stderr.read()
        time.sleep(0.002)
    process.send_signal(kill)
    assert process.wait(timeout=60) == (-signal.SIGKILL if kill == signal.SIGKILL else 130)
    before = out.read_bytes().rpartition(b"\n")[0]
    first = [json.loads(line) for line in before.splitlines()]
    assert 2 <= len(first) < len(prompts)
    assert subprocess.run(command, env=env, timeout=120, capture_output=True).returncode == 0
    assert out.read_bytes().startswith(before)
    by_id = answers(out)
    assert set(by_id) == {f"job-{i}" for i in range(len(prompts))}
    llm = ft.load(target)
    for i, prompt in enumerate(prompts):  # the seed is the line's, so a restart changes nothing
        expected = llm.generate(prompt, max_new_tokens=48, temperature=1.0, seed=3 + i)
        assert by_id[f"job-{i}"]["text"] == expected.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 2: not an object"),
        ("{", "line 2: "),
        ('{"prompt": "x", "temprature": 1}', "line 2: unknown field 'temprature': use one of id, prompt"),
        ('{"prompt": "x", "max_tokens": 1}', "'max_tokens': this is max_new_tokens here; use one of id, prompt"),
        ('{"id": "a"}', "line 2: give either prompt or messages"),
        ('{"prompt": 5}', "line 2: prompt must be text"),
        ('{"prompt": "x", "temperature": -3}', "line 2: temperature must be >= 0"),
        ('{"prompt": "x", "top_k": 1.5}', "line 2: top_k must be a whole number"),
        ('{"prompt": [true]}', "line 2: prompt must be text"),
        ('{"messages": [{"role": "user"}]}', "line 2: message 1 needs a 'content'"),
        ('{"messages": {"role": "user", "content": "a"}}', "line 2: a conversation is a list"),
        ('{"messages": []}', "line 2: the conversation is empty"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "line 2: the conversation has no message to answer"),
        ('{"conversations": 1}', "line 2: 'conversations' must be a list"),
        ('{"id": "a", "prompt": "x"}', "line 2: the id 'a' comes twice"),
        (r'{"id": "a\ud800", "prompt": "x"}', "line 2: id contains half a surrogate pair"),
    ],
)
def test_bad_lines_are_found_before_any_work(
    run: Any, tmp_path: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_run", lambda *_: pytest.fail("a model is loaded before the lines are read"))
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt": "x"}\n' + line + "\n")
    result = run("batch", str(source), str(tmp_path / "out.jsonl"))
    assert result.code == 2 and words in result.err
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_that_are_not_utf_8(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b'{"prompt": "\xff"}\n')
    result = run("batch", str(bad), str(tmp_path / "out.jsonl"))
    assert result.code == 2 and result.err == f"error: {bad} is not UTF-8 text\n"
    bad.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")  # a byte order mark, as some editors write it
    assert [job.prompt for job in read_jobs(bad, {})] == ["a"]


def test_files_that_cannot_be_used(run: Any, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("my notes\n")
    result = run("batch", str(source), str(other))
    assert result.code == 2 and "not an answer of this command" in result.err
    assert other.read_text() == "my notes\n"
    assert "give three: MODEL IN OUT" in run("batch", str(tmp_path), str(source)).err
    assert "No such file" in run("batch", str(tmp_path / "none"), str(tmp_path / "out")).err
    if hasattr(os, "mkfifo"):  # as /dev/stdout of a pipe: its answers would be waited for, which never ends
        os.mkfifo(tmp_path / "pipe")
        assert "is not a regular file" in run("batch", str(source), str(tmp_path / "pipe")).err
    with open_locked(tmp_path / "busy.jsonl"):
        assert "another run writes" in run("batch", str(source), str(tmp_path / "busy.jsonl")).err


@pytest.mark.parametrize(
    "held",
    [
        '{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}',
        '{"id": "b", "prompt": "y"}',
        '{"id": "b", "text": "y"}\n',
        '{"id": "b", "prompt": "y',
        '{"id":"a","text":"no newline","finish_reason":"stop"',
        '{"id": "a", "text": "x"} {"id": "b", "text": "y"}',
        '{"settings":{"theme":"dark"}}',
        "my notes",
    ],
)
def test_a_file_of_something_else_is_not_touched(run: Any, source: Path, tmp_path: Path, held: str) -> None:
    other = tmp_path / "other"
    other.write_text(held)
    result = run("batch", str(source), str(other))
    assert result.code == 2 and "not an answer of this command" in result.err and result.err.count("\n") == 1
    assert other.read_text() == held


def test_prompts_are_not_answered_into_their_own_file(run: Any, source: Path, tmp_path: Path) -> None:
    source.write_text('{"id": "a", "prompt": "x"}')
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for out in (source, link):
        result = run("batch", str(source), str(out))
        assert result.code == 2 and "IN and OUT are the same file" in result.err
    assert source.read_text() == '{"id": "a", "prompt": "x"}'


def test_an_answer_without_its_newline_is_cut_off(tmp_path: Path) -> None:
    first = {"id": "a", "text": "first", "finish_reason": "stop"}
    whole = json.dumps(first).encode() + b"\n"
    out = tmp_path / "out.jsonl"
    for last in ({"id": 'q"\\é', "text": "é\\", "finish_reason": "length"}, {"id": "b", "error": "too long"}):
        line = json.dumps(last, ensure_ascii=False).encode()
        for end in range(len(line) + 1):
            out.write_bytes(whole + line[:end])
            assert set(finished_ids(out)) == {"a"} and out.read_bytes() == whole
        out.write_bytes(whole + line + b"\n")
        assert set(finished_ids(out)) == {"a", str(last["id"])} and out.read_bytes() == whole + line + b"\n"


def test_readers(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"id": 7, "prompt": "b"}])
    source.write_text(source.read_text() + "\n")
    assert [job.id for job in read_jobs(source, {"seed": None, "temperature": 0.5})] == ["1", "7"]
    assert read_jobs(source, {"seed": None})[0].options == {}
    assert finished_ids(tmp_path / "none") == {}


def test_conversations_are_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    begun = [*messages, {"role": "assistant", "content": "Well,"}]
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "on record"}]
    lines = [{"messages": messages}, {"prompt": messages}, {"conversations": turns}, {"messages": begun}]
    jobs = read_jobs(write_lines(tmp_path / "in.jsonl", lines), {})
    assert [job.prompt for job in jobs] == [messages, messages, messages, begun]


def test_seeds_of_lines_begin_again_behind_the_largest(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    jobs = read_jobs(tmp_path / "in.jsonl", {"seed": 2**64 - 1})
    assert [job.options["seed"] for job in jobs] == [2**64 - 1, 0]


def test_files_below_home(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces ``~`` between quotes, or behind ``=``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "for i"}\n')
    assert run("batch", "builtin", "~/in.jsonl", "~/out.jsonl", "--max-new-tokens=3").code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["num_new_tokens"] == 3
    (tmp_path / "q.txt").write_text("for i")
    assert run("generate", "builtin", "--prompt-file=~/q.txt", "--max-new-tokens=3").code == 0
    unknown = run("generate", "builtin", "--prompt-file=~nobody_of_this_name/q.txt")
    assert unknown.code == 2 and "no folder here: write the whole path" in unknown.err
