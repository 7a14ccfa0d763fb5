"""Cached sequences of ended requests, for requests with the same prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Snapshot

T = TypeVar("T")
SHORTEST = 16
"""Shortest prefix in tokens that is copied; a shorter one costs as much to copy as to compute."""


@dataclass(frozen=True)
class CachedDraft:
    """A draft model's state for a sequence.

    Attributes:
        tokens: m token ids in the draft model's vocabulary.
        snapshot: its keys and values.
        version: of its weights.
    """

    tokens: NDArray[np.int64]
    snapshot: Snapshot
    version: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.snapshot.nbytes + self.tokens.nbytes


@dataclass(frozen=True)
class CachedPrefix:
    """A cached sequence.

    Attributes:
        salt: its owner and what else sets it apart; others cannot reuse it.
        tokens: n token ids.
        snapshot: its keys and values.
        hidden: hidden states [n, D] for the drafter, by tap.
        drafts: draft models' states for it, by model key.
    """

    salt: Hashable
    tokens: NDArray[np.int64]
    snapshot: Snapshot
    hidden: Mapping[str, Tensor]
    drafts: Mapping[Hashable, CachedDraft] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        states = sum(rows.numel() * rows.element_size() for rows in self.hidden.values())
        drafts = sum(draft.nbytes for draft in self.drafts.values())
        return self.snapshot.nbytes + states + self.tokens.nbytes + drafts

    def with_drafts_of(self, old: CachedPrefix) -> CachedPrefix:
        """The same sequence, with the draft states of ``old`` where these are longer."""
        read = {key: len(draft.tokens) for key, draft in self.drafts.items()}
        more = {key: draft for key, draft in old.drafts.items() if len(draft.tokens) > read.get(key, 0)}
        return replace(self, drafts={**self.drafts, **more}) if more else self


def common(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


def longest_common(
    candidates: Iterable[tuple[T, Sequence[int] | NDArray[np.int64], bool]], ids: NDArray[np.int64], least: int = 0
) -> tuple[T | None, int]:
    """The first sequence with the longest common prefix with ``ids``, and the prefix's length; ``None`` and ``least``
    if none is longer than that and worth copying.

    Args:
        candidates: sequences, each with its tokens, and whether a part of it can be copied.
    """
    best, longest = None, max(least, SHORTEST - 1)
    for key, tokens, is_divisible in candidates:
        length = common(np.asarray(tokens, dtype=np.int64), ids)
        if length > longest and (is_divisible or length == len(tokens)):
            best, longest = key, length
    return (None, least) if best is None else (best, longest)


class Prefixes:
    """Cached sequences, least recently used first, and their total size of at most ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self.nbytes = 0  # a plain number, because other threads read it
        self._texts: OrderedDict[int, CachedPrefix] = OrderedDict()
        self._alike: dict[tuple[Hashable, bytes], dict[int, CachedPrefix]] = {}  # grouped by their first tokens
        self._ids = count()

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, salt: Hashable, tokens: Sequence[int]) -> tuple[CachedPrefix | None, int]:
        """The sequence with the longest common prefix, and the prefix's length (0: none is worth copying)."""
        ids = np.asarray(tokens, dtype=np.int64)
        alike = self._alike.get(_beginning(salt, ids), {})
        texts = ((key, text.tokens, text.snapshot.divisible) for key, text in alike.items())
        best, length = longest_common(texts, ids)
        if best is None:
            return None, 0
        self._texts.move_to_end(best)
        return self._texts[best], length

    def find_draft(
        self, salt: Hashable, tokens: Sequence[int], key: Hashable, ids: NDArray[np.int64], fits: Fits
    ) -> tuple[Snapshot | None, int]:
        """A draft model's state for a sequence that begins like ``tokens``: the one with the longest common prefix with
        ``ids``, in the model's tokens, and the prefix's length (0: none is worth copying). ``fits`` returns whether the
        model can continue from a state."""
        alike = self._alike.get(_beginning(salt, np.asarray(tokens[:SHORTEST], dtype=np.int64)), {})
        drafts = (text.drafts[key] for text in alike.values() if key in text.drafts)
        texts = ((draft.snapshot, draft.tokens, draft.snapshot.divisible) for draft in drafts if fits(draft))
        return longest_common(texts, ids)

    def keep(self, entry: CachedPrefix) -> None:
        """Cache a sequence; its prefixes among the cached sequences and the least recently used ones are removed.

        It inherits their draft states where these are longer, because it may never have been drafted for.
        """
        if len(entry.tokens) < SHORTEST:
            return
        beginning, new = _beginning(entry.salt, entry.tokens), next(self._ids)
        alike = self._alike.get(beginning, {})
        shorter = {key: old for key, old in alike.items() if common(old.tokens, entry.tokens) == len(old.tokens)}
        for old in shorter.values():
            entry = entry.with_drafts_of(old)
        if entry.nbytes > self.limit:
            entry = replace(entry, drafts={})
        if entry.nbytes > self.limit:
            return
        for key in shorter:
            self._forget(key)
        self._texts[new] = self._alike.setdefault(beginning, {})[new] = entry
        self.nbytes += entry.nbytes
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Limit the size to ``limit`` bytes (and never more than the capacity) from now on."""
        self.limit = max(0, min(limit, self.capacity))
        while self._texts and self.nbytes > self.limit:
            self._forget(next(iter(self._texts)))

    def clear(self) -> None:
        """Remove all sequences."""
        self._texts.clear()
        self._alike.clear()
        self.nbytes = 0

    def _forget(self, key: int) -> None:
        old = self._texts.pop(key)
        self.nbytes -= old.nbytes
        beginning = _beginning(old.salt, old.tokens)
        del self._alike[beginning][key]
        if not self._alike[beginning]:
            del self._alike[beginning]


Fits = Callable[[CachedDraft], bool]


def _beginning(salt: Hashable, tokens: NDArray[np.int64]) -> tuple[Hashable, bytes]:
    """Key of sequences with enough in common."""
    return salt, tokens[:SHORTEST].tobytes()
