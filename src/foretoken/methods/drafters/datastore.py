"""Files of arrays in safetensors, with checksum and tokenizer fingerprint, and the datastore of ``retrieval``.

A datastore is a corpus of token ids and its suffix array.  It is memory-mapped: several processes share one copy, and
opening it reads it once (for the checksum).  Token ids are big-endian int32, so that comparing bytes compares tokens.
A separator (-1, no token of any vocabulary) follows every document, so that no match crosses documents.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from foretoken.core.io.documents import iter_documents
from foretoken.core.io.files import checksum, replacing
from foretoken.core.io.hub_ids import expanded

OURS = "foretoken"
"""Key of the header in the metadata of safetensors."""
SEPARATOR = -1
DEPTH = 64
"""Suffixes are sorted by their first 64 tokens; longer n-grams cannot be looked up."""

Array = NDArray[Any]
Progress = Callable[[str, int, int | None], None]
"""Called with a description of the step, the amount done, and the total (``None`` if unknown)."""


def fingerprint(tokenizer: Any) -> str:
    """Digest of a tokenizer's vocabulary; equal for equal ids."""
    return checksum(json.dumps(sorted(tokenizer.get_vocab().items())), 16)


# -- files of arrays -------------------------------------------------------------------------------------------------


def write_arrays(path: str | Path, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write arrays to ``path`` via a temporary file: an interrupted write leaves an old file intact."""
    header = {"kind": kind, **meta}
    header["digest"] = _digest(header, arrays)
    with replacing(expanded(path)) as draft:
        draft.write_bytes(save(dict(arrays), {OURS: json.dumps(header)}))


def _digest(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(json.dumps(header).encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def holds_arrays(path: Path) -> bool:
    """Whether :func:`write_arrays` seems to have written this file."""
    try:
        with safe_open(path, "np") as file:
            return OURS in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read_arrays(
    path: str | Path, kind: str, tokenizer_fingerprint: str | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The header of a file written by :func:`write_arrays`, and its memory-mapped arrays.

    Raises:
        ValueError: the file is missing, truncated, corrupt, of another format or kind, or made with another tokenizer.
    """
    path = expanded(path)
    try:
        path.open("rb").close()  # its errors say more than those of safetensors
        with safe_open(path, "pt") as file:  # the framework whose arrays are mapped
            header = json.loads(file.metadata()[OURS])
            arrays = {name: file.get_tensor(name).numpy() for name in list(file.keys())}
    except OSError as error:
        raise ValueError(f"cannot open {path}: {error.strerror}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is truncated or not a foretoken file of this version: build it again") from None
    if header.pop("digest", None) != _digest(header, arrays):
        raise ValueError(f"{path} is corrupt (its content does not match its checksum): build it again")
    if header["kind"] != kind:
        raise ValueError(f"{path} is a file of kind {header['kind']!r}, not {kind!r}")
    if tokenizer_fingerprint and header.get("fingerprint") not in (None, "", tokenizer_fingerprint):
        raise ValueError(f"{path} was made with another tokenizer than the target's: build it again for this target")
    return header, arrays


# -- the datastore ---------------------------------------------------------------------------------------------------


class Datastore:
    """A corpus that is searched for the end of a context.

    Args:
        tokens: [T] int32 ids, a separator after every document.
        order: [S] uint32 positions of the suffixes in sorted order (separators left out).
        meta: header of the file.
    """

    def __init__(self, tokens: Array, order: Array, meta: dict[str, Any] | None = None) -> None:
        self.tokens, self.order, self.meta = tokens, order, meta or {}
        self._bytes = tokens.astype(">i4", copy=False).view(np.uint8).data
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
        meta, arrays = read_arrays(path, "datastore", fingerprint(tokenizer) if tokenizer is not None else None)
        return cls(arrays["tokens"].view(">i4"), arrays["order"], meta)

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
        data = self._bytes

        def read(position: int) -> bytes:
            start = 4 * position
            return data[start : start + size].tobytes()

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
    write_arrays(out, "datastore", meta, {"tokens": tokens.astype(">i4").view(np.uint8), "order": order})
    return {**meta, "bytes": out.stat().st_size}
