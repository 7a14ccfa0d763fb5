"""Sequence ids of scratch trees, on a cache of cells that follows llama.cpp's rules: no library is needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from foretoken.models.base import SequenceState
from foretoken.models.other.branches import Branches, Removal


class Cells:
    """Cells that belong to sequence ids, with what llama.cpp checks of every batch."""

    def __init__(self) -> None:
        self.cells: list[tuple[object, int, set[int]]] = []  # (name, position, ids)

    def last(self, sequence_id: int) -> int:
        return max((position for _, position, ids in self.cells if sequence_id in ids), default=-1)

    def add(self, name: object, position: int, ids: Sequence[int]) -> None:
        assert {self.last(sequence_id) for sequence_id in ids} == {position - 1}, (
            "positions of a sequence must be consecutive"
        )
        self.cells.append((name, position, set(ids)))

    def join(self, source: int, other: int, start: int, end: int) -> None:
        for _, position, ids in self.cells:
            if source in ids and start <= position < end:
                ids.add(other)

    def leave(self, sequence_id: int, start: int) -> None:
        for _, position, ids in self.cells:
            if position >= start:
                ids.discard(sequence_id)
        self.cells = [cell for cell in self.cells if cell[2]]

    def seen(self, sequence_id: int, position: int) -> list[object]:
        """Names of the cells that a token of this id at this position sees, itself included."""
        rows = [(place, name) for name, place, ids in self.cells if sequence_id in ids and place <= position]
        return [name for _, name in sorted(rows, key=lambda row: row[0])]


class Text:
    """One text in the cells, driven as ``LlamaCppModel`` drives it."""

    def __init__(self, cells: Cells, free: list[int]) -> None:
        self.cells, self.free = cells, free
        self.state = SequenceState(row=0)
        self.branches = Branches(free.pop())
        self.count = 0

    def feed(self, parents: Sequence[int]) -> None:
        tokens = range(self.count, self.count + len(parents))
        self.count += len(parents)
        self.state.append(list(tokens), parents)
        before = len(self.free)
        needed, old = self.branches.needed(self.state.scratch_parents), len(self.branches.through)
        ids, copies = self.branches.grow(
            self.state.scratch_parents, self.state.scratch_depths, len(self.state.tokens), self.free.pop
        )
        assert before - len(self.free) == needed
        for copy in copies:
            self.cells.join(*copy)
        for node, node_ids in enumerate(ids, old):
            position = len(self.state.tokens) + self.state.scratch_depths[node]
            self.cells.add((id(self), self.state.scratch_tokens[node]), position, node_ids)
            assert self.cells.seen(node_ids[0], position) == self.path(node)

    def path(self, node: int) -> list[object]:
        names: list[int] = []
        while node >= 0:
            names.append(self.state.scratch_tokens[node])
            node = self.state.scratch_parents[node]
        return [(id(self), token) for token in [*self.state.tokens, *names[::-1]]]

    def commit(self, path: Sequence[int], change: Callable[[list[Removal]], list[Removal]] = lambda x: x) -> None:
        for removal in change(self.branches.commit(path, len(self.state.tokens))):
            self.cells.leave(*removal)
        self.state.tokens.extend(self.state.scratch_tokens[node] for node in path)
        self.state.clear_scratch()

    def holds(self) -> bool:
        """Whether the main id sees the committed text, nothing else is left, and spare ids see as much as they say."""
        whole = [(id(self), token) for token in self.state.tokens]
        names = {cell[0] for cell in self.cells.cells if cell[0][0] == id(self)}  # type: ignore[index]
        spare = all(self.cells.seen(spare_id, 10**6) == whole[:n] for spare_id, n in self.branches.spare.items())
        return self.cells.seen(self.branches.main, 10**6) == whole and names == set(whole) and spare


def random_tree(rng: random.Random, old: int, count: int) -> list[int]:
    return [rng.randrange(-1, old + i) for i in range(count)]


def random_path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    if not parents:
        return []
    node, path = rng.randrange(-1, len(parents)), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_every_node_sees_its_own_path(seed: int) -> None:
    rng = random.Random(seed)
    cells, free = Cells(), list(range(200))
    texts = [Text(cells, free) for _ in range(3)]
    for _ in range(30):
        text = rng.choice(texts)
        for _ in range(rng.randrange(1, 4)):  # a draft model's scratch grows step by step
            text.feed(random_tree(rng, len(text.state.scratch_tokens), rng.randrange(0, 6)))
        text.commit(random_path(rng, text.state.scratch_parents))
        if rng.random() < 0.2:
            length = rng.randrange(0, len(text.state.tokens) + 1)
            for removal in text.branches.rewind(length):
                cells.leave(*removal)
            del text.state.tokens[length:]
        assert all(other.holds() for other in texts)


def test_a_chain_needs_one_id() -> None:
    text = Text(Cells(), [1, 0])
    for _ in range(3):
        text.feed([-1, 0, 1])
        text.commit([0, 1])
    assert text.branches.ids == [0]
    assert text.free == [1]


def test_ids_are_used_again() -> None:
    text = Text(Cells(), list(range(10)))
    for path in ([0, 2], [1], [], [0, 3]):
        text.feed([-1, -1, 0, 0])
        text.commit(path)
    assert len(text.branches.ids) == 3
    assert text.holds()


@pytest.mark.parametrize("path", [[], [0], [0, 2], [1, 4]])
@pytest.mark.parametrize("place", range(3))
def test_a_forgotten_removal_is_seen(path: list[int], place: int) -> None:
    text, forgotten = Text(Cells(), list(range(10))), []

    def fault(removals: list[Removal]) -> list[Removal]:
        forgotten.extend(removals[place : place + 1])
        return [*removals[:place], *removals[place + 1 :]]

    text.feed([-1, -1, 0, 0, 1])
    text.commit(path, fault)
    assert text.holds() == (not forgotten)


def test_the_wrong_sequence_is_seen() -> None:
    text = Text(Cells(), list(range(10)))
    text.feed([-1, -1, 0, 0, 1])
    text.branches.through[3], text.branches.through[4] = text.branches.through[4], text.branches.through[3]
    text.commit([0, 3])
    assert not text.holds()
