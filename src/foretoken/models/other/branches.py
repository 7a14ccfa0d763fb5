"""Assignment of llama.cpp's sequence ids to the nodes of a scratch tree: pure bookkeeping without the library.

In llama.cpp's cache, a cell belongs to a set of sequence ids, and a token sees the earlier cells of its own id.  A tree
is therefore stored as its leaf paths: every leaf has an id, and a node belongs to the ids of all leaves below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Copy = tuple[int, int, int, int]
"""(source id, target id, from position, to position): the source's cells in this range also join the target id."""
Removal = tuple[int, int]
"""(id, position): the id loses its cells from this position on."""


@dataclass
class Branches:
    """The ids of one sequence.

    Attributes:
        main: an id that covers all committed tokens.
        spare: further ids -> number of leading committed tokens that they cover.
        through: for each scratch node, one of its ids.
        ends: scratch node -> id that ends at it.
        used: ids of scratch nodes.
    """

    main: int
    spare: dict[int, int] = field(default_factory=dict)
    through: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def needed(self, parents: Sequence[int]) -> int:
        """Number of free ids that :meth:`grow` will take for these nodes."""
        old, inner = len(self.through), set(parents[len(self.through) :])
        open_ends = {*self.ends} if self.main in self.used else {*self.ends, -1}
        count = 0
        for leaf in range(old, len(parents)):
            if leaf in inner:
                continue
            anchor = parents[leaf]
            while anchor >= old:
                anchor = parents[anchor]
            count += anchor not in open_ends
            open_ends.discard(anchor)
        return max(0, count - len(self.spare))

    def grow(
        self, parents: Sequence[int], depths: Sequence[int], committed: int, take: Callable[[], int]
    ) -> tuple[list[list[int]], list[Copy]]:
        """Assign ids to nodes added to a scratch tree.

        Args:
            parents: parents of all scratch nodes, old ones first; -1 is the last committed token.
            depths: depths of all scratch nodes.
            take: returns a free id.

        Returns:
            the ids of every new node, and the copies to make before scoring.
        """
        old = len(self.through)
        inner = set(parents[old:])
        ids: list[list[int]] = [[] for _ in parents[old:]]
        copies: list[Copy] = []
        for leaf in range(old, len(parents)):
            if leaf in inner:
                continue
            path = [leaf]
            while parents[path[-1]] >= old:
                path.append(parents[path[-1]])
            anchor = parents[path[-1]]
            chosen = self._behind(anchor, 0 if anchor < 0 else depths[anchor] + 1, committed, take, copies)
            for node in path:
                ids[node - old].append(chosen)
            self.ends[leaf] = chosen
            self.used.add(chosen)
        self.through.extend(branch_ids[0] for branch_ids in ids)
        return ids, copies

    def _behind(self, anchor: int, below: int, committed: int, take: Callable[[], int], copies: list[Copy]) -> int:
        """An id that covers the committed tokens and the ``below`` nodes down to ``anchor``, and ends there."""
        if anchor in self.ends:
            return self.ends.pop(anchor)
        if anchor < 0 and self.main not in self.used:
            return self.main
        chosen, covered = self.spare.popitem() if self.spare else (take(), 0)
        if covered < committed:
            copies.append((self.main, chosen, covered, committed))
        if anchor >= 0:
            copies.append((self.through[anchor], chosen, committed, committed + below))
        return chosen

    def commit(self, path: Sequence[int], committed: int) -> list[Removal]:
        """Keep one path of the scratch tree; return the cells to remove from their ids."""
        branch = self.through[path[-1]] if path else self.main
        removals = [(other, committed) for other in self.used if other != branch]
        if branch in self.used and (not path or self.ends.get(path[-1]) != branch):
            removals.append((branch, committed + len(path)))
        self.spare.update((other, committed) for other in self.used | {self.main} if other != branch)
        self.main = branch
        self.through.clear()
        self.ends.clear()
        self.used.clear()
        return removals

    def rewind(self, length: int) -> list[Removal]:
        """Keep ``length`` committed tokens; the scratch must be empty."""
        longer = [other for other, covered in self.spare.items() if covered > length]
        self.spare.update(dict.fromkeys(longer, length))
        return [(other, length) for other in (self.main, *longer)]

    @property
    def ids(self) -> list[int]:
        return [*({self.main} | self.used | self.spare.keys())]
