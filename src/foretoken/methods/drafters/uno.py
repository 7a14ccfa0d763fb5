"""The target drafts for itself: one forward over noise after the sequence, with low-rank updates in the noise's rows.

UNO 2026 (arXiv 2609.04010).  A round is two forwards of the target::

    draft:   root  z1   z2  ...  z(k-1)        the root's row is the target's own, the others go through the updates
              |    |    |          |
             d1   d2   d3   ...   dk           d1 is the target's token: it is accepted
    verify:  root  d1   d2  ...   dk
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import torch

from foretoken.core import Budget, Context
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.drawing import best
from foretoken.methods.drafters.narrowed import projected, reduced_head
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.methods.drafters.parallel import ParallelDrafter, Predictions
from foretoken.methods.drafters.pard import ModelIds
from foretoken.methods.trees.counts import Counts, StaticTree
from foretoken.methods.trees.lattice import Continuations
from foretoken.methods.trees.shapes import Choice
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.variants.gated import GatedModel


def paying_rows(accuracies: Sequence[float], most: int, cost: Callable[[int], float]) -> int:
    """The number of tokens per draft forward with the most tokens per time.

    Args:
        accuracies: probability that each row of noise is right, provided that the rows before it are.
        most: number of trained positions.
        cost: v(n), cost of scoring n nodes; a round scores k nodes to draft and k + 1 to verify.
    """

    def rate(k: int) -> float:
        gained = sum(math.prod(accuracies[:i]) for i in range(k))  # the first is certain
        return (1 + gained) / (cost(k) + cost(k + 1))

    return max(range(1, min(most, len(accuracies) + 1) + 1), key=rate)


class UnoPredictions(Predictions):
    """The target's own row fixes the first position: if the request's next token is fixed, it is the only candidate."""

    def continuations(self, path: Sequence[int], state: Any, width: int, budget: Budget) -> Continuations:
        """The ``width`` best candidates after a path; at the first position the target's token."""
        races = self.ranker is not None and self.ranker.fixed
        certain = not path and (races or self.context.sampler.greedy)
        if not certain or self.head.vocab_size != self.logits.shape[-1]:
            return super().continuations(path, state, width, budget)
        row, after = self.row(path, state)
        if races:
            tokens = best(self._ranking(path, row)[0], 1)
        else:
            one_hot = self.distribution(path, row)
            tokens = [] if one_hot is None else [int(one_hot.argmax())]
        return Continuations(tokens, [0.0] * len(tokens), [False] * len(tokens), after)


class _OneFirst:
    """A tree whose root has one child, because siblings of a certain token are useless."""

    def __init__(self, below: StaticTree) -> None:
        self.below, self.max_depth, self.branches = below, 1 + below.max_depth, below.branches

    def within(self, max_depth: int, max_nodes: int) -> Counts:
        counts = self.below.within(max_depth - 1, max_nodes - 1)

        def count(choice: Choice) -> int:
            return counts(choice[1:]) if choice else int(max_depth > 0 and max_nodes > 0)

        return count


class UnoDrafter(ParallelDrafter):
    """Trees of the likeliest prefixes, or drawn chains and trees, from one forward of the target over noise.

    Args:
        net: the updates of its linear layers; they move to its device.
        k: maximum tokens per draft forward; 0: as many as were trained; in a spec by default as many as pay off.
        tree: the shape of a drawn tree: children per level, ``"1x3x2"``, or the spec of a static tree; by default
            Sequoia's of ``nodes`` nodes below the first token, which is accepted.
        head: the vocabulary projection over the draft vocabulary that replaces the target's.
    """

    name = "uno"
    chain = MappingProxyType({})  # it runs the layers of the target, which takes trees then
    net_config = UnoConfig
    net_class = UnoNet
    model: GatedModel

    def __init__(
        self,
        target: LanguageModel,
        net: UnoNet,
        k: int = 0,
        nodes: int = 16,
        width: int = 8,
        draw: str = "iid",
        tree: str = "",
        *,
        head: DraftHead | None = None,
    ) -> None:
        trained = net.config.places
        if not 0 <= k <= trained:
            raise ValueError(f"uno needs k from 1 to {trained}, which were trained, or 0 for all, not {k}")
        depth = k or trained
        self._shape(nodes, depth, width, draw, tree)
        if draw == "without_replacement" and not tree and depth > 1:
            self._shape(max(1, nodes - 1), depth - 1, width, draw, tree)
            self.shape, self.max_depth, self.max_nodes = _OneFirst(self.shape), depth, nodes
        self.traits = replace(self.traits, runs_target=True, learns=False)
        self.net = (net if target.device is None else net.to(target.device)).eval()
        if net.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"the low-rank updates are for a vocabulary of {net.config.vocab_size}, and the target has "
                f"{target.vocab_size}"
            )
        self.model, self.head = GatedModel(target, self.net), head
        self.ids = ModelIds(target.vocab_size, head)
        self.target_bytes = target.weight_bytes

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        k: int | None = None,
        nodes: int | None = None,
        vocab: str = "",
        **options: Any,
    ) -> Self:
        """Build from a spec ``uno[:FOLDER]``.

        Args:
            vocab: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        net, _, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        if k is None:
            typical = 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2  # if training did not measure accuracies
            accuracies, costs = measured.get("accuracies") or typical, quick_costs(context.target)
            k = paying_rows(accuracies, net.config.places, costs.relative)
        head = reduced_head(vocab, context.target, context)
        return cls.sized(context.target, nodes, context.target, net, k, head=head, **options)

    def fit(self, costs: TargetCost) -> None:
        """Keep as many nodes of every tree as pay off; the first token of a drawn one always does."""
        shape = self.shape
        if isinstance(shape, _OneFirst):
            self.shape = shape.below
            super().fit(costs)
            self.shape = _OneFirst(self.shape)
        else:
            super().fit(costs)

    def cost_beside(self, target_bytes: int) -> float:
        """A share for every level of one target forward with the updates."""
        return (1 + self.model.weights.nbytes / target_bytes if target_bytes else 1.0) / self.max_depth

    def describe(self) -> list[dict[str, Any]]:
        size = self.model.vocab_size if self.head is None else self.head.size
        runs = {"forward": self.model.forward_name, "native_off": self.model.native_off}
        return [{**entry, "vocabulary": size, **runs} for entry in super().describe()]

    def _all_predictions(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Predictions]:
        """Run the forward, which leaves the target's sequences unchanged."""
        ready = [i for i, depth in enumerate(depths) if depth > 0]
        if not ready:
            return {}
        try:
            feeds = [self._feed(contexts[i], depths[i]) for i in ready]
            rows = projected(self.head, self.model.forward, feeds)
        finally:
            for context in contexts:
                context.sequence.clear_scratch()
        each = ((i, contexts[i], row.logits) for i, row in zip(ready, rows, strict=True))
        return {i: UnoPredictions(context, logits, self.ids, self._ranker(context)) for i, context, logits in each}

    def _depth(self, context: Context, budget: Budget) -> int:
        """Rows of the pass; 0 unless the target has read all tokens but the root."""
        if len(context.sequence.tokens) != len(context.tokens) - 1:
            return 0
        return min(self.max_depth, budget.max_depth, budget.max_nodes, self.model.target.room(context.sequence))

    def _feed(self, context: Context, depth: int) -> Feed:
        context.sequence.clear_scratch()
        positions = len(context.tokens) + torch.arange(depth - 1)  # positions of the unknown tokens
        return Feed(context.sequence, [context.root, *self.net.config.filler(positions).tolist()], wanted=depth)
