"""Token counts of prefixes, for penalties and processors, which read them at every node of a tree.

The nodes' prefixes share all but a few tokens. The common part is counted once, whenever it has grown by some tokens.
It is compared at every node, so that any order of calls is right: half a millisecond a round behind 8,000 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

AHEAD = 32
"""Last tokens of a prefix, which are counted anew each time, because a draft may be rejected."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class TokenTally:
    """Token counts of one request's prefixes; tokens before ``begin`` are not counted."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self._forget()

    def _forget(self) -> None:
        self._text: list[int] = []
        self._ids: Numbers = np.empty(0, np.int64)
        self._rows: dict[int, int] = {}  # index of each token in the two arrays below
        self._tokens: Numbers = np.empty(0, np.int64)
        self._counts: Numbers = np.empty(0, np.int64)

    def ids(self, sequence: Sequence[int]) -> Numbers:
        """[n] all tokens of a prefix."""
        new = self._unseen(sequence)
        return np.concatenate([self._ids, _numbers(new)])

    def counts(self, sequence: Sequence[int]) -> tuple[Numbers, Numbers]:
        """[m] distinct tokens of a prefix after ``begin``, and [m] their counts."""
        following = self._unseen(sequence)
        new = Counter(following[max(0, self.begin - len(self._text)) :])
        counts = self._counts.copy()
        for token in [token for token in new if token in self._rows]:
            counts[self._rows[token]] += new.pop(token)
        return np.concatenate([self._tokens, _numbers(list(new))]), np.concatenate([counts, _numbers([*new.values()])])

    def _unseen(self, sequence: Sequence[int]) -> list[int]:
        """Tokens after the counted part of a prefix, which grows with the prefix."""
        length = len(self._text)
        head = sequence[:length]
        if (head if isinstance(head, list) else list(head)) != self._text:
            self._forget()
            length = 0
        if len(sequence) - length > 2 * AHEAD:
            self._add(list(sequence[length : len(sequence) - AHEAD]))
            length = len(self._text)
        return list(sequence[length:])

    def _add(self, tokens: list[int]) -> None:
        counted = Counter(dict(zip(self._rows, self._counts.tolist(), strict=True)))
        counted.update(tokens[max(0, self.begin - len(self._text)) :])
        self._text += tokens
        self._ids = np.concatenate([self._ids, _numbers(tokens)])
        self._rows = {token: row for row, token in enumerate(counted)}
        self._tokens, self._counts = _numbers(list(counted)), _numbers(list(counted.values()))


def _numbers(tokens: list[int]) -> Numbers:
    return np.fromiter(tokens, np.int64, len(tokens))
