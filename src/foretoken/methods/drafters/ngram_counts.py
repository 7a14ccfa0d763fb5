"""Counts of the tokens after each n-gram, in dictionaries while they grow and in sorted arrays once stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.methods.drafters.datastore import SEPARATOR, read_arrays, write_arrays

SIZES = range(1, 5)
KIND = "ngram_cache"
_MULTIPLIER = 0x9E3779B97F4A7C15

Array = NDArray[Any]
_NONE = np.empty(0, np.int32)


def key_of(tokens: Sequence[int]) -> int:
    """64-bit hash of an n-gram (:func:`_keys` is the batched version).  A collision would only spoil a draft."""
    key = len(tokens)
    for token in tokens:
        key = (key * _MULTIPLIER + token + 1) & (2**64 - 1)
    return key


@dataclass(slots=True)
class _RowCounts:
    total: int = 0
    most: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, other: _RowCounts) -> None:
        for token, more in other.counts.items():
            count = self.counts[token] = self.counts.get(token, 0) + more
            self.most = max(self.most, count)
        self.total += other.total


class FollowerCounts:
    """Counts of the tokens after one n-gram, from new rows and a table's rows, added up on demand.

    Attributes:
        total: number of samples.
        most: upper bound of the largest count.
    """

    def __init__(self, new: Sequence[_RowCounts], tokens: Array, counts: Array) -> None:
        self._new, self._tokens, self._counts = new, tokens, counts
        self.total, self.most = sum(row.total for row in new), sum(row.most for row in new)
        if len(counts):
            self.total += int(counts.sum())
            self.most += int(counts[0])

    def of(self, token: int) -> int:
        counted = self._counts[self._tokens == token] if len(self._tokens) else _NONE
        return sum(row.counts.get(token, 0) for row in self._new) + (int(counted[0]) if len(counted) else 0)

    def by_token(self) -> dict[int, int]:
        if not len(self._tokens) and len(self._new) == 1:
            return self._new[0].counts
        merged: dict[int, int] = dict(zip(self._tokens.tolist(), self._counts.tolist(), strict=True))
        for row in self._new:
            for token, count in row.counts.items():
                merged[token] = merged.get(token, 0) + count
        return merged

    def best(self, static: FollowerCounts | None = None) -> tuple[int, int]:
        """The token of largest weight (of equal ones the smallest id) and its count.

        The weight is the count, times 100 times the count in ``static`` if that has the token.
        """

        def rank(item: tuple[int, int]) -> tuple[int, int]:
            count = static.of(item[0]) if static is not None else 0
            return -item[1] * (100 * count if count else 1), item[0]

        if static is None and not self._new:
            return int(self._tokens[0]), int(self._counts[0])
        return min(self.by_token().items(), key=rank)


class CountTable:
    """Counts in sorted arrays: ``keys`` [E] uint64, ``tokens`` [E] int32, ``counts`` [E] int32, most frequent first."""

    def __init__(self, keys: Array, tokens: Array, counts: Array) -> None:
        self.keys, self.tokens, self.counts = keys, tokens, counts

    @classmethod
    def summed(cls, keys: Array, tokens: Array, counts: Array) -> CountTable:
        """Build from rows in any order; equal rows are added up."""
        order = np.lexsort((tokens, keys))
        keys, tokens, counts = keys[order], tokens[order], counts[order]
        first = np.ones(len(keys), bool)
        first[1:] = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
        sums = np.add.reduceat(counts.astype(np.int64), np.flatnonzero(first)) if len(keys) else counts
        keys, tokens = keys[first], tokens[first]
        order = np.lexsort((tokens, -sums, keys))
        return cls(keys[order], tokens[order].astype(np.int32), sums[order].astype(np.int32))

    @classmethod
    def of_text(cls, sequence: Array, sizes: Iterable[int]) -> CountTable:
        """Count every n-gram of ``sequence`` [T] int32 with the token after it; none crosses a separator."""
        keys, tokens = [], []
        for n in sizes:
            if len(sequence) > n:
                inside = _keys(sequence, n)[: len(sequence) - n]
                whole = np.ones(len(inside), bool)
                for i in range(n + 1):
                    whole &= sequence[i : len(sequence) - n + i] != SEPARATOR
                keys.append(inside[whole])
                tokens.append(sequence[n:][whole])
        if not keys:
            return cls(np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.int32))
        all_keys, all_tokens = np.concatenate(keys), np.concatenate(tokens)
        return cls.summed(all_keys, all_tokens, np.ones(len(all_keys), np.int32))

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, key: int) -> slice:
        number = np.uint64(key)
        low = int(self.keys.searchsorted(number))
        if low == len(self.keys) or self.keys[low] != number:
            return slice(0, 0)
        return slice(low, int(self.keys.searchsorted(number, side="right")))


def _keys(tokens: Array, n: int) -> Array:
    """[T - n + 1] uint64: :func:`key_of` of every window of n tokens."""
    with np.errstate(over="ignore"):
        key = np.full(len(tokens) - n + 1, n, np.uint64)
        for i in range(n):
            key = key * np.uint64(_MULTIPLIER) + tokens[i : len(tokens) - n + 1 + i].astype(np.uint64) + np.uint64(1)
    return key


class NgramCache:
    """n-gram -> counts of the next token.

    ``table`` was loaded, ``new`` holds the most recent counts and ``old`` the earlier ones.  ``old`` is dropped when
    ``new`` is full, which avoids a pause for removing single n-grams.

    Args:
        sizes: values of n.
        table: initial counts, which stay.
        most: maximum tokens whose counts are kept in addition, at least half of them at any time; 0: no limit.
    """

    def __init__(self, sizes: range = SIZES, table: CountTable | None = None, most: int = 0) -> None:
        self.sizes, self.table, self.most = sizes, table, most
        self.new: dict[int, _RowCounts] = {}
        self.old: dict[int, _RowCounts] = {}
        self._num_new = self._num_old = 0

    @property
    def size(self) -> int:
        """Number of tokens whose counts are kept, without the table's."""
        return self._num_new + self._num_old

    def remember(self, tokens: Sequence[int], counted: NgramCache | None = None) -> None:
        """Count a whole text, and drop old ones if there are too many.

        Args:
            counted: the counts of this text alone, if there are any; they are not used elsewhere afterwards.
        """
        if self.most and self._num_new and self._num_new + len(tokens) > self.most // 2:
            self.old, self.new = self.new, {}
            self._num_old, self._num_new = self._num_new, 0
        self._num_new += len(tokens)
        if counted is None or counted.sizes != self.sizes:
            self.count(tokens)
            return
        for key, row in counted.new.items():
            mine = self.new.setdefault(key, row)
            if mine is not row:
                mine.add(row)

    def forget_older(self) -> bool:
        """Drop the earlier counts; false if there are none."""
        dropped = self._num_old > 0
        self.old, self._num_old = {}, 0
        return dropped

    def count(self, tokens: Sequence[int], start: int = 0) -> None:
        """Count the n-grams before every token of ``tokens[start:]``."""
        for end in range(max(start, 1), len(tokens)):
            for n in self.sizes:
                if n > end:
                    break
                self._add(key_of(tokens[end - n : end]), tokens[end])

    def _add(self, key: int, token: int) -> None:
        row = self.new.get(key)
        if row is None:
            row = self.new[key] = _RowCounts()
        count = row.counts[token] = row.counts.get(token, 0) + 1
        row.total += 1
        row.most = max(row.most, count)

    def followers(self, ngram: Sequence[int]) -> FollowerCounts | None:
        """Counts of the tokens after an n-gram; ``None`` if there are none."""
        key = key_of(ngram)
        new = [row for row in (self.new.get(key), self.old.get(key)) if row is not None]
        rows = slice(0, 0) if self.table is None else self.table.rows(key)
        if not new and rows.stop == rows.start:
            return None
        if self.table is None:
            return FollowerCounts(new, _NONE, _NONE)
        return FollowerCounts(new, self.table.tokens[rows], self.table.counts[rows])

    def frozen(self, others: Sequence[NgramCache] = ()) -> CountTable:
        """This cache's counts, and those of others without their tables."""
        counted = itertools.chain.from_iterable((*cache.old.items(), *cache.new.items()) for cache in (self, *others))
        rows = [(key, token, count) for key, row in counted for token, count in row.counts.items()]
        if self.table is not None and not rows:
            return self.table
        columns = [np.array([row[i] for row in rows], dtype) for i, dtype in enumerate((np.uint64, np.int32, np.int32))]
        if self.table is not None:
            old = (self.table.keys, self.table.tokens, self.table.counts)
            columns = [np.concatenate(pair) for pair in zip(old, columns, strict=True)]
        return CountTable.summed(*columns)

    def save(self, path: str | Path, tokenizer_fingerprint: str = "", others: Sequence[NgramCache] = ()) -> None:
        """Write the cache, and the counts of others as in :meth:`frozen`, to a file (via a temporary file)."""
        table = self.frozen(others)
        meta = {"fingerprint": tokenizer_fingerprint, "sizes": [self.sizes.start, self.sizes.stop - 1]}
        write_arrays(path, KIND, meta, {"keys": table.keys, "tokens": table.tokens, "counts": table.counts})

    @classmethod
    def load(cls, path: str | Path, tokenizer_fingerprint: str | None = None) -> NgramCache:
        """Open a saved cache.

        Raises:
            ValueError: see :func:`foretoken.methods.drafters.datastore.read_arrays`.
        """
        meta, arrays = read_arrays(path, KIND, tokenizer_fingerprint)
        low, high = meta["sizes"]
        return cls(range(low, high + 1), CountTable(*(arrays[name] for name in ("keys", "tokens", "counts"))))
