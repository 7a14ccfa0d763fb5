"""The best static tree for a positional acceptance vector, by dynamic programming (Sequoia, arXiv 2402.12374).

p_k is the probability that the k-th tried child of a node is the accepted one. With Best[d][m] the expected tokens of
the best tree of m nodes (its root counted, worth 1) and at most d levels of drafts, and T[d][b][m] the same with
exactly b children of the root:

    T[d][b][m] = max over y < m of T[d][b - 1][y] + p_b Best[d - 1][m - y],    T[d][0][1] = 1
    Best[d][m] = max over b of T[d][b][m]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from foretoken.methods.trees.base import Shape
from foretoken.methods.trees.shapes import Choice

TYPICAL = (0.62, 0.13, 0.06, 0.035, 0.02, 0.015, 0.01, 0.008)
"""Default positional acceptance, used without measurements."""


@dataclass(frozen=True)
class BestTrees:
    """The solved programme: the best trees of all sizes and depths.

    Attributes:
        acceptance: p_1, p_2, ...
        best: [d][m] expected tokens of the best tree of exactly m nodes, the root among them, and at most d levels;
            ``-inf`` where m nodes do not fit (and for m = 0).
        children: [d][m] children of its root.
        remaining: (d, b, m) -> nodes left for the root and its first b - 1 children.
    """

    acceptance: Sequence[float]
    best: list[list[float]]
    children: list[list[int]] = field(repr=False)
    remaining: dict[tuple[int, int, int], int] = field(repr=False)

    def expected_length(self, nodes: int, depth: int) -> float:
        """Tokens per round of the best tree of at most ``nodes`` draft nodes and ``depth`` levels."""
        return self.best[depth][self._size(nodes, depth)]

    def choices(self, nodes: int, depth: int) -> list[Choice]:
        """That tree, its nodes by falling value; fewer than ``nodes`` if no more fit or have any value.

        Raises:
            ValueError: more nodes or levels than were solved for.
        """
        shape: list[Choice] = []
        self._collect(self._size(nodes, depth), depth, (), shape)
        return by_value(shape, self.acceptance)

    def _size(self, nodes: int, depth: int) -> int:
        if not 1 <= nodes < len(self.best[0]) - 1 or not 1 <= depth < len(self.best):
            most = f"{len(self.best[0]) - 2} nodes and {len(self.best) - 1} levels"
            raise ValueError(f"trees of 1 to {most} were solved for, not of {nodes} and {depth}")
        return max(range(1, nodes + 2), key=lambda m: self.best[depth][m])

    def _collect(self, size: int, depth: int, path: Choice, shape: list[Choice]) -> None:
        """Trace back the choices for a subtree of ``size`` nodes whose root is ``path``."""
        for child in range(self.children[depth][size], 0, -1):
            remaining = self.remaining[depth, child, size]
            shape.append((*path, child - 1))
            self._collect(size - remaining, depth - 1, (*path, child - 1), shape)
            size = remaining


def solve(acceptance: Sequence[float], nodes: int, depth: int) -> BestTrees:
    """Best trees of all sizes up to ``nodes`` draft nodes and all depths up to ``depth``; O(nodes^2 depth children).

    Raises:
        ValueError: an empty or invalid acceptance vector, or fewer than one node or level.
    """
    if not acceptance or not all(rate >= 0 for rate in acceptance) or sum(acceptance) > 1 + 1e-6:  # NaN as well
        raise ValueError(
            f"a positional acceptance vector holds probabilities with a sum of at most 1, not {acceptance}"
        )
    if nodes < 1 or depth < 1:
        raise ValueError(f"sequoia needs nodes >= 1 and depth >= 1, not {nodes} and {depth}")
    sizes = nodes + 2  # m = 0 .. nodes + 1
    leaf = [-math.inf] * sizes
    leaf[1] = 1.0
    best, children = [leaf], [[0] * sizes]
    remaining: dict[tuple[int, int, int], int] = {}
    for level in range(1, depth + 1):
        row, count, most = leaf, [0] * sizes, list(leaf)
        for b, rate in enumerate(acceptance, 1):
            wider = [-math.inf] * sizes
            for m in range(b + 1, sizes):
                below = best[level - 1]
                # (Impossible sizes are skipped, because a probability of 0 times -inf would be NaN.)
                value, y = max((row[y] + rate * below[m - y], -y) for y in range(b, m) if below[m - y] > -math.inf)
                if value > -math.inf:
                    wider[m], remaining[level, b, m] = value, -y
                if value > most[m]:
                    most[m], count[m] = value, b
            row = wider
        best.append(most)
        children.append(count)
    return BestTrees(tuple(acceptance), best, children, remaining)


def by_value(choices: Iterable[Choice], acceptance: Sequence[float]) -> list[Choice]:
    """A shape's nodes by falling value, no node before its parent or an earlier sibling.

    Any first n nodes are thus a tree that can be drawn (where p falls: the best one within the shape).
    """
    remaining, ordered = set(choices), []
    waiting: list[tuple[float, int, Choice]] = []

    def offer(path: Choice, parent: float) -> None:
        if path in remaining:
            heapq.heappush(waiting, (-parent * acceptance[path[-1]], len(path), path))

    values: dict[Choice, float] = {(): 1.0}
    offer((0,), 1.0)
    while waiting:
        negative, _, path = heapq.heappop(waiting)
        ordered.append(path)
        values[path] = -negative
        offer((*path, 0), -negative)
        offer((*path[:-1], path[-1] + 1), values[path[:-1]])
    return ordered


def values_of_ranks(choices: Iterable[Choice], acceptance: Sequence[float]) -> list[float]:
    """Acceptance probability of every node's whole path; ranks beyond the vector use its last value."""
    return [math.prod(acceptance[min(rank, len(acceptance) - 1)] for rank in choice) for choice in choices]


def best_shape(trees: BestTrees, cost: Callable[[int], float], step_cost: float) -> tuple[int, int, float]:
    """The size and depth of most tokens per time: the maximum of Best / (v(nodes + 1) + step_cost * depth).

    Args:
        trees: a solved programme, whose size and depth are the limits.
        cost: v(n), the cost of scoring n nodes, the root among them; ``TargetCost.relative`` is one.
        step_cost: cost of drafting one level, in the same unit (c, where that is one target call).

    Returns:
        draft nodes, levels and the rate; (0, 0, 1 / v(1)) where no tree is better than plain decoding.
    """
    plain = (0, 0, 1.0 / cost(1))
    offers = [
        (m - 1, d, value / (cost(m) + step_cost * d))
        for d, row in enumerate(trees.best)
        for m, value in enumerate(row)
        if d > 0 and m > 1 and value > -math.inf
    ]
    return max([plain, *offers], key=lambda offer: (offer[2], -offer[0], -offer[1]))


class Sequoia(Shape):
    """The tree of most expected tokens of a given size and depth.

    Args:
        nodes: number of draft nodes.
        depth: most levels of the tree.
        acceptance: probabilities that the first, second, ... tried child is accepted, separated by spaces, as
            ``foretoken tune tree`` measures them; typical ones by default.
    """

    name = "sequoia"

    def __init__(self, nodes: int = 16, depth: int = 6, acceptance: str = "") -> None:
        try:
            vector = tuple(map(float, acceptance.split())) or TYPICAL
        except ValueError:
            raise ValueError(
                f"acceptance={acceptance!r} must be probabilities separated by spaces, for example 0.6 0.2"
            ) from None
        self.nodes, self.depth = nodes, depth
        self.trees = solve(vector, nodes, depth)

    def choices(self) -> list[Choice]:
        """The nodes by falling value."""
        return self.trees.choices(self.nodes, self.depth)
