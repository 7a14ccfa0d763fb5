"""Trees that a draft model grows by its confidence, for greedy requests and those with noise.

Drawn tokens must not be selected by their own probability (:class:`foretoken.methods.trees.base.Growth`), so a request
that samples without noise gets a drawn chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import TokenTree
from foretoken.core.costs import TargetCost
from foretoken.core.largest import largest
from foretoken.methods.drafters.drawing import log_beliefs, ranked
from foretoken.methods.drafters.growing import Growing, ends_path
from foretoken.methods.trees.base import Candidates, Growth
from foretoken.methods.trees.cost_aware import CostAware, paying_count
from foretoken.methods.trees.specs import build_tree, trees_of
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead

WIDTH = 4
"""Children of an expanded node, and with ``eagle2`` expanded nodes per level."""
MOST_NODES = 60
"""Nodes of EAGLE-2's tree, for machines that score them at no extra cost."""


def is_dynamic(tree: str) -> bool:
    """Whether an option ``tree`` specifies a tree that follows the draft's confidence."""
    return tree.partition(",")[0] in trees_of(Growth)


class DynamicTree:
    """Growth of a tree by the draft's confidence, and selection of the nodes that the target scores.

    Args:
        growth: selects the nodes to expand and to keep.
        costs: cost of a target call by its number of nodes; ``None``: ignore costs.
        width: children of an expanded node, and with ``eagle2`` expanded nodes per level.
    """

    def __init__(self, growth: Growth, costs: TargetCost | None, width: int = WIDTH) -> None:
        self.growth, self.costs, self.width = growth, costs, width

    @classmethod
    def of(cls, spec: str, target: LanguageModel, step_cost: float) -> DynamicTree:
        """Construct with the costs of the target's calls on this machine, which ``cost_aware`` without options uses
        too.

        Args:
            spec: ``eagle2``, ``opt_tree`` or ``cost_aware``, with their options.
            target: the model that scores the nodes.
            step_cost: cost of a draft level, in target calls.

        Raises:
            ValueError: an unknown option.
        """
        costs = quick_costs(target)
        if spec == CostAware.name:
            return cls(CostAware(step_cost=step_cost, cost=costs.relative), costs)
        return cls(build_tree(spec, Growth), costs)

    def grow(
        self,
        tree: Growing,
        candidates: Candidates,
        tokens: Sequence[Sequence[int]],
        values: Sequence[Sequence[float]],
        sure: Tensor | None,
        levels: int,
    ) -> list[int]:
        """Give every node of the frontier its best children, and select the nodes to expand next.

        Args:
            tokens: best tokens per node of the frontier.
            values: their log-probabilities.
            sure: all log-probabilities [n, V'] of the frontier; ``None`` if no stop rule needs them.

        Returns:
            For every node of the new frontier, its parent's index in the previous one.
        """
        first, row_of = len(candidates), {node: row for row, node in enumerate(tree.frontier)}
        for node, chosen, log_probs in zip(tree.frontier, tokens, values, strict=True):
            possible = [i for i, log_prob in enumerate(log_probs) if log_prob > -math.inf]
            candidates.add(
                node, [chosen[i] for i in possible], [candidates.scores[node] + log_probs[i] for i in possible]
            )
        tree.path_of += [
            (*tree.path_of[candidates.parents[node]], candidates.tokens[node]) for node in range(first, len(candidates))
        ]
        frontier: list[int] = []
        if len(candidates) > first and candidates.depths[-1] < levels:
            frontier = self.growth.frontier(candidates, first, self.width, tree.most)
        if frontier and self.costs is not None:
            paying = set(
                self._best_nodes(tree, candidates)
            )  # the children of other nodes are not worth their scores either
            frontier = [node for node in frontier if node in paying]
        tree.frontier = [
            node for node in frontier if not _ends(tree, candidates, node, sure, row_of[candidates.parents[node]])
        ]
        return [row_of[candidates.parents[node]] for node in tree.frontier]

    def finished(self, tree: Growing, candidates: Candidates) -> TokenTree:
        """The likeliest nodes, as many as give the most tokens per time."""
        return candidates.tree(self._best_nodes(tree, candidates))

    def _best_nodes(self, tree: Growing, candidates: Candidates) -> list[int]:
        """The candidates so far that are worth their scores."""
        nodes = self.growth.kept(candidates, tree.most)
        return (
            nodes if self.costs is None else nodes[: paying_count(candidates.values(nodes), self.costs, tree.sharing)]
        )


def beliefs(tree: Growing, logits: Tensor) -> Tensor:
    """Log-probabilities [n, V] after the frontier's nodes from their logits [n, V], with noise those of the race (not
    with ``draw=greedy``)."""
    if tree.ranker is None and not tree.sampler.greedy:
        return log_beliefs(logits.float())  # the likeliest tokens of a request that samples (draw=greedy)
    lengths = [tree.length(node) for node in tree.frontier]
    return log_beliefs(ranked(tree.ranker or tree.sampler, logits, lengths, tree.prefixes(tree.frontier)))


def best_of(sure: Tensor, width: int, head: DraftHead | None = None) -> tuple[list[list[int]], list[list[float]]]:
    """The ``width`` best tokens of every row of a head's log-probabilities [n, V'], with their values; by default the
    head is the target's."""
    values, tokens = largest(sure, min(width, sure.shape[-1]))
    return (tokens if head is None else head.mapped(tokens)).tolist(), values.tolist()


def _ends(tree: Growing, candidates: Candidates, node: int, sure: Tensor | None, row: int) -> bool:
    """Whether a stop rule ends the path at this node, by the row of the log-probabilities [n, V] that it was chosen
    from."""
    if ends_path(tree, candidates.parents[node]):
        return True
    if sure is None or not tree.budget.asks_for_confidence:
        return False
    log_prob = candidates.scores[node] - candidates.scores[candidates.parents[node]]
    return tree.budget.stops_after(torch.exp(sure[row]), math.exp(log_prob))
