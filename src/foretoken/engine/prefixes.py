"""Texts that are kept after they ended, so that the next one with the same beginning need not be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Snapshot

SHORTEST = 16
"""A common beginning of fewer tokens is read again: copying it costs as much as it saves."""


@dataclass(frozen=True)
class Kept:
    """A text that was kept.

    Attributes:
        salt: whose it is; nobody else finds it.
        tokens: n token ids.
        snapshot: its keys and values.
        hidden: the hidden states [n, D] that the drafter asked for, by tap.
    """

    salt: str
    tokens: NDArray[np.int64]
    snapshot: Snapshot
    hidden: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        states = sum(rows.numel() * rows.element_size() for rows in self.hidden.values())
        return self.snapshot.nbytes + states + self.tokens.nbytes


def common(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """How many leading tokens two texts share."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


class Prefixes:
    """The texts, the least recently used first.

    Args:
        capacity: most bytes.

    Attributes:
        nbytes: memory that the texts take.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self.nbytes = 0  # a plain number: other threads look at it
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._alike: dict[tuple[str, bytes], dict[int, Kept]] = {}  # those that are worth comparing begin alike
        self._ids = count()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, salt: str, tokens: Sequence[int]) -> tuple[Kept | None, int]:
        """The text with the longest common beginning, and how many tokens that is (0: none is worth it)."""
        wanted = np.asarray(tokens, dtype=np.int64)
        best, longest = None, SHORTEST - 1
        for key, kept in self._alike.get(_beginning(salt, wanted), {}).items():
            length = common(kept.tokens, wanted)
            length = length if kept.snapshot.divisible or length == len(kept.tokens) else 0
            if length > longest:
                best, longest = key, length
        if best is None:
            return None, 0
        self._kept.move_to_end(best)
        return self._kept[best], longest

    def keep(self, kept: Kept) -> None:
        """Keep a text; others that are the beginning of it, and the least recently used ones, go."""
        if len(kept.tokens) < SHORTEST or kept.nbytes > self.limit:
            return
        beginning, new = _beginning(kept.salt, kept.tokens), next(self._ids)
        for key, old in list(self._alike.get(beginning, {}).items()):
            if common(old.tokens, kept.tokens) == len(old.tokens):
                self._forget(key)
        self._kept[new] = self._alike.setdefault(beginning, {})[new] = kept
        self.nbytes += kept.nbytes
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Hold at most so many bytes (and never more than the capacity) from now on."""
        self.limit = max(0, min(limit, self.capacity))
        while self._kept and self.nbytes > self.limit:
            self._forget(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._alike.clear()
        self.nbytes = 0

    def _forget(self, key: int) -> None:
        old = self._kept.pop(key)
        self.nbytes -= old.nbytes
        beginning = _beginning(old.salt, old.tokens)
        del self._alike[beginning][key]
        if not self._alike[beginning]:
            del self._alike[beginning]


def _beginning(salt: str, tokens: NDArray[np.int64]) -> tuple[str, bytes]:
    """What texts share that have enough in common."""
    return salt, tokens[:SHORTEST].tobytes()
