"""Protocols of draft trees: static shapes, and trees that grow by the draft's confidence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from foretoken.core import TokenTree
from foretoken.methods.trees.shapes import Choice


class Shape(ABC):
    """A tree of fixed shape: the same ranks every round, for every text."""

    name: ClassVar[str]

    @abstractmethod
    def choices(self) -> list[Choice]:
        """The nodes as rank paths, parents and earlier siblings first; any first n of them are a tree as well."""


@dataclass
class Candidates:
    """All candidates of a growing tree; node 0 is the root, lists are per node.

    Attributes:
        parents: parents come before their children, -1 for the root.
        scores: log of the estimated acceptance probability: the sum of the path's draft log-probabilities, which never
            rises from a node to its child.
        depths: levels below the root.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    depths: list[int] = field(default_factory=lambda: [0])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Add children of ``parent``, best first, with the scores of their whole paths."""
        self.tokens.extend(tokens)
        self.scores.extend(scores)
        self.parents.extend([parent] * len(tokens))
        self.depths.extend([self.depths[parent] + 1] * len(tokens))

    def path_tokens(self, node: int) -> list[int]:
        """Draft tokens from below the root to ``node``."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, count: int, before: int | None = None) -> list[int]:
        """The ``count`` nodes of highest score, best first, among those numbered below ``before`` (all by default).

        Among equal nodes the earlier one comes first, so a node with a certain draft never displaces its parent: the
        result is a tree together with the root.
        """
        return sorted(range(1, before or len(self)), key=lambda node: (-self.scores[node], node))[:count]

    def values(self, nodes: Sequence[int]) -> list[float]:
        """Estimated acceptance probabilities of ``nodes``; their sum is the expected number of accepted draft
        tokens."""
        return [math.exp(self.scores[node]) for node in nodes]

    def tree(self, nodes: Sequence[int]) -> TokenTree:
        """A tree of ``nodes`` below the root as point proposals, in order of creation (likelier siblings first)."""
        chosen = [0, *sorted(nodes)]
        new_index = {node: i for i, node in enumerate(chosen)}
        parents = [-1, *(new_index[self.parents[node]] for node in chosen[1:])]
        return TokenTree(tuple(self.tokens[node] for node in chosen), tuple(parents))


class Growth(ABC):
    """A tree that grows by the draft's confidence: which nodes to expand, when to stop, and which to keep.

    For greedy requests, and those with noise: choosing among *drawn* tokens by their own probability would be biased.
    """

    name: ClassVar[str]

    @abstractmethod
    def frontier(self, candidates: Candidates, first: int, width: int, nodes: int) -> list[int]:
        """Nodes of the last level (from ``first`` on) that the drafter expands next; an empty list ends the draft.

        Args:
            first: the first node of the last level.
            width: children per node.
            nodes: most draft nodes that the target will score.
        """

    def kept(self, candidates: Candidates, nodes: int) -> list[int]:
        """The nodes that the target scores: by default the ``nodes`` best."""
        return candidates.best(nodes)
