"""Files of token ids: a container with version, checksum and tokenizer fingerprint, and the datastore of ``retrieval``.

A datastore is a corpus of token ids and its suffix array.  It is memory-mapped: several processes share one copy, and
opening it reads it once (for the checksum).  Token ids are big-endian int32, so that comparing bytes compares tokens.
A separator (-1, no token of any vocabulary) follows every document, so that no match crosses documents.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.core.io.documents import iter_documents
from foretoken.core.io.files import checksum, replacing
from foretoken.core.io.hub_ids import expanded

MAGIC = b"FORETOKN"
VERSION = 1
PREFIX = struct.Struct("<8sII16s16s")  # magic, version, header bytes, digest of the header, digest of the arrays
ALIGN = 64
SEPARATOR = -1
DEPTH = 64
"""Suffixes are sorted by their first 64 tokens; longer n-grams cannot be looked up."""

Array = NDArray[Any]
Progress = Callable[[str, int, int | None], None]
"""Called with a description of the step, the amount done, and the total (``None`` if unknown)."""


def fingerprint(tokenizer: Any) -> str:
    """Digest of a tokenizer's vocabulary; equal for equal ids."""
    return checksum(json.dumps(sorted(tokenizer.get_vocab().items())), 16)


# -- the container ---------------------------------------------------------------------------------------------------


def write_arrays(path: str | Path, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write arrays to ``path`` via a temporary file: an interrupted write leaves an old file intact."""
    path = expanded(path)
    layouts, offset = {}, 0
    for name, array in arrays.items():
        layouts[name] = [array.dtype.str, len(array), offset]
        offset += -(-array.nbytes // ALIGN) * ALIGN
    header = json.dumps({"kind": kind, "bytes": offset, "arrays": layouts, **meta}).encode()
    header += b" " * (-(PREFIX.size + len(header)) % ALIGN)
    with replacing(path) as draft, draft.open("wb") as file:
        file.write(b"\0" * PREFIX.size + header)
        digest = hashlib.blake2b(digest_size=16)
        for chunk in _chunks(arrays.values()):
            digest.update(chunk)
            file.write(chunk)
        file.seek(0)
        file.write(PREFIX.pack(MAGIC, VERSION, len(header), _digest(header), digest.digest()))
        file.flush()
        os.fsync(file.fileno())


def _chunks(arrays: Iterable[Array], chunk_bytes: int = 1 << 22) -> Iterator[bytes]:
    for array in arrays:
        step = max(1, chunk_bytes // array.dtype.itemsize)
        for start in range(0, len(array), step):
            yield array[start : start + step].tobytes()
        yield b"\0" * (-array.nbytes % ALIGN)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True)
class ArrayFile:
    """An opened file: its header, its memory-mapped bytes, and each array with its offset."""

    meta: dict[str, Any]
    data: mmap.mmap
    arrays: dict[str, Array]
    offsets: dict[str, int]


def read_arrays(path: str | Path, kind: str, tokenizer_fingerprint: str | None = None) -> ArrayFile:
    """Open a file written by :func:`write_arrays`; its arrays are read-only views of the memory map.

    Raises:
        ValueError: the file is missing, truncated, corrupt, no foretoken file, of another kind or version, or made with
            another tokenizer.
    """
    path = expanded(path)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot open {path}: {getattr(error, 'strerror', None) or 'the file is empty'}") from None
    meta, start = _read_header(path, data, kind)
    if tokenizer_fingerprint and meta.get("fingerprint") and meta["fingerprint"] != tokenizer_fingerprint:
        raise ValueError(f"{path} was made with another tokenizer than the target's: build it again for this target")
    arrays, offsets = {}, {}
    for name, (dtype, count, offset) in meta["arrays"].items():
        offsets[name] = start + offset
        arrays[name] = np.frombuffer(data, np.dtype(dtype), count, start + offset)
    return ArrayFile(meta, data, arrays, offsets)


def _read_header(path: Path, data: mmap.mmap, kind: str) -> tuple[dict[str, Any], int]:
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is not a foretoken file: build it with 'foretoken datastore build'")
    if len(data) < PREFIX.size:
        raise ValueError(f"{path} is truncated: build it again")
    _, version, size, header_digest, digest = PREFIX.unpack(data[: PREFIX.size])
    if version != VERSION:
        raise ValueError(f"{path} has format version {version}, this foretoken reads {VERSION}: build it again")
    start = PREFIX.size + size
    header = data[PREFIX.size : start]
    if len(header) < size:
        raise ValueError(f"{path} is truncated: build it again")
    if _digest(header) != header_digest:
        raise ValueError(f"{path} is corrupt (its header does not match its checksum): build it again")
    meta: dict[str, Any] = json.loads(header)
    if meta["kind"] != kind:
        raise ValueError(f"{path} is a file of kind {meta['kind']!r}, not {kind!r}")
    if len(data) != start + meta["bytes"]:
        raise ValueError(f"{path} is truncated ({len(data)} of {start + meta['bytes']} bytes): build it again")
    if _digest(memoryview(data)[start:]) != digest:
        raise ValueError(f"{path} is corrupt (its content does not match its checksum): build it again")
    return meta, start


# -- the datastore ---------------------------------------------------------------------------------------------------


class Datastore:
    """A corpus that is searched for the end of a context.

    Args:
        tokens: [T] int32 ids, a separator after every document.
        order: [S] uint32 positions of the suffixes in sorted order (separators left out).
        data: an object whose slices are bytes and which holds the big-endian tokens; made from ``tokens`` by default.
        offset: offset of the tokens in ``data``.
        meta: header of the file.
    """

    def __init__(
        self, tokens: Array, order: Array, data: Any = None, offset: int = 0, meta: dict[str, Any] | None = None
    ) -> None:
        self.tokens, self.order, self.meta = tokens, order, meta or {}
        self._data = tokens.astype(">i4").tobytes() if data is None else data
        self._offset = offset
        self._positions = np.ascontiguousarray(order, np.uint32).data

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[int]]) -> Datastore:
        """An in-memory datastore.  Raises ``ValueError`` if there are no tokens."""
        tokens = joined(documents)
        if not (tokens != SEPARATOR).any():
            raise ValueError("the corpus is empty: a datastore needs at least one token")
        return cls(tokens, suffix_order(tokens))

    @classmethod
    def open(cls, path: str | Path, tokenizer: Any | None = None) -> Datastore:
        """Map a file made by :func:`build_datastore`.

        Raises:
            ValueError: see :func:`read_arrays`.
        """
        file = read_arrays(path, "datastore", fingerprint(tokenizer) if tokenizer is not None else None)
        return cls(file.arrays["tokens"], file.arrays["order"], file.data, file.offsets["tokens"], file.meta)

    def __len__(self) -> int:
        """Number of matchable tokens."""
        return len(self.order)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that the target's vocabulary has every token.

        Raises:
            ValueError: an id is outside the vocabulary; the datastore was made with another tokenizer.
        """
        largest = int(self.meta["largest_token"]) if self.meta else int(self.tokens.max())
        if largest >= vocab_size:
            raise ValueError(
                f"the datastore holds token {largest} and the target's vocabulary has {vocab_size}: "
                "it was made with another tokenizer, build it again for this target"
            )

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Rows ``[low, high)`` of ``order`` whose suffixes begin with ``tokens`` (at most 64 of them)."""
        pattern = _big_endian(tokens)
        low = bisect_left(self._positions, pattern, key=self._reader(len(pattern)))
        return low, bisect_right(self._positions, pattern, lo=low, key=self._reader(len(pattern)))

    def longest(self, context: Sequence[int], max_n: int, min_n: int = 1) -> tuple[int, int, int]:
        """Length (0: none) and ``order`` rows of the longest n-gram that ends ``context`` and occurs in the corpus.

        An n-gram can only occur if the shorter ones do, so a binary search finds the length.
        """
        best, low, high = 0, 0, 0
        shortest, longest = min_n, min(max_n, len(context))
        ending = _big_endian(context[-longest:]) if longest > 0 else b""
        while shortest <= longest:
            n = (shortest + longest + 1) // 2
            pattern = ending[-4 * n :]
            read = self._reader(4 * n)
            row = bisect_left(self._positions, pattern, key=read)
            if row < len(self._positions) and read(self._positions[row]) == pattern:
                best, low, shortest = n, row, n + 1
            else:
                longest = n - 1
        if best:
            high = bisect_right(self._positions, ending[-4 * best :], lo=low, key=self._reader(4 * best))
        return best, low, high

    def _reader(self, size: int) -> Callable[[int], bytes]:
        data, offset = self._data, self._offset

        def read(position: int) -> bytes:
            start = offset + 4 * position
            return data[start : start + size]

        return read

    def continuations(self, rows: Array, skip: int, length: int) -> Array:
        """[R, length] tokens that follow ``skip`` tokens after the suffixes in ``rows`` of ``order``."""
        starts = self.order[rows].astype(np.int64)[:, None] + np.arange(skip, skip + length)
        # Positions past the end of the corpus read its last token, a separator.
        return self.tokens[np.minimum(starts, len(self.tokens) - 1)].astype(np.int32)


def _big_endian(tokens: Sequence[int]) -> bytes:
    return struct.pack(f">{len(tokens)}i", *tokens)


def joined(documents: Iterable[Sequence[int]]) -> Array:
    """[T] int32: all documents, a separator after each."""
    parts = []
    for document in documents:
        parts.append(np.asarray([*document, SEPARATOR], np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def suffix_order(tokens: Array, on_step: Callable[[int, int], None] | None = None) -> Array:
    """[S] uint32: positions sorted by the 64 tokens that begin there (equal ones by position), separators left out.

    Prefix doubling: the order by 2h tokens follows from the orders by h tokens at a position and h positions later.
    Manber and Myers 1993, with NumPy's sort.
    """
    size = len(tokens)
    order = np.argsort(tokens.astype(np.uint32), kind="stable")
    rank = _ranks(tokens.astype(np.int64)[order], order)
    width, steps = 1, DEPTH.bit_length() - 1
    for step in range(steps):
        if on_step is not None:
            on_step(step, steps)
        following = np.zeros(size, np.int64)
        if width < size:
            following[:-width] = rank[width:] + 1
        key = rank * (size + 1) + following
        order = np.argsort(key, kind="stable")
        rank = _ranks(key[order], order)
        width *= 2
        if size and rank[order[-1]] == size - 1:
            break  # all suffixes are distinct
    return order[tokens[order] != SEPARATOR].astype(np.uint32)


def _ranks(in_order: Array, order: Array) -> Array:
    """[T]: for every position, the number of distinct keys before its own."""
    steps = np.zeros(len(in_order), np.int64)
    steps[1:] = in_order[1:] != in_order[:-1]
    rank = np.empty(len(in_order), np.int64)
    rank[order] = np.cumsum(steps)
    return rank


def encoded(documents: Iterable[str], tokenizer: Any, progress: Progress | None = None) -> Iterator[list[int]]:
    """Token ids of every document, without special tokens."""
    batch: list[str] = []
    count = 0

    def flush() -> Iterator[list[int]]:
        nonlocal count
        if batch:
            count += len(batch)
            yield from (ids for ids in tokenizer(batch, add_special_tokens=False)["input_ids"] if ids)
            if progress is not None:
                progress("encoding documents", count, None)
            batch.clear()

    for document in documents:
        batch.append(document)
        if len(batch) == 64:
            yield from flush()
    yield from flush()


def build_datastore(
    paths: Sequence[str | Path], tokenizer: Any, out: str | Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Encode every document below ``paths`` (see :func:`foretoken.core.io.documents.iter_documents`) and index it.

    The file appears at ``out`` once complete; an interrupted build leaves an old file unchanged.

    Returns:
        The header's counts: documents, tokens, bytes.

    Raises:
        ValueError: a path does not exist, or contains no text.
    """
    tokens = joined(encoded(iter_documents(paths), tokenizer, progress))
    if not len(tokens):
        names = ", ".join(str(path) for path in paths)
        raise ValueError(f"no text in {names}: give .txt, .md, .rst or .py files, or .jsonl rows with a 'text'")
    sorting = None if progress is None else lambda step, steps: progress("sorting", step, steps)
    order = suffix_order(tokens, sorting)
    meta = {
        "fingerprint": fingerprint(tokenizer),
        "documents": int((tokens == SEPARATOR).sum()),
        "tokens": len(order),
        "largest_token": int(tokens.max()),
    }
    if progress is not None:
        progress("writing", 0, None)
    out = expanded(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(out, "datastore", meta, {"tokens": tokens.astype(">i4"), "order": order})
    return {**meta, "bytes": out.stat().st_size}
