"""Heads on the target's last hidden state that also read the tokens drafted before theirs; one call per level.

Hydra and Hydra++, Ankner et al. 2024 (arXiv 2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context
from foretoken.methods.drafters.drawn_tree import DrawnTree
from foretoken.methods.drafters.heads import HeadsDrafter, ends_after
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.methods.drafters.reading import FeatureReader, ReadingDrafter
from foretoken.models.base import LanguageModel
from foretoken.models.cache.window import USUAL, Window
from foretoken.models.forward.heads.blocks import NativeBlocks
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts


@dataclass
class _Filling:
    """A tree under construction: tokens by node of the shape, and nodes at which a stop rule ended the path."""

    nodes: Sequence[int]
    tokens: dict[int, int]
    budget: Budget
    ended: set[int] = field(default_factory=set)


class HydraDrafter(ReadingDrafter, HeadsDrafter):
    """A tree of fixed shape whose tokens depend on the path above them.

    Args:
        heads: the trained heads; those with a prefix layer (Hydra++) read its output in place of the target's state.
        parts, frequent: as for ``medusa``.
        accuracies: [K][R] measured probability that a head's candidate of this rank is right, below a right path.
        window: positions that a prefix layer attends to; 0: all.
        sink: first positions that it attends to as well.
        target: the target model; needed by a prefix layer, which reads all tokens.
    """

    name = "hydra"
    traits = replace(HeadsDrafter.traits, learns=True)
    net_config = HydraConfig
    net_class = HydraHeads

    def __init__(
        self,
        heads: HydraHeads,
        parts: TargetParts,
        nodes: int = 16,
        accuracies: Sequence[Sequence[float]] | None = None,
        tree: str = "",
        frequent: Sequence[int] = (),
        window: int = USUAL,
        sink: int = 0,
        draw: str = "coupled",
        *,
        target: LanguageModel | None = None,
    ) -> None:
        super().__init__(heads, parts, nodes, accuracies, tree, frequent, draw)
        if heads.prefix is not None:
            if target is None:
                raise ValueError("hydra with a prefix layer needs the target: give target=...")
            model = FeatureModel(heads.prefix, parts, target)
            model.window = Window(window, sink)
            self.reader = FeatureReader(model, wanted=0)
        elif (window, sink) != (USUAL, 0):
            raise ValueError("these hydra heads have no prefix layer: leave window and sink out")

    @classmethod
    def _over(cls, heads: Any, parts: TargetParts, target: LanguageModel, **options: Any) -> Self:
        return cls(heads, parts, target=target, **options)

    # -- what the heads read -----------------------------------------------------------------------------------------

    def level(self, contexts: Sequence[Context]) -> list[bool]:
        """Let a prefix layer read the newly committed tokens, and store its output at the last one."""
        if self.reader is None:
            return super().level(contexts)
        ready, rows = self.reader.follow(contexts)
        for context in contexts:
            if id(context) in rows:
                context.state[self] = rows[id(context)].taps["state"][-1]
        return ready

    def read_states(self, contexts: Sequence[Context]) -> Tensor:
        """[n, D]: the target's states, or the prefix layer's outputs."""
        if self.reader is None:
            return super().read_states(contexts)
        return torch.stack([context.state[self] for context in contexts])

    # -- the tree ----------------------------------------------------------------------------------------------------

    def fill(
        self, states: Tensor, contexts: Sequence[Context], shapes: Sequence[Sequence[int]], budgets: Sequence[Budget]
    ) -> list[dict[int, int]]:
        """Fill the trees level by level, with one head call for all parents of all requests."""
        requests = zip(shapes, contexts, budgets, strict=True)
        trees = [_Filling(nodes, {0: context.root}, budget) for nodes, context, budget in requests]
        inputs, row_of = states, [{-1: i} for i in range(len(trees))]
        for level in range(self.max_depth):
            below = [self._children(tree, level) for tree in trees]
            if not any(below):
                break
            above = [-1, *self.parents]
            read = [[(n, above[n], t.tokens[n]) for n in parents] for t, parents in zip(trees, below, strict=True)]
            inputs = self._inputs(inputs, row_of, read)
            ranks = 1 + max(self.choices[n - 1][-1] for parents in below for nodes in parents.values() for n in nodes)
            rows = [context for context, parents in zip(contexts, below, strict=True) for _ in parents]
            ranked, raced = self.best(level, inputs, rows, [level] * len(rows), budgets, ranks)
            for tree, parents, row_by_node in zip(trees, below, row_of, strict=True):
                for parent, nodes in parents.items():
                    row = row_by_node[parent]
                    for node in nodes:
                        rank = self.choices[node - 1][-1]
                        tree.tokens[node] = ranked[row][rank]
                        if ends_after(tree.budget, raced, row, rank):
                            tree.ended.add(node)
        return [{node: token for node, token in tree.tokens.items() if node} for tree in trees]

    def draw_all(self, states: Tensor, trees: Sequence[DrawnTree]) -> None:
        inputs, frontiers, row_of = states, [[0] for _ in trees], [{-1: i} for i in range(len(trees))]
        for level in range(self.max_depth):
            if not any(frontiers):
                break
            read = [[(n, t.parents[n], t.tokens[n]) for n in nodes] for t, nodes in zip(trees, frontiers, strict=True)]
            inputs = self._inputs(inputs, row_of, read)
            logits = self.scored(level, inputs).split([*map(len, frontiers)])
            for i, (tree, part) in enumerate(zip(trees, logits, strict=True)):
                if frontiers[i]:
                    distributions = zip(frontiers[i], self.distributions(tree, frontiers[i], part), strict=True)
                    frontiers[i] = [child for node, each in distributions for child in tree.draw(node, each)]

    def natives(self) -> list[NativeBlocks]:
        """One entry per head, because each head's input depends on the previous head's predictions."""
        return [
            NativeBlocks(self.heads, partial(self.heads.pieces, i), self.projections(i), self.head)
            for i in range(len(self.heads.blocks))
        ]

    def rows(self, head: int, inputs: Tensor) -> Tensor:
        return self.project(head, self.heads(head, inputs))

    def _children(self, tree: _Filling, level: int) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node in tree.nodes:
            parent = self.parents[node - 1]
            if len(self.choices[node - 1]) == level + 1 and parent in tree.tokens and parent not in tree.ended:
                children.setdefault(parent, []).append(node)
        return children

    def _inputs(
        self, above: Tensor, row_of: Sequence[dict[int, int]], read: Sequence[Sequence[tuple[int, int, int]]]
    ) -> Tensor:
        """Input [m, (level + 2) D] for nodes (node, parent, token) of all trees: the parents' inputs and the tokens'
        embeddings.  Records the nodes' rows in ``row_of``."""
        rows, tokens = list[int](), list[int]()
        for row_by_node, nodes in zip(row_of, read, strict=True):
            for node, parent, token in nodes:
                rows.append(row_by_node[parent])
                row_by_node[node] = len(tokens)
                tokens.append(token)
        return torch.cat([above[rows], self.parts.embedding(tokens).float()], -1)
