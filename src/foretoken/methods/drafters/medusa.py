"""Extra heads on the target's last hidden state predict the next K tokens at once; their best products form a tree.

Medusa, Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Budget, Context
from foretoken.methods.drafters.drawn_tree import DrawnTree
from foretoken.methods.drafters.heads import HeadsDrafter, ends_after
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.models.forward.heads.blocks import NativeBlocks


class MedusaDrafter(HeadsDrafter):
    """Fills a tree of ranks by one call of all heads per round; tokens do not depend on those above them."""

    name = "medusa"
    net_config = MedusaConfig
    net_class = MedusaHeads

    def fill(
        self, states: Tensor, contexts: Sequence[Context], shapes: Sequence[Sequence[int]], budgets: Sequence[Budget]
    ) -> list[dict[int, int]]:
        count, heads = len(contexts), len(self.heads.blocks)
        top = 1 + max(choice[-1] for choice in self.choices)
        rows = [context for _ in range(heads) for context in contexts]
        ahead = [head for head in range(heads) for _ in contexts]
        tokens, raced = self.best(0, states, rows, ahead, budgets, top)
        filled: list[dict[int, int]] = []
        for i, (nodes, budget) in enumerate(zip(shapes, budgets, strict=True)):
            by_node, open_nodes = dict[int, int](), {0}
            for node in nodes:
                if self.parents[node - 1] not in open_nodes:
                    continue
                choice = self.choices[node - 1]
                row = (len(choice) - 1) * count + i
                by_node[node] = tokens[row][choice[-1]]
                if not ends_after(budget, raced, row, choice[-1]):
                    open_nodes.add(node)
            filled.append(by_node)
        return filled

    def draw_all(self, states: Tensor, trees: Sequence[DrawnTree]) -> None:
        """All nodes of a level share a distribution, unless the request's sampler depends on the path."""
        logits = self.scored(0, states).unflatten(0, (-1, len(states)))  # [K, n, V_d]
        for i, tree in enumerate(trees):
            of_level: dict[int, Tensor | None] = {}
            frontier = [0]
            for level in range(len(logits)):
                following: list[int] = []
                for node in frontier:
                    if level not in of_level or not tree.context.sampler.context_free:
                        of_level[level] = self.distributions(tree, [node], logits[level, i : i + 1])[0]
                    following += tree.draw(node, of_level[level])
                frontier = following

    def natives(self) -> list[NativeBlocks]:
        return [NativeBlocks(self.heads, self.heads.pieces, self.projections(), self.head)]

    def rows(self, head: int, inputs: Tensor) -> Tensor:
        """The rows of all heads, concatenated head by head."""
        return self.logits(inputs).flatten(0, 1)

    def logits(self, states: Tensor) -> Tensor:
        """[K, n, V_d] of states [n, D]."""
        hidden = self.heads(states)
        if len(self.heads.projections):
            return torch.stack([self.project(i, state) for i, state in enumerate(hidden)])
        count, rows, size = hidden.shape
        return self.project(0, hidden.view(count * rows, size)).view(count, rows, -1)  # one product for all
