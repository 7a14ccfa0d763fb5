"""Extra heads on the target's last hidden state guess the next K tokens at once; their best products form a tree.

Medusa, Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Context
from foretoken.drafters.drawing import best_ahead
from foretoken.drafters.heads import HeadsDrafter
from foretoken.drafters.nets.medusa import MedusaConfig, MedusaHeads


class MedusaDrafter(HeadsDrafter):
    """The tokens of a tree of ranks, whatever was drawn above them: one call of all heads per round."""

    name = "medusa"
    net_config = MedusaConfig
    net_class = MedusaHeads

    def fill(self, states: Tensor, contexts: Sequence[Context], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
        """One call of all heads for all requests."""
        logits, count = self.logits(states), len(contexts)
        top = 1 + max(choice[-1] for choice in self.choices)
        heads = range(len(logits))
        rows = [context for _ in heads for context in contexts]
        found = best_ahead(logits.flatten(0, 1), rows, [head for head in heads for _ in contexts], top, self.head)
        return [
            [found[(len(choice) - 1) * count + i][choice[-1]] for choice in (self.choices[node - 1] for node in nodes)]
            for i, nodes in enumerate(shapes)
        ]

    def logits(self, states: Tensor) -> Tensor:
        """[K, n, V_d] of states [n, D]."""
        hidden = self.heads(states)
        if len(self.heads.projections):
            return torch.stack([self.project(i, state) for i, state in enumerate(hidden)])
        count, rows, size = hidden.shape
        return self.project(0, hidden.view(count * rows, size)).view(count, rows, -1)  # one product for all
