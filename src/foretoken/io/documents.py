"""Text documents below files and folders."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
MAX_DOCUMENT_CHARS = 200_000
"""Longer files are cut into documents of this length at a line break, so that one book is not one document."""


def iter_documents(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield the documents below ``paths`` in sorted order.

    Reads text files (``.py .txt .md .rst``), their zstandard-compressed forms (``.zst``), and ``.jsonl`` files whose
    rows carry ``text`` or ``prompt``.  Undecodable files are skipped.

    Raises:
        ValueError: when a path does not exist.
    """
    for root in map(Path, paths):
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for file in files:
            yield from _documents_of(file)


def _documents_of(file: Path) -> Iterator[str]:
    name = file.name.removesuffix(".zst")
    suffix = Path(name).suffix
    if suffix == ".jsonl":
        yield from _texts_of_rows(file)
    elif suffix in TEXT_SUFFIXES:
        yield from _pieces(_read(file))


def _texts_of_rows(file: Path) -> Iterator[str]:
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, as they are.
    for number, line in enumerate(_read(file).split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
        text = (row.get("text") or row.get("prompt")) if isinstance(row, dict) else None
        if isinstance(text, str) and text:
            yield text


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
    start = 0
    while start < len(text):
        end = min(start + MAX_DOCUMENT_CHARS, len(text))
        if end < len(text):
            line_break = text.rfind("\n", start, end)
            end = line_break + 1 if line_break > start else end
        yield text[start:end]
        start = end
