"""Reader of tool calls in generated text: Hermes and Qwen, Llama 3, Mistral, and Python calls.

A call is reported when it is complete.  Text that may become a call is held back; if it turns out to be none (an
unknown function, invalid JSON, cut off by a limit), it is returned as text.  The same code reads streams and complete
answers, so they agree.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

HERMES_MARK, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL_MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
LLAMA_MARK = "<|python_tag|>"
MARKS = (HERMES_MARK, MISTRAL_MARK, LLAMA_MARK)
"""Marks that begin a call inside a text.  Without a mark only the whole answer may be a call."""
SIGNS = (*MARKS, HERMES_END, ARGUMENTS)
"""All that the reader looks for; some tokenizers have special tokens for these."""
KEYS = ("name", "arguments", "parameters", "type", "function", "id")
"""Keys of a call object; an object that begins with another key is an answer in JSON."""
_FIRST_KEY = re.compile(r'\[?\s*(?:\{\s*(?:"([^"\\]*)(["\\]?))?)?')
"""The first key as far as it is written, and the next character: the end quote, or a backslash, after which any key is
possible."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[ARGS\])?\s*(?=\{)")
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"\A[\s;]+")
_BEGUN = re.compile(r"[A-Za-z0-9_.-]{1,64}\s*(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*")
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Call:
    """One tool call; ``arguments`` is a JSON object as text, and ``id`` links the call to its result."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def function(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Splits an answer into text and calls.

    The remaining text is in one of four states:

    =============  ==========  ====================================================================
    text                       a mark may follow, or, while ``_bare``, a call without one
    maybe a call               its beginning is too short to tell, and is held back
    inside a call  ``_value``  behind the mark of ``_opening``, until its last bracket has arrived
    behind a call  ``_after``  separators are dropped, then it is text again
    =============  ==========  ====================================================================

    Args:
        offered: names of the functions that may be called; if empty, everything is text.
        most: maximum number of calls reported; anything after the last is dropped.

    Attributes:
        count: number of calls so far.
        ends: ends of the last parts returned, in characters of the answer.
    """

    def __init__(self, offered: Collection[str], most: int | None = None) -> None:
        self._offered, self._most = frozenset(offered), most
        self._text = ""  # text not yet returned
        self._bare = True  # whether a call may begin without a mark: no text was returned yet
        self._after = False  # whether a call came last: white space and separators after it are dropped
        self._value: _Value | None = None  # of the call being written
        self._opening: tuple[int, str] = (0, "")  # its position and mark
        self.count = self._read = 0
        self.ends: list[int] = []

    def push(self, new: str, final: bool) -> list[str | Call]:
        """New certain parts, in order; texts are never empty or adjacent.  ``final`` marks the last text."""
        self._read += len(new)
        if not self._offered:
            self.ends = [self._read] if new else []
            return [new] if new else []
        self._text += new
        certain: list[str | Call] = []
        self.ends = []
        while self._text and (parts := self._step(final)) is not None:
            for part in parts:
                if isinstance(part, str) and certain and isinstance(certain[-1], str):
                    certain[-1] += part
                    self.ends[-1] = self._read - len(self._text)
                elif part:
                    certain.append(part)
                    self.ends.append(self._read - len(self._text))
        return certain

    def _step(self, final: bool) -> list[str | Call] | None:
        """Text or calls from the beginning of the remaining text; ``None`` if more is needed."""
        if self._most is not None and self.count >= self._most:
            self._text = ""
            return []
        if self._after and not self._skip():
            return None
        begin, mark = self._opening
        try:
            if self._value is None:
                begin, mark = self._opening = self._begin()
                if begin == len(self._text):
                    return self._plain(final)
                before = self._text[:begin].rstrip()
                if before:
                    return self._tell(len(before))
            end, calls = self._block(begin + len(mark), mark, final)
        except _Incomplete:
            return self._tell(len(self._text)) if final else None
        except _NoCall:
            return self._tell(begin + max(len(mark), 1))
        self._text, self._value, self._after = self._text[end:], None, True
        self._bare = mark in ("", LLAMA_MARK)  # more may follow, as in Llama's format or one per line
        calls = calls[: None if self._most is None else self._most - self.count]
        self.count += len(calls)
        return list(calls)

    def _skip(self) -> bool:
        """Drop separators between calls; false if nothing else remains."""
        self._text = _SEPARATORS.sub("", self._text) if self._bare else self._text.lstrip()
        self._after = not self._text
        return bool(self._text)

    def _tell(self, size: int) -> list[str | Call]:
        """Return the first ``size`` characters as text."""
        text, self._text, self._value = self._text[:size], self._text[size:], None
        self._bare = self._bare and not text.strip()
        return [text]

    def _begin(self) -> tuple[int, str]:
        """Position and mark of the next possible call; the end of the text if there is none."""
        bare = self._text.lstrip()
        if self._bare and not bare.startswith(MARKS):
            openings = [f"{name}{sign}" for name in self._offered for sign in ("{", ARGUMENTS)]
            if any(opening.startswith(bare) for opening in (*MARKS, *openings)):
                raise _Incomplete
            if bare[0] in "{[" or bare.startswith(tuple(openings)):
                return len(self._text) - len(bare), ""
        marks = [(start, mark) for mark in MARKS if (start := self._text.find(mark)) >= 0]
        return min(marks) if marks else (len(self._text), "")

    def _plain(self, final: bool) -> list[str | Call] | None:
        """Text before any call, without a possible beginning of one."""
        size = len(self._text)
        if not final:
            size = len(self._text.rstrip())
            size -= max(
                (n for mark in MARKS for n in range(1, len(mark)) if self._text.endswith(mark[:n], 0, size)), default=0
            )
            size = len(self._text[:size].rstrip())
        return self._tell(size) if size else None

    def _block(self, at: int, mark: str, final: bool) -> tuple[int, list[Call]]:
        """End of a call or a list of calls, and the calls.  Raises :class:`_Incomplete` if more text is needed, and
        :class:`_NoCall` if it is something else."""
        value = self._value = self._value or self._opened(at)
        end = value.end(self._text)
        call_text = self._text[value.start : end]
        calls = _python_calls(call_text) if value.python else _json_calls(call_text, value.name)
        if not calls or not all(call.name in self._offered for call in calls):
            raise _NoCall
        return (_behind(self._text, end, final) if mark == HERMES_MARK else end), calls

    def _opened(self, at: int) -> _Value:
        """The value after a mark."""
        text = self._text
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        name, at = ("", at) if text[at : at + 1] in ("{", "[", "") else self._name(at)
        if at >= len(text):
            raise _Incomplete
        if not name:
            self._check_key(at)
        return _Value(at, name, not name and text[at] == "[" and not _opens_json(text[at + 1 :]))

    def _check_key(self, at: int) -> None:
        """Check whether a call may begin with this key; not repeated once the value's end is searched.  Raises
        :class:`_Incomplete` while that is uncertain, and :class:`_NoCall` if it may not."""
        first: re.Match[str] = _FIRST_KEY.match(self._text, at)  # type: ignore[assignment]  # it always matches
        key, quote = first[1], first[2]
        if key is not None and not (
            key in KEYS if quote == '"' else any(candidate.startswith(key) for candidate in KEYS)
        ):
            raise _NoCall
        if not quote and first.end() == len(self._text):
            raise _Incomplete

    def _name(self, at: int) -> tuple[str, int]:
        """Name before the arguments, as Mistral's newer models write it, and the position of the arguments."""
        whole = _NAMED.match(self._text, at)
        if whole is not None:
            return whole[1], whole.end()
        if _BEGUN.fullmatch(self._text, at) is not None:
            raise _Incomplete
        raise _NoCall


class _Incomplete(Exception):
    """A possible call is incomplete."""


class _NoCall(Exception):
    """The text is no call."""


class _Value:
    """Finds the end of a bracketed value in a growing text.  ``name`` is the function's, if it precedes the value; a
    Python value (``python``) may also have single quotes."""

    def __init__(self, start: int, name: str, python: bool) -> None:
        self.start, self.name, self.python = start, name, python
        self._at, self._quotes = start, "\"'" if python else '"'
        self._depth, self._quote, self._escaped = 0, "", False
        self._end: int | None = None

    def end(self, text: str) -> int:
        """Position after the last bracket.  Raises ``_Incomplete`` if it has not arrived yet."""
        while self._end is None:
            if self._at >= len(text):
                raise _Incomplete
            sign = text[self._at]
            self._at += 1
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == self._quote:
                    self._quote = ""
            elif sign in self._quotes:
                self._quote = sign
            elif sign in "([{":
                self._depth += 1
            elif sign in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._end = self._at
        return self._end


def _opens_json(tail: str) -> bool:
    """Whether a list whose first character was read holds objects.  Raises ``_Incomplete`` without further text."""
    if not tail.strip():
        raise _Incomplete
    return tail.lstrip()[0] in "{]"


def _behind(text: str, end: int, final: bool) -> int:
    """Position after Hermes's closing tag, which some models omit.  Raises :class:`_Incomplete` while it may still
    come."""
    tail = text[end:].lstrip()
    if tail.startswith(HERMES_END):
        return len(text) - len(tail) + len(HERMES_END)
    if HERMES_END.startswith(tail):
        if not final:
            raise _Incomplete
        return len(text)  # a limit cut the tag, which is no text
    return end


def _json_calls(text: str, name: str) -> list[Call]:
    """Calls in a JSON object or a list of them; with ``name`` the object is that function's arguments.  Raises
    :class:`_NoCall` for anything else."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise _NoCall from None
    if name:
        return [_call(name, parsed)]
    return [_from_object(item) for item in (parsed if isinstance(parsed, list) else [parsed])]


def _from_object(call: Any) -> Call:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _NoCall
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write arguments as text, as in OpenAI's API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _NoCall from None
    return _call(call["name"], arguments)


def _call(name: str, arguments: Any) -> Call:
    """A call, if its arguments are an object that can be sent."""
    if not isinstance(arguments, dict):
        raise _NoCall
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only its escape can be sent
        text = json.dumps(arguments, allow_nan=False)
    except ValueError:
        raise _NoCall from None
    return Call(name, text)


def _python_calls(text: str) -> list[Call]:
    """Calls in a Python list, ``[look(x=1), find(name="a")]``; only constants are read, and nothing is executed."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _NoCall from None
    if not isinstance(tree, ast.List):
        raise _NoCall
    return [_python_call(element) for element in tree.elts]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise _NoCall
    try:
        arguments = {str(keyword.arg): _constant(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise _NoCall from None
    if len(arguments) != len(node.keywords):
        raise _NoCall
    return _call(ast.unparse(node.func), arguments)


def _constant(node: ast.expr) -> Any:
    """A JSON value; models mix Python's and JSON's names."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_constant(key)): _constant(element) for key, element in zip(node.keys, node.values, strict=True) if key
        }
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value
