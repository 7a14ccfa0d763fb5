"""Text documents in files and folders."""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.core.conversation import SPEAKERS

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
ROWS = ".jsonl"
CONVERSATIONS = ("messages", "conversations")
"""Keys of JSONL rows that hold a conversation: OpenAI's messages, and ShareGPT's turns."""

SURROGATE, ESCAPED_SURROGATE = re.compile(r"[\ud800-\udfff]"), re.compile(r"\\u[dD][89a-fA-F]")


class NotTextError(ValueError):
    """A file is not UTF-8 text."""


@dataclass(frozen=True)
class Record:
    """One document.

    Attributes:
        content: its text; for a conversation, its messages as JSON without the row's other fields.
        location: file and line, for error messages.
        row: the row of a conversation, with ``messages`` or ``conversations``; else ``None``.
    """

    content: str
    location: str
    row: Mapping[str, Any] | None = None


def iter_documents(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield the texts in ``paths`` in sorted order. Raises ``ValueError`` as :func:`iter_records` does, and for a
    conversation, which has no text without a chat template."""
    for record in iter_records(paths):
        if record.row is not None:
            raise ValueError(f"{record.location} is a conversation, which only a model with a chat template can read")
        yield record.content


def iter_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """Yield the documents in ``paths`` in sorted order.

    Reads text files (``.py .txt .md .rst``) and ``.jsonl`` files whose rows have ``text`` or ``prompt`` or are
    conversations (:func:`conversation_of`); also compressed (``.zst``, ``.gz``). In a folder, files of other kinds are
    skipped. Text files that are not UTF-8, and rows of another shape in files without a conversation, are skipped with
    a warning.

    Raises:
        ValueError: a path does not exist, a named file is of another kind or not UTF-8, a JSONL file is not UTF-8, a
            row is not JSON, or a row of a named file or among conversations has another shape; the message names the
            line.
    """
    roots = list(map(Path, paths))
    for root in roots:
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        if root.is_file() and not kind_of(root):
            kinds = ", ".join((*TEXT_SUFFIXES, ROWS))
            raise ValueError(f"{root} has an unsupported file type: give {kinds}, or one of them as .zst or .gz")
    broken: list[Path] = []
    for root in roots:
        is_single = root.is_file()
        for file in [root] if is_single else files_below(root):
            if kind_of(file) == ROWS:
                yield from _rows_of(file, is_single)
                continue
            try:
                text = _read(file)
            except NotTextError:
                if is_single:
                    raise
                broken.append(file)
                continue
            yield from (Record(piece, str(file)) for piece in _pieces(text))
    if broken:
        _warn(f"{_count(broken, 'file')} not UTF-8 text and skipped, the first is {broken[0]}")


def kind_of(file: Path) -> str:
    """The suffix of a readable file, without that of its compression; empty for others."""
    suffix = Path(file.stem).suffix if file.suffix in (".zst", ".gz") else file.suffix
    return suffix if suffix in (*TEXT_SUFFIXES, ROWS) else ""


def files_below(folder: Path) -> list[Path]:
    """The readable files in a folder, sorted. Those of training runs in it are skipped with a warning: a run must not
    learn from its own card and answers."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and kind_of(file))
    inner = {parent for file in files for parent in file.parents if folder in parent.parents}
    runs = {parent for parent in inner if _is_run(parent)}
    for run in sorted(runs):
        _warn(f"{run} is the folder of a training run and skipped")
    return [file for file in files if runs.isdisjoint(file.parents)]


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a checkpoint or the answers of a training run."""
    answers = (folder / name for name in ("answers.jsonl", "answers.part.jsonl"))
    if (folder / "answers.json").exists() and any(file.exists() for file in answers):
        return True
    return any(folder.glob("checkpoints/step-*/meta.json"))


def _rows_of(file: Path, is_single: bool) -> Iterator[Record]:
    """Texts and conversations of a file. Raises ``ValueError`` for other rows, unless the file was found in a folder
    and holds only texts."""
    chats, others = False, list[str]()
    for location, _, row in iter_rows(file):
        try:
            record = _record(row, location)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        if record is None:
            others.append(location)
        else:
            chats = chats or record.row is not None
        if others and (chats or is_single):
            fields = "'messages', 'conversations', 'text' or 'prompt', or a question and its answer"
            raise ValueError(
                f"{others[0]} has no {'conversation' if chats else 'text'}: a row is an object with {fields}"
            )
        if record is not None and record.content:
            yield record
    if others:
        _warn(f"{_count(others, 'row')} of another shape and skipped, the first is {others[0]}")


def _record(row: Any, location: str) -> Record | None:
    """A row's text (may be empty) or conversation; ``None`` without either."""
    if not isinstance(row, dict):
        return None
    conversation = conversation_of(row)
    if conversation is not None:
        return Record(_said(conversation), location, conversation)
    text = row.get("text") or row.get("prompt")
    if isinstance(text, str):
        return Record(text, location)
    return Record("", location) if text is None and ("text" in row or "prompt" in row) else None


def _said(row: Mapping[str, Any]) -> str:
    """Content of a conversation, as messages or in ShareGPT's form, independent of the numbering of its row and
    messages."""
    messages = next(row[key] for key in CONVERSATIONS if key in row)
    turns = messages if isinstance(messages, list) else [messages]
    texts = [_identity_of(turn) if isinstance(turn, dict) else turn for turn in turns]
    return json.dumps([texts, row.get("tools")], sort_keys=True)


def _identity_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The identifying keys of a turn; one of a known ShareGPT speaker in the form of a message."""
    role = SPEAKERS.get(str(turn.get("from")))
    if "role" not in turn and role is not None:
        turn = {"role": role, "content": turn.get("value")}
    # Other keys may be the author's numbering.
    return {key: turn.get(key) for key in ("role", "from", "content", "value")}


def conversation_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row itself if it holds a conversation. A question (:func:`asked_of`) with its answer as ``messages``
    (``response``, ``completion``, ``answer`` or ``output``: a text, or messages). ``None`` for others, and with a
    ``text``. Raises ``ValueError`` for several questions or answers, and for values of another type."""
    if any(key in row for key in CONVERSATIONS):
        return row
    answers = [key for key in ("response", "completion", "answer", "output") if row.get(key) is not None]
    questions = asked_of(row) if answers and not row.get("text") else []
    if not questions:
        return None
    if len(answers) > 1:
        raise ValueError(f"a question must have one answer, and this one has {' and '.join(map(repr, answers))}")
    more = {"tools": row["tools"]} if row.get("tools") else {}
    return {"messages": [*questions, *_turns(row, answers[0], "assistant")], **more}


def asked_of(row: Mapping[str, Any]) -> list[Any]:
    """The messages of a row with a ``prompt``, ``instruction`` or ``question``; else empty.

    A ``system`` or ``system_prompt`` precedes them. Alpaca's ``input`` and Dolly's ``context``, texts, extend an
    ``instruction``. Raises ``ValueError`` for several questions, or one that is neither text nor messages.
    """
    keys = [key for key in ("prompt", "instruction", "question") if row.get(key)]
    if not keys:
        return []
    if len(keys) > 1:
        raise ValueError(f"a row must have one question, and this one has {' and '.join(map(repr, keys))}")
    beside = [key for key in ("input", "context", "history") if row.get(key)]
    if beside and (keys[0] != "instruction" or "history" in beside):
        raise ValueError(f"{beside[-1]!r} beside {keys[0]!r} is ambiguous: give 'messages'")
    first = next((_turns(row, key, "system") for key in ("system", "system_prompt") if row.get(key)), [])
    questions = _turns(row, keys[0], "user")
    for key in beside:
        text = questions[-1].get("content")
        if not isinstance(text, str) or isinstance(row[key], list):
            raise ValueError(f"{key!r} extends {keys[0]!r} only where both are text: give 'messages'")
        (context,) = _turns(row, key, "user")
        questions[-1] = {**questions[-1], "content": f"{text}\n\n{context['content']}"}
    return [*first, *questions]


def _turns(row: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """A text as a message with this role; messages unchanged."""
    value = row[key]
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return list(value)
    raise ValueError(f"{key!r} must be non-empty text, or a list of messages")


def iter_rows(file: Path) -> Iterator[tuple[str, str, Any]]:
    """Location (file and line number), text and value of every non-empty line of a JSONL file. Raises ``ValueError``
    for a line that is not JSON.

    JSON can escape half a surrogate pair, as in text cut inside an emoji. It is read as U+FFFD, with a warning."""
    cut: list[str] = []
    # Not splitlines(): JSON strings may contain other line separators, such as U+2028, unescaped.
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        location = f"{file}, line {number}"
        try:
            value = json.loads(line)
            if ESCAPED_SURROGATE.search(line):
                text = json.dumps(value, ensure_ascii=False)
                if SURROGATE.search(text):  # whole pairs are characters by now
                    value = json.loads(SURROGATE.sub("\ufffd", text))
                    cut.append(location)
            yield location, line, value
        except json.JSONDecodeError as error:
            raise ValueError(f"{location} is not JSON: {error.msg} (column {error.colno})") from None
        except RecursionError as error:
            raise ValueError(f"{location} is not JSON: {error}") from None
    if cut:
        _warn(f"{_count(cut, 'row')} cut inside a character, which is read as U+FFFD, the first is {cut[0]}")


def _read(file: Path) -> str:
    raw = file.read_bytes()
    if file.suffix == ".zst":
        raw = _decompressed(raw, file)
    if file.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")  # a byte order mark, which some editors write
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise NotTextError(f"{file} is not UTF-8 text: line {line} has the byte 0x{raw[error.start]:02x}") from None


def _decompressed(raw: bytes, file: Path) -> bytes:
    """The content of all zstandard frames of a file. Raises ``ValueError`` for a damaged one."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{file} is zstandard-compressed: pip install 'foretoken[train]'") from None
    pieces = []
    while raw:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            pieces.append(frame.decompress(raw))
        except zstandard.ZstdError as error:
            raise ValueError(f"{file} is damaged: {error}") from None
        if not frame.eof:  # a stream reader would return what it has
            raise ValueError(f"{file} is damaged: its last frame is incomplete")
        raw = frame.unused_data
    return b"".join(pieces)


def _count(faults: Sequence[object], name: str) -> str:
    return f"one {name} is" if len(faults) == 1 else f"{len(faults)} {name}s are"


@cache
def _warn(line: str) -> None:
    """Log a warning once, though files are read several times."""
    logging.getLogger("foretoken").warning("%s", line)


def _pieces(text: str) -> Iterator[str]:
    """Documents of at most 200,000 characters, cut at line breaks, so that a book is several documents."""
    start = 0
    while start < len(text):
        end = min(start + 200_000, len(text))
        if end < len(text):
            line_break = text.rfind("\n", start, end)
            end = line_break + 1 if line_break > start else end
        yield text[start:end]
        start = end
