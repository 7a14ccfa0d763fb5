"""Base of drafters that predict the target's next hidden state: EAGLE and variants, grown as dynamic trees.

A node's score is the sum of its path's draft log-probabilities, which approximates the log-probability of its
acceptance.  A method of :mod:`foretoken.methods.trees` grows the tree by it (``eagle2`` by default).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree, check_least
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.base import WIDTH_ONE, BatchDrafter, share_of_bytes
from foretoken.methods.drafters.drawing import distribution_of, log_beliefs, ranked, ranker
from foretoken.methods.drafters.drawn_tree import check_draw, drawn_shape, paying_static_tree, traits_of
from foretoken.methods.drafters.dynamic import MOST_NODES, DynamicTree, best_of
from foretoken.methods.drafters.growing import Growing
from foretoken.methods.drafters.reading import FeatureReader
from foretoken.methods.trees.base import Candidates, Growth
from foretoken.methods.trees.specs import build_tree
from foretoken.models.base import Feed, LanguageModel, Rows
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.heads.native import HeadRows


class FeatureDrafter(FeatureReader, BatchDrafter):
    """Point proposals in a tree grown by the draft's confidence, or tokens drawn from the draft's distributions.

    A point is accepted with probability p(x), a drawn token with sum min(p, q) on average, which is higher if p and q
    are similarly spread: drawn tokens win at high temperatures, points at low ones.  With noise
    (:mod:`foretoken.core.noise`) points are as good at every temperature, because draft and target rank the tokens of
    one perturbed distribution.

    Args:
        model: the network over the target's features.
        nodes: draft nodes that are kept of all candidates; in a spec by default as many as pay off on this machine, at
            most 60.
        depth: levels of the tree.
        width: children of every expanded node, and with ``eagle2`` expanded nodes per level.
        grow: spec of the dynamic tree: ``eagle2``, ``(opt_tree,threshold=0.2)`` or
            ``(cost_aware,node_cost=0.01,step_cost=0.1)``.
        draw: drafts of requests that sample without a seed.  ``"iid"``: a drawn chain; ``"without_replacement"``: a
            tree of distinct siblings in drawing order; ``"greedy"``: the tree of the likeliest tokens, as for greedy
            requests.  Requests with a seed get the tree of the race's winners, with ``"greedy"`` that of the likeliest
            tokens.
        tree: the shape of a drawn tree: children per level, ``"3x2x1"``, or the spec of a static tree,
            ``"(sequoia,nodes=16,acceptance=0.6 0.2)"``; by default Sequoia's of ``nodes`` nodes.  Or a file of
            ``foretoken tune tree``, whose limits then hold for all trees.
        window: positions that the network attends to, if it was trained without a window; 0: all.
        sink: first positions that it attends to as well.

    Options:
        vocab: draft vocabulary: the N most frequent tokens of the training text, or those in a JSON file; by default
            all that were trained.

    Attributes:
        dynamic: that tree; replaceable by a constructed one (``CostAware(cost=...)`` with measured costs).
        costs: cost of a target call by its number of nodes.  If set, a tree keeps as many nodes as pay off by the
            draft's probabilities.
    """

    chain = WIDTH_ONE

    def __init__(
        self,
        model: FeatureModel,
        nodes: int = 16,
        depth: int = 5,
        width: int = 4,
        grow: str = "eagle2",
        draw: str = "iid",
        window: int = USUAL,
        sink: int = 0,
        tree: str = "",
    ) -> None:
        check_draw(self.name, draw)
        check_least(self.name, 1, nodes=nodes, depth=depth, width=width)
        super().__init__(model)
        model.window, model.top = Window(window, sink), width
        self.draw = draw
        self.dynamic = DynamicTree(build_tree(grow, Growth), None, width)
        self.shape = drawn_shape(draw, tree, self.name, nodes, depth)
        self.max_depth, self.max_nodes = depth, nodes
        self.vocab_size = model.vocab_size
        self.traits = traits_of(draw, width > 1, self.shape.branches)

    @property
    def costs(self) -> TargetCost | None:
        return self.dynamic.costs

    @costs.setter
    def costs(self, costs: TargetCost | None) -> None:
        self.dynamic.costs = costs

    @property
    def head(self) -> DraftHead | None:
        """The vocabulary projection; ``None`` if the network has its own kind, over the target's tokens."""
        project = getattr(self.model, "project", None)
        return project if isinstance(project, DraftHead) else None

    def describe(self) -> list[dict[str, Any]]:
        size = self.vocab_size if self.head is None else self.head.size
        runs = {"forward": self.model.forward_name, "native_off": self.model.native_off}
        return [{**entry, "vocabulary": size, **runs} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of the network, with the vocabulary projection that it borrows from the target."""
        return share_of_bytes(self.model.weight_bytes + (self.head.weight_bytes if self.head else 0), target_bytes)

    @classmethod
    def sized(cls, model: FeatureModel, target: LanguageModel, nodes: int | None, options: dict[str, Any]) -> Self:
        """Construct with a tree of ``nodes`` nodes; ``None``: as many as pay off on this machine."""
        if nodes is not None:
            return cls(model, nodes=nodes, **options)
        built = cls(model, nodes=MOST_NODES, **options)
        built.costs = quick_costs(target)
        built.shape = paying_static_tree(built.shape, built.costs)
        return built

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One call for the committed tokens, then one per level, for the whole batch."""
        heads = self._heads(contexts)
        drafts = [TokenTree.root_only(context.root) for context in contexts]
        ready = [i for i, context in enumerate(contexts) if id(context) in heads]
        growing = trees = [self._begin(contexts[i], budgets[i], len(ready)) for i in ready]
        for tree in trees:
            self._expand(tree, *heads[id(tree.context)])
        for level in range(1, self.max_depth):
            room = self.model.context_length - level
            growing = [t for t in growing if t.frontier and level < t.budget.max_depth]
            growing = [t for t in growing if len(t.sequence.tokens) <= room]
            if not growing:
                break
            rows = self.model.forward([self._feed(tree) for tree in growing])
            for tree, row in zip(growing, rows, strict=True):
                self._expand(tree, row, row.taps["state"])
        for i, tree in zip(ready, trees, strict=True):
            drafts[i] = tree.finished() if tree.candidates is None else self.dynamic.finished(tree, tree.candidates)
        return drafts

    def _begin(self, context: Context, budget: Budget, batch: int) -> Growing:
        fixed, likeliest = context.sampler.fixed, self.draw == "greedy"
        draws = not (fixed or likeliest)
        return Growing(
            context,
            self.shape,
            budget,
            self.max_nodes,
            context.state[self],
            draws=draws,
            ranker=ranker(context.sampler, likeliest),
            candidates=None if draws else Candidates([context.root]),
            sharing=batch if fixed else 1,
        )

    def _heads(self, contexts: Sequence[Context]) -> dict[int, tuple[Rows, Tensor]]:
        """Logits and output state [1, D] at the root of each request whose tokens have been read."""
        ready, rows = self.follow(contexts)
        for context in contexts:
            row = rows.get(id(context))
            if row is not None:
                context.state[self, "head"] = row, row.taps["state"][-1:]
        level = [context for context, is_level in zip(contexts, ready, strict=True) if is_level]
        return {id(c): c.state[self, "head"] for c in level if (self, "head") in c.state}

    def _feed(self, tree: Growing) -> Feed:
        """The frontier; children of the root follow the committed tokens."""
        parents = tree.enter(-1)
        return Feed(tree.sequence, [tree.tokens[n] for n in tree.frontier], parents, states=torch.stack(tree.states))

    def _expand(self, tree: Growing, row: Rows, outputs: Tensor) -> None:
        """Give every node of the frontier its best or drawn children, some of which are read next."""
        if tree.candidates is None:
            self._draw(tree, self.widened(self._logits(row)), outputs)
            return
        sure: Tensor | None = None
        if isinstance(row, HeadRows) and row.tokens and not (tree.races or tree.budget.asks_for_confidence):
            best = row.tokens, row.values
        else:
            sure = self._sure(tree, tree.frontier, self._logits(row))
            best = self._best(sure)
        rows = self.dynamic.grow(tree, tree.candidates, *best, sure, self.max_depth)
        tree.states = [outputs[row] for row in rows]

    def _logits(self, row: Rows) -> Tensor:
        return row.whole() if isinstance(row, HeadRows) else row.logits

    def _sure(self, tree: Growing, nodes: Sequence[int], logits: Tensor) -> Tensor:
        """Log-probabilities [n, V'] of every token after each node, with noise those of the race."""
        if tree.ranker is None:
            return log_beliefs(logits.float())
        lengths = [tree.length(node) for node in nodes]
        return log_beliefs(self.narrowed(ranked(tree.ranker, self.widened(logits), lengths, tree.prefixes(nodes))))

    def _best(self, sure: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        return best_of(sure, self.dynamic.width, self.head)

    def _draw(self, tree: Growing, logits: Tensor, outputs: Tensor) -> None:
        """Draw the children of the frontier by the request's sampler from logits [n, V]."""
        nodes, tree.frontier, tree.states = tree.frontier, [], []
        for node, row, output in zip(nodes, logits, outputs, strict=True):
            # A small draft vocabulary may contain none of the tokens that the request allows.
            children = tree.draw(node, distribution_of(tree.sampler, row, tree.prefix(node)))
            tree.frontier += children
            tree.states += [output] * len(children)

    def widened(self, logits: Tensor) -> Tensor:
        return logits if self.head is None else self.head.widened(logits)

    def narrowed(self, rows: Tensor) -> Tensor:
        """Rows [n, V'] over the draft's ids from the target's; sums over all others would cost more than they gain."""
        return rows if self.head is None else self.head.narrowed(rows)
