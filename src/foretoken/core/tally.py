"""Token counts of prefixes, for penalties and processors, which read them at every node of a tree.

The nodes' prefixes share all but a few tokens. The common part is counted once, whenever it has grown by some tokens.
It is neither copied nor compared again for a :class:`NodePrefix` of :class:`CommittedTokens`, to which the engine only
appends. Other sequences are compared with it, so that any order of calls gives each its own counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from foretoken.core.committed import CommittedTokens, NodePrefix

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
        self._source: CommittedTokens | None = None  # begins with the counted text
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
        count, committed, source = len(self._text), len(sequence), None
        if isinstance(sequence, NodePrefix) and isinstance(sequence.committed, CommittedTokens):
            committed, source = sequence.length, sequence.committed
        if source is None or source is not self._source or count > committed:
            head = sequence[:count]
            if (head if isinstance(head, list) else list(head)) != self._text:
                self._forget()
                count = 0
            if source is not None and count <= committed:
                self._source = source
        end = min(len(sequence) - AHEAD, committed)
        if end - count > AHEAD:
            self._add(list(sequence[count:end]))
            count, self._source = end, source
        return list(sequence[count:])

    def _add(self, tokens: list[int]) -> None:
        counted = Counter(dict(zip(self._rows, self._counts.tolist(), strict=True)))
        counted.update(tokens[max(0, self.begin - len(self._text)) :])
        self._text += tokens
        self._ids = np.concatenate([self._ids, _numbers(tokens)])
        self._rows = {token: row for row, token in enumerate(counted)}
        self._tokens, self._counts = _numbers(list(counted)), _numbers(list(counted.values()))


def _numbers(tokens: list[int]) -> Numbers:
    return np.fromiter(tokens, np.int64, len(tokens))
