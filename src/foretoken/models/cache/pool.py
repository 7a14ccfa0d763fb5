"""The caches of one model: sequences of similar length share a rectangle of rows and slots.

The keys and values of a rectangle cost rows times the longest sequence.  So a sequence that has outgrown the others
moves to another rectangle, and its memory is released when it ends.  One sequence of 3,000 tokens beside fifteen of 100
then takes about as much as its tokens need, and attention for the short ones does not read 3,000 slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.models.base import SequenceState
from foretoken.models.cache.rectangle import CHUNK, TreeCache

SLACK = 1.4
"""Maximum ratio of a rectangle's slots to those that its sequences need; beyond it, a sequence moves elsewhere."""
SHORT = 4 * CHUNK
"""Maximum slots of a rectangle that a new sequence, whose length is still unknown, joins."""


class CachePool:
    """Rectangles of rows, and the assignment of sequences to rows.

    Args:
        first: the permanent cache.  If CUDA graphs hold its buffers by address, it stays the only one and keeps its
            size.

    Attributes:
        peak_bytes: peak memory of the caches.
    """

    def __init__(self, first: TreeCache) -> None:
        self.caches = [first]
        self.peak_bytes = 0
        self._movable = first.movable
        self._sizes: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> TreeCache:
        """The permanent cache."""
        return self.caches[0]

    @property
    def sequences(self) -> list[SequenceState]:
        return [sequence for cache in self.caches for sequence in cache.sequences]

    def open(self, sequence: SequenceState) -> SequenceState:
        """Assign a row to a new, empty sequence."""
        cache = min(self.caches, key=lambda candidate: candidate.num_slots)
        if self._movable and cache.sequences and cache.num_slots > SHORT:
            cache = self._another()
        self._append(cache, sequence)
        return sequence

    def release(self, sequence: SequenceState) -> None:
        """Free a row.  The last row of its cache moves there, so that live rows stay contiguous."""
        cache = sequence.cache
        last = cache.sequences.pop()
        freed = last.row
        if last is not sequence:
            cache.move_row(freed, sequence.row, last.num_slots)
            cache.blank(sequence.row, last.num_slots)
            last.row = sequence.row
            cache.sequences[last.row] = last
        if cache.sequences or not self._movable:  # otherwise its buffers are freed
            cache.blank(freed)
        sequence.cache = None
        if self._movable:
            self._give_back(cache)

    def make_room(self, sequence: SequenceState, need: int) -> None:
        """Ensure that the sequence's row has ``need`` slots, in this rectangle or in another one.

        The scratch may already list nodes that are fed next; nothing is stored for them yet.
        """
        cache = sequence.cache
        if need <= cache.num_slots or not self._movable:
            return
        longer = [other for other in self.caches if need <= other.num_slots <= SLACK * need]
        alone = len(cache.sequences) == 1
        num_slots = need + sum(
            max(open_sequence.num_slots, CHUNK) for open_sequence in cache.sequences if open_sequence is not sequence
        )
        if longer and (alone or not sequence.tokens):
            self._move(sequence, min(longer, key=lambda other: other.num_slots))
        elif len(cache.sequences) * need > SLACK * num_slots:
            self._move(sequence, min(longer, key=lambda other: other.num_slots) if longer else self._another())

    def note_size(self) -> None:
        """Update the peak; cheap if nothing has grown."""
        sizes = tuple((cache.num_rows, cache.num_slots) for cache in self.caches)
        if sizes != self._sizes or not self.peak_bytes:
            self._sizes, self.peak_bytes = sizes, max(self.peak_bytes, self.num_bytes())

    def num_bytes(self) -> int:
        return sum(cache.num_bytes() for cache in self.caches)

    def _another(self) -> TreeCache:
        self.caches.append(self.first.fresh())
        return self.caches[-1]

    @staticmethod
    def _append(cache: TreeCache, sequence: SequenceState) -> None:
        cache.reserve(len(cache.sequences) + 1, 1)  # fails if memory is full, so it comes first
        sequence.cache, sequence.row = cache, len(cache.sequences)
        cache.sequences.append(sequence)

    def _move(self, sequence: SequenceState, cache: TreeCache) -> None:
        source, row = sequence.cache, sequence.row
        # Tokens that are fed next have no slots yet: only the slots that exist are copied.
        try:
            cache.take_row(source, row, len(cache.sequences), min(sequence.num_slots, source.num_slots))
        except BaseException:  # memory is full: the sequence stays where it is
            if not cache.sequences:
                self._give_back(cache)
            raise
        self.release(sequence)
        self._append(cache, sequence)

    def _give_back(self, cache: TreeCache) -> None:
        if not cache.sequences:
            cache.clear()
            if cache is not self.first and cache in self.caches:  # not one from before a model change
                self.caches.remove(cache)
            return
        slots = max(sequence.num_slots for sequence in cache.sequences) + CHUNK
        rows = len(cache.sequences)
        if cache.num_rows * cache.num_slots > 2 * rows * slots:
            cache.trim(rows, slots)


def by_cache(sequences: Sequence[SequenceState]) -> list[list[int]]:
    """Indices of the sequences, grouped by cache."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(id(sequence.cache), []).append(index)
    return list(groups.values())


def take(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    """The items at ``indices``; empty if there are no items."""
    return [items[index] for index in indices] if items else []
