"""Trees that a draft model grows by its own confidence: for requests whose tokens are fixed, greedy ones and those with
noise.

What is drawn must not be chosen by its own probability (:class:`foretoken.methods.trees.base.Growth`), so that a
request that samples without noise gets a drawn chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Context, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.drawing import log_beliefs, ranked
from foretoken.methods.drafters.growing import Growing, asks_for_confidence, ends_path
from foretoken.methods.trees.base import Candidates, Growth
from foretoken.methods.trees.cost_aware import CostAware, paying_count
from foretoken.methods.trees.specs import build_tree, dynamic_trees
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs

WIDTH = 4
"""Children that an expanded node gets, and with ``eagle2`` nodes that are expanded per level."""
MOST_NODES = 60
"""Nodes of a tree where the machine scores them for nothing: EAGLE-2's."""


def is_dynamic(tree: str) -> bool:
    """Whether an option ``tree`` asks for a tree that follows the draft's confidence."""
    return tree.partition(",")[0] in dynamic_trees()


class DynamicTree:
    """How a draft model's tree grows, and how much of it the target scores.

    Args:
        growth: what is read next, and what is kept.
        costs: what a call of the target costs by its nodes.
    """

    def __init__(self, growth: Growth, costs: TargetCost) -> None:
        self.growth, self.costs = growth, costs

    @classmethod
    def of(cls, spec: str, target: LanguageModel, step_cost: float) -> DynamicTree:
        """By the costs of the target's calls on this machine, which ``cost_aware`` without options uses too.

        Args:
            spec: ``eagle2``, ``opt_tree`` or ``cost_aware``, with their options.
            target: the model that scores the nodes.
            step_cost: what a level of drafts costs, in target calls.

        Raises:
            ValueError: an unknown option.
        """
        costs = quick_costs(target)
        if spec == CostAware.name:
            return cls(CostAware(step_cost=step_cost, cost=costs.relative), costs)
        return cls(build_tree(spec, Growth), costs)

    def begin(self, context: Context) -> Candidates:
        """A tree of the root alone."""
        return Candidates([context.root])

    def grow(self, tree: Growing, seen: Candidates, logits: Tensor, levels: int, most: int) -> None:
        """Give every node of the frontier its best children, and choose which of these are read next.

        Args:
            tree: the tree.
            seen: its candidates.
            logits: of the frontier's nodes, [n, V].
            levels: levels that the tree may have.
            most: nodes that the target will score.
        """
        if tree.looked is not None:  # for the whole batch
            (sure, tokens, values), tree.looked = tree.looked, None
        else:
            sure = log_beliefs(_rows(tree, logits))
            best = sure.topk(min(WIDTH, sure.shape[-1]), -1)
            tokens, values = best.indices.tolist(), best.values.tolist()
        first, row_of = len(seen), {node: row for row, node in enumerate(tree.frontier)}
        for node, candidates, chances in zip(tree.frontier, tokens, values, strict=True):
            possible = [i for i, chance in enumerate(chances) if chance > -math.inf]
            seen.add(node, [candidates[i] for i in possible], [seen.scores[node] + chances[i] for i in possible])
        for node in range(first, len(seen)):
            tree.path_of[node] = (*tree.path_of[seen.parents[node]], seen.tokens[node])
        tree.frontier = []
        if len(seen) > first and seen.depths[-1] < levels:
            wanted = self.growth.frontier(seen, first, WIDTH, most)
            paying = set(self._kept(tree, seen, most))  # behind other nodes nothing is worth its score either
            wanted = [node for node in wanted if node in paying]
            tree.frontier = [n for n in wanted if not _ends(tree, seen, n, sure[row_of[seen.parents[n]]])]

    def finished(self, tree: Growing, seen: Candidates, most: int) -> TokenTree:
        """The likeliest nodes, as many as give most tokens per time."""
        return seen.tree(self._kept(tree, seen, most))

    def _kept(self, tree: Growing, seen: Candidates, most: int) -> list[int]:
        kept = self.growth.kept(seen, most)
        return kept[: paying_count(seen.values(kept), self.costs, tree.sharing)]


def _rows(tree: Growing, logits: Tensor) -> Tensor:
    """What the best tokens of the frontier are the largest of: [n, V], with noise the race."""
    if not tree.sampler.fixed:
        return logits.float()  # the likeliest tokens of a request that samples (draw=greedy)
    lengths: Sequence[int] = [tree.length(node) for node in tree.frontier]
    text = tree.context.tokens
    prefixes = None if tree.sampler.context_free else [[*text, *tree.path_of[node]] for node in tree.frontier]
    return ranked(tree.sampler, logits, lengths, prefixes)


def _ends(tree: Growing, seen: Candidates, node: int, sure: Tensor) -> bool:
    """Whether a stop rule ends the path with this node, by the log-probabilities [V] that it was chosen from."""
    if ends_path(tree, seen.parents[node]):
        return True
    if not asks_for_confidence(tree.budget):
        return False
    own = seen.scores[node] - seen.scores[seen.parents[node]]
    return tree.budget.stops_after(torch.exp(sure), math.exp(own))
