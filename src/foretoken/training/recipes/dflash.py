"""Training of DFlash, DFlash2 and DSpark: blocks after positions all over a text, all at once.

DFlash is arXiv 2602.06036.  DFlash2 adds the selector's loss over each position's candidates.  DSpark (arXiv
2607.05147) learns corrected distributions near the target's, and the probability that a draft is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.nets.block import BlockConfig
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.training.recipes.base import Batch, cross_entropies
from foretoken.training.recipes.blocks import BlockRecipe, BlockSettings, PositionLosses
from foretoken.training.recipes.features import texts_of
from foretoken.training.recipes.labels import Labels


class DflashRecipe(BlockRecipe):
    """The loss of the block alone."""

    method = "dflash"
    net_config = BlockConfig
    drafter_class = DflashDrafter


@dataclass(frozen=True)
class Dflash2Settings(BlockSettings, Dflash2Config):
    """The network's shape and its loss."""


class Dflash2Recipe(BlockRecipe):
    """The selector learns to choose among the candidates after the text's own token."""

    method = "dflash2"
    config_class: ClassVar[type[Any]] = Dflash2Settings
    net_config = Dflash2Config
    drafter_class = Dflash2Drafter
    net: Dflash2Net

    def position_losses(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> PositionLosses:
        """Cross-entropies with the target's distribution, over all tokens and over the candidates.

        The target's most likely token is always made a candidate: it takes the last rank if it is missing.  That token
        alone as the label accepts as many draft tokens, the text's own token fewer (docs/log.md).
        """
        logits = self.logits(states)
        distributions, counted = labels.of(texts_of(columns), columns.flatten())
        ids = logits.detach().topk(min(self.config.top, logits.shape[-1]), -1).indices
        best = distributions.argmax(-1, keepdim=True)
        ids[:, -1:] = torch.where((ids == best).any(-1, keepdim=True), ids[:, -1:], best)
        query, _ = self.net.query(batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1), None)
        targets = ids if self.frequent is None else self.frequent[ids]
        scores = self.net.corrected(logits.gather(-1, ids), ids, targets, query[:, None])[:, 0]
        entropies = cross_entropies(logits, distributions)
        probabilities = distributions.gather(-1, ids)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True).clamp_min(1e-9)
        losses = entropies + cross_entropies(scores, probabilities)
        return PositionLosses(losses, entropies, counted)


@dataclass(frozen=True)
class DsparkSettings(BlockSettings, DsparkConfig):
    """The network's shape and its loss.

    Attributes:
        entropy: weight of the cross-entropy; the L1 distance between the distributions has the remaining weight.
    """

    from_anchor: bool = True
    entropy: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be from 0 to 1, not {self.entropy}")


class DsparkRecipe(BlockRecipe):
    """Positions are corrected by the text's own tokens; the confidence head learns the acceptance probability of a
    draft token."""

    method = "dspark"
    config_class: ClassVar[type[Any]] = DsparkSettings
    net_config = DsparkConfig
    drafter_class = DsparkDrafter
    net: DsparkNet

    def position_losses(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> PositionLosses:
        """Cross-entropy with and distance to the target's distribution, and the confidence head's cross-entropy."""
        before, states = batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1)
        query, memory = self.net.query(before, states, memory)
        rows = self.net.successors if self.frequent is None else self.net.successors[self.frequent]
        logits = self.parts.logits(states, self.frequent) + F.linear(query, rows.to(query.dtype))
        targets, counted = labels.of(texts_of(columns), columns.flatten())
        log_guess = torch.log_softmax(logits.float(), -1)
        probabilities, entropy = log_guess.exp(), self.config.entropy
        entropies = -(targets * log_guess).sum(-1)
        losses = entropy * entropies + (1 - entropy) * (targets - probabilities).abs().sum(-1)
        odds = self.net.confidences(before, states)
        if odds is not None:
            accepted = torch.minimum(targets, probabilities).sum(-1).detach().clamp(0, 1)
            losses = losses + F.binary_cross_entropy_with_logits(odds.float(), accepted, reduction="none")
        return PositionLosses(losses, entropies, counted, memory)
