"""DFlash2's training: the block's loss, and the selector's over each place's candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.training.recipes.base import Batch, soft_cross_entropy
from foretoken.training.recipes.blocks import BlockRecipe, BlockSettings
from foretoken.training.recipes.features import texts_of
from foretoken.training.recipes.labels import Labels


@dataclass(frozen=True)
class Dflash2Settings(BlockSettings, Dflash2Config):
    """The network's shape and its loss."""


class Dflash2Recipe(BlockRecipe):
    """The selector learns to choose among the candidates behind the text's own token."""

    method = "dflash2"
    config_class: ClassVar[type[Any]] = Dflash2Settings
    drafter_class = Dflash2Drafter
    net: Dflash2Net

    def place_loss(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> tuple[Tensor, Any]:
        """Cross-entropies with the target's distribution, over all tokens and over the candidates.

        The target's likeliest token is made a candidate where it is none.
        """
        logits = self.logits(states)
        wanted, counted = labels.of(texts_of(columns), columns.flatten())
        ids = logits.detach().topk(min(self.config.top, logits.shape[-1]), -1).indices
        best = wanted.argmax(-1, keepdim=True)
        ids[:, -1:] = torch.where((ids == best).any(-1, keepdim=True), ids[:, -1:], best)
        query, _ = self.net.query(batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1), None)
        targets = ids if self.frequent is None else self.frequent[ids]
        scores = self.net.corrected(logits.gather(-1, ids), ids, targets, query)
        chances = wanted.gather(-1, ids)
        chances = chances / chances.sum(-1, keepdim=True).clamp_min(1e-9)
        return soft_cross_entropy(logits, wanted, counted) + soft_cross_entropy(scores, chances, counted), None
