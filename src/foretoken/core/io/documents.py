"""Text documents below files and folders."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")

CONVERSATIONS = ("messages", "conversations")
"""Keys of JSONL rows that hold a conversation: OpenAI's messages, and ShareGPT's turns."""


@dataclass(frozen=True)
class Record:
    """One document.

    Attributes:
        content: its text; of a conversation its JSON row.
        place: file and line, for messages about it.
        row: the JSON row of a conversation, else ``None``.
    """

    content: str
    place: str
    row: Mapping[str, Any] | None = None


def iter_documents(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield the texts below ``paths`` in sorted order.

    Raises:
        ValueError: as :func:`iter_records`, or a conversation, which has no text without a chat template.
    """
    for record in iter_records(paths):
        if record.row is not None:
            raise ValueError(f"{record.place} is a conversation, which only a model with a chat template can read")
        yield record.content


def iter_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """Yield the documents below ``paths`` in sorted order.

    Reads text files (``.py .txt .md .rst``), their zstandard-compressed forms (``.zst``), and ``.jsonl`` files whose
    rows carry ``text`` or ``prompt``, or ``messages`` or ``conversations``.  Undecodable files are skipped.

    Raises:
        ValueError: a path does not exist, a row of a JSONL file is no JSON, or one among conversations is no
            conversation; the message names the line.
    """
    for root in map(Path, paths):
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for file in files:
            yield from _records_of(file)


def _records_of(file: Path) -> Iterator[Record]:
    name = file.name.removesuffix(".zst")
    suffix = Path(name).suffix
    if suffix == ".jsonl":
        yield from _rows_of(file)
    elif suffix in TEXT_SUFFIXES:
        for piece in _pieces(_read(file)):
            yield Record(piece, str(file))


def _rows_of(file: Path) -> Iterator[Record]:
    """Texts and conversations; rows that are neither are passed over among texts, and refused behind a conversation."""
    chats = False
    for place, line, row in iter_rows(file):
        if isinstance(row, dict) and any(key in row for key in CONVERSATIONS):
            chats = True
            yield Record(line, place, row)
            continue
        text = (row.get("text") or row.get("prompt")) if isinstance(row, dict) else None
        if isinstance(text, str) and text:
            yield Record(text, place)
        elif chats:
            known = "'messages', 'conversations', 'text' or 'prompt'"
            raise ValueError(f"{place} has no conversation: a row is an object with {known}")


def iter_rows(file: Path) -> Iterator[tuple[str, str, Any]]:
    """Of every line of a JSONL file that is not empty: file and number, the line, and its value.

    Raises:
        ValueError: a line that is no JSON.
    """
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, as they are.
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            yield place, line, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON: {error}") from None


def _read(file: Path) -> str:
    raw = file.read_bytes()
    if file.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{file} is zstandard-compressed: pip install 'foretoken[train]'") from None
        try:
            raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
        except zstandard.ZstdError as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return ""


def _pieces(text: str) -> Iterator[str]:
    """Documents of at most 200,000 characters, cut at line breaks, so that one book is not one document."""
    start = 0
    while start < len(text):
        end = min(start + 200_000, len(text))
        if end < len(text):
            line_break = text.rfind("\n", start, end)
            end = line_break + 1 if line_break > start else end
        yield text[start:end]
        start = end
