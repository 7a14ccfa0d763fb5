"""Staged speculative decoding (Spector, Ré 2023, https://arxiv.org/abs/2308.04623): the draft is a tree, and a cheaper
drafter accelerates the draft model that writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, TokenTree, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Verify
from foretoken.methods.drafters.cascade import CascadeDrafter, Chain
from foretoken.methods.drafters.drawing import best, draw_without_replacement
from foretoken.methods.trees.counts import Counts, Ranks, StaticTree
from foretoken.methods.trees.shapes import Choice
from foretoken.methods.trees.specs import static_tree_of
from foretoken.models.base import LanguageModel

MOST_NODES = 256
"""Maximum nodes of a tree."""


@dataclass
class StagedNode:
    """A token of the tree.

    Attributes:
        choice: its ranks from the root downwards.
        distribution: distribution [V] that it was drawn from; ``None`` for a point.
    """

    choice: Choice
    token: int
    distribution: Tensor | None


@dataclass
class Spine(Chain):
    """The chain of first children below the root, and the tree around it.

    Attributes:
        counts: children per node, as planned before tokens are drawn.
        nodes: the whole tree so far, parents and earlier siblings first.
    """

    counts: Counts = lambda choice: 0
    nodes: list[StagedNode] = field(default_factory=list)

    def first_children(self, choice: Choice) -> int:
        """Planned length of the chain of first children below ``choice``."""
        length = 0
        while self.counts(choice):
            choice, length = (*choice, 0), length + 1
        return length


@dataclass
class SiblingChain(Chain):
    """A chain of first children below a sibling.

    Attributes:
        path: draft tokens down to that sibling, which is the root of the first inner drafts.
    """

    path: tuple[int, ...] = ()

    def enter(self) -> None:
        """Set the inner context to the request's tokens, the path and this chain's tokens."""
        self.inside.imagine((*self.path, *self.tokens))


Stage = list[tuple[Spine, Choice, tuple[int, ...], Chain]]
"""Chains of one stage: the tree, the node that the chain follows, the draft tokens down to that node, and the chain."""


class StagedDrafter(CascadeDrafter):
    """A tree whose chains of first children are each written as in ``cascade``, one stage after the other.

    The first stage is the chain below the root, the spine.  The model has scored every node of a chain to write it, so
    the siblings of its tokens cost no forward.  The next stage writes the chains below these siblings, all in the same
    forwards, and so on: a tree of d levels takes as many forwards as its stages take rounds, not d of them.

    Args:
        rule: verifies these inner drafts, for example :func:`foretoken.methods.verifiers.compatibility.inner_rule`.
        k: length of the spine without ``tree``.
        width: tokens per position, that of the spine included; the others are leaves.
        target: the target model, as in :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        tree: a static tree in place of ``k`` and ``width``, whose siblings may have children: children per level,
            ``"3x2x1"``, a file of ``foretoken tune tree``, or a spec such as ``"(sequoia,nodes=16)"``.
    """

    name = "staged"

    def __init__(
        self,
        model: LanguageModel,
        inner: Drafter,
        rule: Verify,
        k: int = 8,
        width: int = 3,
        target: LanguageModel | None = None,
        tree: str = "",
    ) -> None:
        check_least(self.name, 1, width=width)
        shape = listed(static_tree_of(tree, self.name)) if tree else None
        if (k * width if shape is None else len(shape)) > MOST_NODES:
            tried = f"tree={tree}" if tree else f"k={k} times width={width}"
            raise ValueError(f"staged needs a tree of at most {MOST_NODES} nodes, not {tried}")
        self.choices = comb(k, width) if shape is None else shape
        super().__init__(model, inner, rule, max(map(len, self.choices)) if tree else k, target=target)
        self.max_nodes, self._ranks = len(self.choices), Ranks(self.choices)
        if self._ranks.branches:  # the first child is drawn first, its siblings after it with earlier ones removed
            self.traits = replace(self.traits, kind=Kind.WITHOUT_REPLACEMENT, draws_trees=True)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        inner: str = "ngram",
        quantize: str = "auto",
        window: int = 0,
        sink: int = 0,
        **options: Any,
    ) -> Self:
        """Build from a spec ``staged[:PATH][,inner=SPEC]``, as ``cascade`` but without a late drafter.

        Args:
            quantize, window, sink: as for :class:`~foretoken.methods.drafters.model.ModelDrafter`.
        """
        return super().build(path, context, inner=inner, quantize=quantize, window=window, sink=sink, **options)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _begin(self, context: Context, budget: Budget) -> Chain:
        """The spine and the children per node, by the planned length instead of the one that a stop rule leaves, so
        that they do not depend on drawn tokens."""
        chain = super()._begin(context, budget)
        counts = self._ranks.within(chain.length, budget.max_nodes)
        spine = Spine(context, chain.inside, chain.sequence, budget, chain.length, chain.to_write, counts=counts)
        spine.to_write = spine.first_children(())
        return spine

    def _write(self, chains: Sequence[Chain]) -> None:
        super()._write(chains)
        stage: Stage = [(chain, (), (), chain) for chain in chains if isinstance(chain, Spine)]
        while stage:
            stage = [branch for item in stage for branch in self._settle(*item)]
            self._write_rounds([chain for *_, chain in stage])

    def _settle(self, spine: Spine, choice: Choice, path: tuple[int, ...], chain: Chain) -> Stage:
        """Add a written chain to the tree, draw the siblings of its tokens, and return the chains below these."""
        pairs = list(zip(chain.tokens, chain.distributions, strict=True))
        for depth, (token, distribution) in enumerate(pairs, 1):
            spine.nodes.append(StagedNode((*choice, *[0] * depth), token, distribution))
        branches: Stage = []
        for depth, (_, distribution) in enumerate(pairs):
            above = (*choice, *[0] * depth)
            siblings = self._siblings(chain, depth, spine.counts(above) - 1)
            for rank, token in enumerate(siblings, 1):
                sibling, down = (*above, rank), (*path, *chain.tokens[:depth], token)
                spine.nodes.append(StagedNode(sibling, token, distribution))
                length = spine.first_children(sibling)
                if length and not self._is_last(chain, *chain.sources[depth], token):
                    branch = SiblingChain(
                        spine.context, spine.inside, spine.sequence, spine.budget, length, length, path=down,
                        unread=(token,), parent=chain.spots[depth], most_guesses=length,
                    )  # fmt: skip
                    branches.append((spine, sibling, down, branch))
        return branches

    def _siblings(self, chain: Chain, depth: int, count: int) -> list[int]:
        """``count`` distinct tokens beside the chain's token at ``depth``."""
        token, distribution = chain.tokens[depth], chain.distributions[depth]
        if count <= 0:
            return []
        if distribution is not None:
            weights = distribution.clone()  # [V]
            weights[token] = 0.0
            return draw_without_replacement(weights, count, chain.context)
        scores, node = chain.sources[depth]
        ranking = scores.ranking(node).clone()  # [V]
        ranking[token] = -torch.inf
        return best(ranking, count)

    def _finished(self, chain: Chain) -> TokenTree:
        nodes = chain.nodes if isinstance(chain, Spine) else []
        numbers = {(): 0, **{node.choice: number for number, node in enumerate(nodes, 1)}}
        tokens = (chain.context.root, *(node.token for node in nodes))
        parents = (-1, *(numbers[node.choice[:-1]] for node in nodes))
        if not nodes or nodes[0].distribution is None:
            return TokenTree(tokens, parents)
        rows: dict[int, int] = {}  # siblings share a distribution
        drawn = [node.distribution for node in nodes if node.distribution is not None]
        q_rows = (-1, *(rows.setdefault(id(distribution), len(rows)) for distribution in drawn))
        each = {id(distribution): distribution for distribution in drawn}
        return TokenTree(tokens, parents, self.traits.kind, torch.stack(list(each.values())), q_rows)


def sped_up(
    name: str,
    context: BuildContext,
    inner: str,
    options: dict[str, Any],
    make: Callable[..., LanguageModel],
    width: int = 1,
) -> CascadeDrafter:
    """The drafter ``name`` over the model that ``make`` builds from its options, with the inner drafter ``inner``: a
    cascade, or a staged drafter of ``width`` tokens per position.

    Raises:
        ValueError: an inner drafter that does not fit, or options for another tree.
    """
    for key in ("tree", "draw"):
        if value := options.pop(key, ""):
            raise ValueError(f"{name} with inner={inner} drafts chains: leave out {key}={value}")
    k = options.pop("k", 8)
    guesser, target = context.nested(name, inner), context.target
    model = make(**options)
    if width == 1:
        return CascadeDrafter(model, guesser, context.inner_rule, k, target=target)
    return StagedDrafter(model, guesser, context.inner_rule, k, width, target)


def comb(k: int, width: int) -> list[Choice]:
    """A chain of ``k`` tokens with ``width - 1`` leaves beside each, the early ones first because they are reached more
    often."""
    spine = [(0,) * depth for depth in range(1, k + 1)]
    return [*spine, *((*(0,) * depth, rank) for depth in range(k) for rank in range(1, width))]


def listed(shape: StaticTree) -> list[Choice]:
    """The nodes of a static tree, parents and earlier siblings first.  Raises ``ValueError`` for more than 256."""
    counts = shape.within(shape.max_depth, MOST_NODES + 1)
    if isinstance(shape, Ranks):
        nodes = list(shape.choices)
    else:
        nodes = [(rank,) for rank in range(counts(()))]
        for choice in nodes:  # level by level: the list grows during the iteration
            if len(nodes) > MOST_NODES:
                break
            nodes += [(*choice, rank) for rank in range(counts(choice))]
    if len(nodes) > MOST_NODES:
        raise ValueError(f"staged needs a tree of at most {MOST_NODES} nodes")
    return nodes
