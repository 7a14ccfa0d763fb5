"""What is read below files and folders: kinds, compression, rows of JSONL, and that nothing is lost without a word."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from foretoken.core.io.documents import files_below, iter_documents, iter_records

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def rows(file: Path, *items: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in items))
    return file


def turns_of(file: Path) -> list[list[tuple[str, Any]]]:
    """Who says what in the conversations of a file."""
    records = [record.row for record in iter_records([file])]
    return [[(turn["role"], turn["content"]) for turn in row["messages"]] if row else [] for row in records]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "q", "response": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"prompt": "q", "completion": "a", "output": None}, [("user", "q"), ("assistant", "a")]),
        ({"question": "q", "answer": "a", "id": 3}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "", "output": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "i", "output": "a"}, [("user", "q\n\ni"), ("assistant", "a")]),
        ({"instruction": "q", "context": "c", "response": "a"}, [("user", "q\n\nc"), ("assistant", "a")]),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, [("user", "q"), ("assistant", "a")]),
    ],
)
def test_a_question_and_its_answer_are_a_chat(row: Any, turns: Any, tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", row)
    assert turns_of(file) == [turns]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 is a conversation"):
        list(iter_documents([file]))


def test_tools_of_a_question_stay(tmp_path: Path) -> None:
    (record,) = iter_records([rows(tmp_path / "a.jsonl", {"prompt": "q", "response": "a", "tools": [{"name": "f"}]})])
    assert record.row is not None and record.row["tools"] == [{"name": "f"}]


def test_a_text_or_a_lone_prompt_is_a_text(tmp_path: Path) -> None:
    items = [{"text": "whole", "instruction": "q", "output": "a"}, {"prompt": "def f():", "test": "f()"}, {"text": ""}]
    assert list(iter_documents([rows(tmp_path / "a.jsonl", *items)])) == ["whole", "def f():"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "q", "question": "r", "answer": "a"},
            "must have one question, and this one has 'prompt' and 'question'",
        ),
        ({"prompt": "q", "answer": "a", "output": "b"}, "must have one answer, and this one has 'answer' and 'output'"),
        ({"prompt": "q", "response": ""}, "'response' must be non-empty text, or a list of messages"),
        ({"question": "q", "answer": {"value": "a"}}, "'answer' must be non-empty text"),
        (
            {"instruction": "q", "input": "i", "history": ["h"], "output": "a"},
            "'history' beside 'instruction' is ambiguous",
        ),
        ({"question": "q", "context": "c", "answer": "a"}, "'context' beside 'question' is ambiguous"),
        *(
            (
                {"instruction": asked, key: more, "output": "y"},
                f"'{key}' extends 'instruction' only where both are text",
            )
            for asked, key, more in (
                ([{"role": "user"}], "input", "x"),
                ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "input", "x"),
                ("q", "context", CHAT["messages"]),
                ("q", "context", CHAT["messages"][:1]),
            )
        ),
        ({"instruction": "q", "input": " ", "output": "a"}, "'input' must be non-empty text"),
    ],
)
def test_a_question_that_cannot_be_told_is_refused(row: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: .*{words}"):
        list(iter_records([rows(tmp_path / "a.jsonl", CHAT, row)]))


@pytest.mark.parametrize("items", [[{"question": "lost"}, CHAT], [CHAT, {"question": "lost"}]])
def test_a_row_of_another_shape_is_refused_before_and_behind_a_chat(items: list[Any], tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", *items)
    line = items.index({"question": "lost"}) + 1
    with pytest.raises(ValueError, match=rf"a\.jsonl, line {line} has no conversation: a row is an object"):
        list(iter_records([tmp_path]))


def test_a_row_of_another_shape_among_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused in a file that is named, and counted in one that is not."""
    file = rows(tmp_path / "a.jsonl", {"text": "one"}, {"question": "lost"}, [1], {"text": "two"})
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 has no text: a row is an object"):
        list(iter_documents([file]))
    with caplog.at_level(logging.WARNING, "foretoken"):
        assert [list(iter_documents([tmp_path])) for _ in "12"] == [["one", "two"]] * 2
    assert caplog.messages == [f"2 rows are of another shape and skipped, the first is {file}, line 2"]


def test_a_file_that_is_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, chats = tmp_path / "a.txt", tmp_path / "chats" / "b.jsonl"
    text.write_bytes("one\ncaf\u00e9".encode("latin-1"))
    (tmp_path / "c.txt").write_text("fine")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: line 2 has the byte 0xe9"):
        list(iter_documents([text]))
    with caplog.at_level(logging.WARNING, "foretoken"):
        assert list(iter_documents([tmp_path])) == ["fine"]
    assert caplog.messages == [f"one file is not UTF-8 text and skipped, the first is {text}"]
    chats.parent.mkdir()
    chats.write_bytes((json.dumps(CHAT) + '\n{"text": "caf\u00e9"}').encode("latin-1"))
    with pytest.raises(ValueError, match=r"b\.jsonl is not UTF-8 text: line 2 has the byte 0xe9"):
        list(iter_records([tmp_path]))


def test_compressed_files_are_read_and_others_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "one"}).encode()))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    for name in ("c.json", "d.png", "e.png.gz"):
        (tmp_path / name).write_bytes(b"[]")
    assert list(iter_documents([tmp_path])) == ["one", "two"]
    for name in ("c.json", "d.png", "e.png.gz"):
        with pytest.raises(ValueError, match=rf"{name} has an unsupported file type: give \.py, .*, \.jsonl, or one"):
            next(iter_records([tmp_path / "b.txt.gz", tmp_path / name]))
    for broken in (gzip.compress(b"two")[:-4], b"no gzip", gzip.compress(b"two")[:12] + b"\xff" * 9):
        (tmp_path / "b.txt.gz").write_bytes(broken)
        with pytest.raises(ValueError, match=r"b\.txt\.gz is damaged"):
            list(iter_documents([tmp_path]))


def test_zstandard_is_read_to_the_end_or_refused(tmp_path: Path) -> None:
    file, text = tmp_path / "a.txt.zst", random.Random(0).randbytes(9999).hex()
    frame = zstandard.ZstdCompressor().compress(text.encode())
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    for whole, expected in ((frame, text), (frame + skippable + frame, text + text), (b"", "")):
        file.write_bytes(whole)
        assert "".join(iter_documents([file])) == expected
    for broken in (frame[:-1], frame[: len(frame) // 2], frame[:4], frame + frame[:20], skippable[:6], frame + b"x"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"a\.txt\.zst is damaged"):
            list(iter_documents([file]))


def test_a_conversation_is_the_same_whatever_numbers_it_carries(tmp_path: Path) -> None:
    turns = [{**message, "turn_id": 7} for message in CHAT["messages"]]
    items = [CHAT, {"id": 1, **CHAT}, {"messages": turns, "unfinished": [1]}, {**CHAT, "tools": [{"name": "f"}]}]
    same, numbered, turned, other = (record.content for record in iter_records([rows(tmp_path / "a.jsonl", *items)]))
    assert same == numbered == turned != other


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    chats, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    chats.write_text(json.dumps(CHAT) + "\r\n" + json.dumps(CHAT), encoding="utf-8-sig")
    text.write_text("one", encoding="utf-8-sig")
    assert len(turns_of(chats)) == 2
    assert list(iter_documents([text])) == ["one"]


def test_a_line_that_is_no_json_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(CHAT)}\n\n{{'a': 1}}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 is not JSON: .* \(column 2\)$"):
        list(iter_records([file]))


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """JSON can hold it and UTF-8 cannot.  A whole pair, and a backslash before ud83d, are what they are."""
    lines = [r'{"text": "whole \ud83d\ude00 \\ud83d"}', r'{"text": "a \ud83d emoji"}', r'{"text": "\uDE00", "n": 1.5}']
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([*lines, json.dumps(CHAT).replace('"a"', r'"a\ud83d"')]))
    *texts, chat = iter_records([file])
    assert [record.content for record in texts] == ["whole \U0001f600 \\ud83d", "a \ufffd emoji", "\ufffd"]
    assert chat.row is not None and chat.row["messages"][1]["content"] == "a\ufffd"
    words = f"3 rows are cut inside a character, which is read as U+FFFD, the first is {file}, line 2"
    assert words in caplog.messages


def test_training_runs_in_a_folder_are_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither their cards nor their answers; a folder that is named is read."""
    for name in ("notes/a.txt", "checkpoints/b.txt", "run/README.md", "run/target/c.txt", "half/answers.part.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "run/checkpoints/step-0000002").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-0000002/meta.json").write_text("{}")
    (tmp_path / "half/answers.json").write_text("{}")
    (tmp_path / "notes/answers.json").write_text("{}")
    assert [file.name for file in files_below(tmp_path)] == ["b.txt", "a.txt"]
    assert f"{tmp_path / 'run'} is the folder of a training run and skipped" in caplog.messages
    assert [file.name for file in files_below(tmp_path / "run")] == ["README.md", "c.txt"]
