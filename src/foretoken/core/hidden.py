"""Hidden states, left in a forward's output tensors until they are read.

A trained drafter needs the target's states of the whole sequence, but only when it drafts. Rounds without a draft store
a reference per request; rows are copied when a draft is made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

HELD = 8
"""Rows kept in memory per needed row, at most: the others belong to other requests or rejected drafts."""
RECENT = 64
"""Number of parts between two checks of that ratio."""


class HiddenStates(Mapping[str, Tensor]):
    """Some rows of a forward's hidden states [n, D] by tap, gathered on access.

    Args:
        states: all rows [..., D] of the forward, by tap.
        rows: n indices into all dimensions but the last, flattened.
    """

    __slots__ = ("_states", "rows")

    def __init__(self, states: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        self._states, self.rows = states, rows

    @classmethod
    def of(cls, hidden: Mapping[str, Tensor]) -> HiddenStates:
        """All rows of tensors [n, D]."""
        if isinstance(hidden, HiddenStates):
            return hidden
        return cls(hidden, range(len(next(iter(hidden.values()), ()))))

    def __getitem__(self, tap: str) -> Tensor:
        rows, indices = self._states[tap].flatten(0, -2), self.rows
        return rows[indices.start : indices.stop] if isinstance(indices, range) else rows[list(indices)]

    def __contains__(self, tap: object) -> bool:
        return tap in self._states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_rows(self) -> int:
        """Number of rows, n."""
        return len(self.rows)

    @property
    def num_held(self) -> int:
        """Number of rows kept in memory."""
        return next((math.prod(states.shape[:-1]) for states in self._states.values()), 0)

    def only(self, taps: Sequence[str]) -> HiddenStates:
        """The same rows of only these taps."""
        if len(taps) == len(self._states):
            return self
        return HiddenStates({tap: self._states[tap] for tap in taps}, self.rows)

    def at(self, rows: Sequence[int] | slice) -> HiddenStates:
        """Some of these rows, by index."""
        if not isinstance(rows, slice) and all(after == before + 1 for before, after in pairwise(rows)):
            rows = slice(rows[0], rows[-1] + 1) if rows else slice(0)
        indices = self.rows[rows] if isinstance(rows, slice) else [self.rows[row] for row in rows]
        return HiddenStates(self._states, indices)


class HiddenText:
    """Hidden states of consecutive positions of a sequence, one part per round.

    Attributes:
        parts: one or more positions each.
        count: number of positions.
    """

    def __init__(self) -> None:
        self.parts: list[HiddenStates] = []
        self.count = self._settled = 0

    def add(self, part: HiddenStates) -> None:
        """Append positions. Every 64 parts, recent rows are copied if their tensors hold too many others."""
        if not part.num_rows:
            return
        self.parts.append(part)
        self.count += part.num_rows
        if len(self.parts) - self._settled >= RECENT:
            recent = self.parts[self._settled :]
            if sum(part.num_held for part in recent) > HELD * sum(part.num_rows for part in recent):
                self.parts[self._settled :] = [HiddenStates.of(_joined(recent))]
            self._settled = len(self.parts)

    def first(self, count: int) -> Mapping[str, Tensor]:
        """[count, D] hidden states of the first positions, by the first part's taps; the parts that hold them are
        joined, and no others, because a long text is read in pieces."""
        ends = list(accumulate(part.num_rows for part in self.parts))
        held = min(bisect_left(ends, count) + 1, len(ends))
        if held > 1:
            self.parts[:held] = [HiddenStates.of(_joined(self.parts[:held]))]
            self._settled = max(1, self._settled - held + 1)
        return self.parts[0].at(slice(count)) if self.parts else {}

    def drop(self, count: int) -> None:
        """Drop the first positions."""
        remaining, gone = min(count, self.count), 0
        self.count -= remaining
        while gone < len(self.parts) and self.parts[gone].num_rows <= remaining:
            remaining -= self.parts[gone].num_rows
            gone += 1
        del self.parts[:gone]
        self._settled = max(0, self._settled - gone)
        if remaining:
            self.parts[0] = self.parts[0].at(slice(remaining, None))

    def copied(self) -> dict[str, Tensor]:
        """[count, D] by the first part's taps, as copies that keep no other rows in memory."""
        return _joined(self.parts) if self.parts else {}


def _joined(parts: Sequence[HiddenStates]) -> dict[str, Tensor]:
    return {tap: torch.cat([part[tap] for part in parts]) for tap in parts[0]}
