"""Calls of tools in what a model writes: each format, whole and in pieces of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from foretoken.server.call_reader import Call, CallReader

OFFERED = {"look", "find", "a.b"}
FRAGMENTS = [
    *("{", "}", "[", "]", '"', "'", "\\", ";", ":", ",", " ", "\n", "1", "na", "note", "name", "arguments", "look"),
    *("<tool", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"note', '{"ans', '{"name"'),
    *("look{", '{"x": 1}', "look(x=1)", "[look(x=1)]", '{"name": "look", "arguments": {}}'),
]
ONE = '{"name": "look", "arguments": {"x": 1}}'


def shown(parts: list[str | Call]) -> list[Any]:
    """Texts as they are, calls as names and arguments."""
    return [part if isinstance(part, str) else (part.name, json.loads(part.arguments)) for part in parts]


def read(text: str, most: int | None = None) -> list[Any]:
    """The parts of a text; the same however it is cut into pieces."""
    whole = shown(CallReader(OFFERED, most).push(text, final=True))
    for size in (1, 2, 3, 7):
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert read_pieces(pieces, most) == whole, size
    return whole


def read_pieces(pieces: list[str], most: int | None = None) -> list[Any]:
    """The parts of a text that comes in these pieces, texts that follow one another as one."""
    reader, merged = CallReader(OFFERED, most), []
    parts = [part for piece in pieces for part in reader.push(piece, final=False)] + reader.push("", final=True)
    for part in shown(parts):
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"Hi.\n<tool_call>\n{ONE}\n</tool_call>", ["Hi.", ("look", {"x": 1})]),
        (f"<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", [("look", {"x": 1})] * 2),
        (f"<tool_call>{ONE}", [("look", {"x": 1})]),
        (f"<tool_call>{ONE}\n</tool_ca", [("look", {"x": 1})]),  # a limit cut the closing tag
        (f"<tool_call>{ONE}</tool_call>\nDone.", [("look", {"x": 1}), "Done."]),
        (f"[TOOL_CALLS] [{ONE}, {ONE}]", [("look", {"x": 1})] * 2),
        (f"[{ONE}]", [("look", {"x": 1})]),
        (f"[{ONE}]; ; {ONE} ;;\nDone.", [*[("look", {"x": 1})] * 2, "Done."]),
        (f"{ONE}\n{ONE}\nDone.", [*[("look", {"x": 1})] * 2, "Done."]),
        ('[TOOL_CALLS]look[ARGS]{"x": 1}[TOOL_CALLS]find{"y": 2}', [("look", {"x": 1}), ("find", {"y": 2})]),
        ('look{"x": "}"}', [("look", {"x": "}"})]),
        ('<|python_tag|>{"name": "look", "parameters": {"x": 1}}', [("look", {"x": 1})]),
        ('{"name": "look", "parameters": {}}; {"name": "find", "parameters": {}}', [("look", {}), ("find", {})]),
        ("[look(s=\"a]b'\", t=true), a.b(y=[None])]", [("look", {"s": "a]b'", "t": True}), ("a.b", {"y": [None]})]),
        ('<tool_call>{"name": "look", "arguments": "{\\"x\\": 1}"}</tool_call>', [("look", {"x": 1})]),
        (f'{{"note <tool_call>\n{ONE}\n</tool_call>', ['{"note', ("look", {"x": 1})]),
        ('<tool_call>{"name": "look", "arguments": {"s": "\\ud800"}}</tool_call>', [("look", {"s": "\ud800"})]),
    ],
)  # fmt: skip
def test_formats(text: str, parts: list[Any]) -> None:
    assert read(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "Hello,  world \n",
        "  \n indented",
        "a < b, <tool, [TOOL_CALL and <|python",
        "look at this",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": ',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>',
        f'[{ONE}, {{"name": "other"}}]',
        '{"answer": {"name": "look"}}',
        f"The call is {ONE}",
        "[1, 2, 3]",
        "[look(1)]",
        '[look(x=__import__("os"))]',
        "[look(x=y)]",
        "]}",
        "[" * 3000 + "]" * 3000,
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(text: str) -> None:
    assert read(text) == [text]


def test_a_stream_says_what_an_answer_in_one_piece_says() -> None:
    """Of 3,000 random texts, some read otherwise where a piece ended inside of the first key."""
    draws = random.Random(7)
    for _ in range(3000):
        text = "".join(draws.choices(FRAGMENTS, k=draws.randint(1, 10)))
        most, longest, pieces, at = draws.choice([None, 1]), draws.choice([1, 4, 20]), [], 0
        while at < len(text):
            pieces.append(text[at : at + draws.randint(1, longest)])
            at += len(pieces[-1])
        assert read_pieces(pieces, most) == shown(CallReader(OFFERED, most).push(text, final=True)), pieces


def test_calls_beyond_the_last_one_allowed_are_left_out() -> None:
    assert read(f"Hi <tool_call>{ONE}</tool_call> and <tool_call>{ONE}</tool_call>", most=1) == [
        "Hi",
        ("look", {"x": 1}),
    ]


def test_without_tools_everything_is_text() -> None:
    text = f"<tool_call>{ONE}</tool_call>"
    assert CallReader(()).push(text, final=False) == [text]


def test_what_can_be_sent_is_not_held_back() -> None:
    reader = CallReader(OFFERED)
    assert reader.push("Let me see", final=False) == ["Let me see"]
    assert reader.push('. {"a": 1}', final=False) == ['. {"a": 1}']
    assert reader.push(" <tool", final=False) == []
    assert reader.push("box>", final=False) == [" <toolbox>"]
    early = CallReader(OFFERED)
    assert early.push('{"answer": ', final=False) == ['{"answer":']  # no call begins with that key
    cut = CallReader(OFFERED)
    assert cut.push('{"a', final=False) == []
    assert cut.push("ns", final=False) == ['{"ans']  # no key of a call begins so
    assert cut.push('wer": 1', final=False) == ['wer": 1']


def test_a_call_is_told_before_the_answer_ends() -> None:
    reader = CallReader(OFFERED)
    reader.push(f"<tool_call>{ONE}", final=False)
    assert shown(reader.push("\n</tool_call>", final=False)) == [("look", {"x": 1})]
    assert reader.count == 1
