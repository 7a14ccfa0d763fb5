"""The caches of one model: texts of like length share a rectangle of rows and slots, others get one of their own.

Keys and values of a rectangle cost rows times the longest text.  So a text that has outgrown the others moves to
another rectangle, and what a text held is given back when it ends.  One text of 3,000 tokens beside fifteen of 100 then
takes about what the tokens need, and attention does not look at 3,000 slots for a text of 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.models.base import SequenceState
from foretoken.models.cache.rectangle import CHUNK, TreeCache

SLACK = 1.4
"""Slots of a rectangle over the slots that its texts need, from which on a text does not make it longer."""
SHORT = 4 * CHUNK
"""A new text, whose length is not known yet, joins a rectangle of at most so many slots."""


class CachePool:
    """Rectangles of rows, and which text has which row.

    Args:
        first: the cache that is always there.  One whose buffers graphs hold by their addresses stays the only one
            and keeps its size.

    Attributes:
        peak_bytes: the most memory that the caches have taken.
    """

    def __init__(self, first: TreeCache) -> None:
        self.caches = [first]
        self.peak_bytes = 0
        self._movable = first.movable
        self._sizes: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> TreeCache:
        """The cache that is always there."""
        return self.caches[0]

    @property
    def texts(self) -> list[SequenceState]:
        return [text for cache in self.caches for text in cache.texts]

    def open(self, sequence: SequenceState) -> SequenceState:
        """Give a new, empty sequence a row."""
        cache = min(self.caches, key=lambda candidate: candidate.num_slots)
        if self._movable and cache.texts and cache.num_slots > SHORT:
            cache = self._another()
        self._append(cache, sequence)
        return sequence

    def release(self, sequence: SequenceState) -> None:
        """Free a row; the last row of its cache takes its place, so that live rows stay contiguous."""
        cache = sequence.cache
        last = cache.texts.pop()
        freed = last.row
        if last is not sequence:
            cache.move_row(freed, sequence.row, last.num_slots)
            cache.blank(sequence.row, last.num_slots)
            last.row = sequence.row
            cache.texts[last.row] = last
        if cache.texts or not self._movable:  # else its buffers go
            cache.blank(freed)
        sequence.cache = None
        if self._movable:
            self._give_back(cache)

    def make_room(self, sequence: SequenceState, need: int) -> None:
        """See to it that the sequence's row has ``need`` slots, in this rectangle or in another one.

        Nodes that are fed next may be in its scratch already: nothing is stored of them yet.
        """
        cache = sequence.cache
        if need <= cache.num_slots or not self._movable:
            return
        longer = [other for other in self.caches if need <= other.num_slots <= SLACK * need]
        alone = len(cache.texts) == 1
        num_slots = need + sum(max(text.num_slots, CHUNK) for text in cache.texts if text is not sequence)
        if longer and (alone or not sequence.tokens):
            self._move(sequence, min(longer, key=lambda other: other.num_slots))
        elif len(cache.texts) * need > SLACK * num_slots:
            self._move(sequence, min(longer, key=lambda other: other.num_slots) if longer else self._another())

    def note_size(self) -> None:
        """Keep the peak up to date; cheap when nothing has grown."""
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
        cache.reserve(len(cache.texts) + 1, 1)  # which fails when memory is full, so it comes first
        sequence.cache, sequence.row = cache, len(cache.texts)
        cache.texts.append(sequence)

    def _move(self, sequence: SequenceState, cache: TreeCache) -> None:
        source, row = sequence.cache, sequence.row
        # What is fed next has no slots yet: no more is stored than there is room for.
        try:
            cache.take_row(source, row, len(cache.texts), min(sequence.num_slots, source.num_slots))
        except BaseException:  # memory is full: the text stays where it is
            if not cache.texts:
                self._give_back(cache)
            raise
        self.release(sequence)
        self._append(cache, sequence)

    def _give_back(self, cache: TreeCache) -> None:
        """Free what a rectangle that lost a text does not need any more."""
        if not cache.texts:
            cache.clear()
            if cache is not self.first and cache in self.caches:  # not one of before the model was changed
                self.caches.remove(cache)
            return
        slots = max(text.num_slots for text in cache.texts) + CHUNK
        rows = len(cache.texts)
        if cache.num_rows * cache.num_slots > 2 * rows * slots:
            cache.trim(rows, slots)


def by_cache(sequences: Sequence[SequenceState]) -> list[list[int]]:
    """Indices of the sequences by the cache that they are in."""
    groups: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(id(sequence.cache), []).append(index)
    return list(groups.values())


def take(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    """Those of the items, of which there may be none at all."""
    return [items[index] for index in indices] if items else []
