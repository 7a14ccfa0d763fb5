"""Tree size by marginal cost: nodes and levels are added while they pay (``docs/methods/cost_aware.md``).

SmartSpec (arXiv 2406.14066) makes the same trade for chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from foretoken.core.costs import TargetCost
from foretoken.methods.trees.base import Candidates, Growth

Cost = Callable[[int], float]
"""v(n): cost of scoring n nodes (the root among them), in any unit; ``TargetCost.relative`` is one."""


def best_count(values: Sequence[float], cost: Cost, spent: float = 0.0) -> tuple[int, float]:
    """Number of the most valuable nodes to score for most tokens per time, and that rate.

    The best tree of n nodes is the n best nodes (values never rise along a path), so trying every n finds the optimum
    for any cost, including step functions. Where v is convex this is the marginal rule: a node is added while ``value
    >= rate * (v(n + 1) - v(n))``.

    Args:
        values: acceptance probabilities, falling.
        cost: v(n).
        spent: time of the round that does not depend on n (drafting), in the unit of ``cost``.

    Returns:
        the count and (1 + sum of values) / (v(1 + count) + spent); the smallest count of equal rates.
    """
    tokens, best, best_rate = 1.0, 0, 1.0 / (cost(1) + spent)
    for count, value in enumerate(values, 1):
        tokens += value
        rate = tokens / (cost(1 + count) + spent)
        if rate > best_rate:
            best, best_rate = count, rate
    return best, best_rate


def paying_count(values: Sequence[float], costs: TargetCost, batch: int) -> int:
    """Number of the most valuable drafted nodes to score for each of ``batch`` requests, at least one.

    Args:
        values: acceptance probabilities, falling.
        batch: requests that share a call. 1 for an uncoupled sampling request, whose output depends on the shape of its
            drafts and must not depend on the rest of the batch.
    """
    plain = costs.of(batch)
    return max(1, best_count(values, lambda nodes: costs.of(nodes * batch) / plain)[0])


class PayingNodes:
    """Number of nodes that pay, updated as nodes are found in order of value.

    Args:
        batch: requests that share a call, as for :func:`paying_count`.
        most: largest number of nodes.

    Attributes:
        count: :func:`paying_count` of the nodes so far.
    """

    def __init__(self, costs: TargetCost, batch: int, most: int) -> None:
        plain = costs.of(batch)
        self._costs = [costs.of((1 + nodes) * batch) / plain for nodes in range(most + 1)]
        self.start()

    def start(self) -> PayingNodes:
        """Reset to no nodes."""
        self.count, self._found, self._tokens, self._best = 1, 0, 1.0, 1.0 / self._costs[0]
        return self

    def add(self, probability: float) -> bool:
        """Whether the next node, and later ones of at most its probability, may still pay."""
        further = enumerate(self._costs[self._found + 1 :], 1)
        if self._found and all(self._tokens + probability * more <= self._best * cost for more, cost in further):
            return False
        self._found += 1
        self._tokens += probability
        rate = self._tokens / self._costs[self._found]
        if rate > self._best:
            self.count, self._best = self._found, rate
        return True


class CostAware(Growth):
    """The tree, of any size and depth, with most expected tokens per second on this machine.

    After every level the best rate (tokens / (v(nodes) + levels * step)) is compared with the previous one, and another
    level is drafted while it rises. That is OPT-Tree's test with a threshold of rate * step instead of a constant.

    Args:
        node_cost: what scoring one more node costs, in target steps: v(n) = 1 + node_cost * (n - 1 - free).
        step_cost: what drafting one level costs, in target steps (c).
        free: nodes that cost nothing.
        cost: the measured v(n) instead of that line, in target steps.
    """

    name = "cost_aware"

    def __init__(
        self, node_cost: float = 0.01, step_cost: float = 0.1, free: int = 0, cost: Cost | None = None
    ) -> None:
        for key, value in (("node_cost", node_cost), ("step_cost", step_cost), ("free", free)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"cost_aware needs {key} >= 0 and finite, not {value}")
        self.step_cost = step_cost
        self.cost: Cost = cost or (lambda nodes: 1.0 + node_cost * max(0, nodes - 1 - free))

    def frontier(self, candidates: Candidates, first: int, width: int, nodes: int) -> list[int]:
        """The nodes of the last level that are worth scoring, if that level raised the rate."""
        depth = candidates.depths[first]
        count, rate = self._best(candidates.values(candidates.best(nodes)), depth)
        _, before = self._best(candidates.values(candidates.best(nodes, before=first)), depth - 1)
        return [node for node in candidates.best(count) if node >= first] if rate > before else []

    def kept(self, candidates: Candidates, nodes: int) -> list[int]:
        """As many of the best nodes as pay; none if plain decoding is faster."""
        best = candidates.best(nodes)
        return best[: self._best(candidates.values(best), candidates.depths[-1])[0]]

    def _best(self, values: Sequence[float], depth: int) -> tuple[int, float]:
        return best_count(values, self.cost, depth * self.step_cost)
