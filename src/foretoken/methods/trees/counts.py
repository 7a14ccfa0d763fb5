"""Child counts of static trees, for drafters that draw siblings.

A node is identified by its rank path: ``(0, 2)`` is the third child tried below the first one. Its token is drawn anew
every round, while its number of children is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Protocol

from foretoken.methods.trees.shapes import Choice, choice_parents, fitting_nodes

Counts = Callable[[Choice], int]
"""Rank path -> number of children."""


class StaticTree(Protocol):
    """A static tree as child counts.

    Attributes:
        max_depth: levels.
        branches: whether any node has two children.
    """

    max_depth: int
    branches: bool

    def within(self, max_depth: int, max_nodes: int) -> Counts:
        """The child counts within a budget."""


class Levels:
    """The same number of children for all nodes of a level; a limit on nodes drops the last ones of a level.

    Args:
        widths: children per level.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.max_depth = len(self.widths)
        self.branches = any(width > 1 for width in self.widths)

    @property
    def size(self) -> int:
        """Number of nodes."""
        return sum(accumulate(self.widths, mul))

    def within(self, max_depth: int, max_nodes: int) -> Counts:
        """The counts within ``max_depth``; the drafter enforces ``max_nodes`` while it draws."""
        widths = self.widths[: max(max_depth, 0)]
        return lambda choice: widths[len(choice)] if len(choice) < len(widths) else 0


class Ranks:
    """Any tree of rank paths; a limit on nodes keeps the first ones in the list that fit.

    Args:
        choices: parents and earlier siblings first.

    Raises:
        ValueError: a node without its parent, or a rank without the one before it.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = list(choices)
        self.parents = choice_parents(self.choices)
        node_of = {choice: node for node, choice in enumerate(self.choices)}
        for node, choice in enumerate(self.choices):
            if choice[-1] and node_of.get((*choice[:-1], choice[-1] - 1), len(node_of)) > node:
                raise ValueError(
                    f"the tree has {choice} without rank {choice[-1] - 1} before it: siblings are tried in order"
                )
        self.max_depth = max(map(len, self.choices), default=0)
        self.branches = len(set(self.parents)) < len(self.parents)
        self._within = lru_cache(maxsize=64)(self._counts)

    def within(self, max_depth: int, max_nodes: int) -> Counts:
        """The counts of the first ``max_nodes`` nodes within ``max_depth`` levels."""
        counts = self._within(max_depth, max_nodes)
        return lambda choice: counts.get(choice, 0)

    def _counts(self, max_depth: int, max_nodes: int) -> dict[Choice, int]:
        ranks = 1 + max((choice[-1] for choice in self.choices), default=0)
        counts: dict[Choice, int] = {}
        for node in fitting_nodes(self.choices, self.parents, max_depth, max_nodes, ranks):
            parent = self.choices[node - 1][:-1]
            counts[parent] = counts.get(parent, 0) + 1
        return counts
