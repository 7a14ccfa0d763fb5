"""DSpark's training: corrected distributions near the target's, and the chance that a draft is accepted (arXiv
2607.05147)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.training.recipes.base import Batch, mean_of
from foretoken.training.recipes.blocks import BlockRecipe, BlockSettings
from foretoken.training.recipes.features import texts_of
from foretoken.training.recipes.labels import Labels


@dataclass(frozen=True)
class DsparkSettings(BlockSettings, DsparkConfig):
    """The network's shape and its loss.

    Attributes:
        entropy: weight of the cross-entropy; the distance between the distributions, summed over tokens, weighs the
            rest of 1.
    """

    from_anchor: bool = True
    entropy: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be from 0 to 1, not {self.entropy}")


class DsparkRecipe(BlockRecipe):
    """Places are corrected by the text's own tokens; the confidence head learns how often a draft would be accepted."""

    method = "dspark"
    config_class: ClassVar[type[Any]] = DsparkSettings
    drafter_class = DsparkDrafter
    net: DsparkNet

    def place_loss(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> tuple[Tensor, Any]:
        """Cross-entropy and distance to the target's distribution, and the confidence's cross-entropy."""
        before, states = batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1)
        query, memory = self.net.query(before, states, memory)
        rows = self.net.successors if self.frequent is None else self.net.successors[self.frequent]
        logits = self.parts.logits(states, self.frequent) + F.linear(query, rows.to(query.dtype))
        wanted, counted = labels.of(texts_of(columns), columns.flatten())
        log_guess = torch.log_softmax(logits.float(), -1)
        guess, entropy = log_guess.exp(), self.config.entropy
        losses = -entropy * (wanted * log_guess).sum(-1) + (1 - entropy) * (wanted - guess).abs().sum(-1)
        odds = self.net.confidences(before, states)
        if odds is not None:
            accepted = torch.minimum(wanted, guess).sum(-1).detach().clamp(0, 1)
            losses = losses + F.binary_cross_entropy_with_logits(odds.float(), accepted, reduction="none")
        return mean_of(losses, counted), memory
