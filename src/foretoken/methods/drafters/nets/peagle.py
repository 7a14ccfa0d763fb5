"""P-EAGLE: EAGLE-3 with more layers, and a learned state for unknown positions (arXiv 2602.01469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.models.forward.heads.features import FeatureModel

DEEPEST = 64
"""Maximum positions of a pass."""


@dataclass(frozen=True)
class PeagleConfig(Eagle3Config):
    """Shape of the network.

    Attributes:
        num_layers: decoder layers, including the wide one.
        places: positions that it was trained to predict in one pass.
        mask_token: id whose embedding accompanies the learned state.
    """

    num_layers: int = 4
    places: int = 8
    mask_token: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or not 1 <= self.places <= DEEPEST:
            raise ValueError(
                f"peagle needs num_layers >= 1 and places from 1 to {DEEPEST}, not {self.num_layers} and {self.places}"
            )
        super().__post_init__()
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token must be a token of the target, from 0 to {self.vocab_size - 1}, not {self.mask_token}"
            )


class PeagleNet(Eagle3Net):
    """EAGLE-3's inputs; a position after the sequence has the mask's embedding and the learned ``mask_hidden``."""

    config: PeagleConfig

    def __init__(self, config: PeagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.taps) * config.hidden_size))

    @property
    def mask_feature(self) -> Tensor:
        """[D] the feature of a position after the sequence."""
        return self.fuse([self.mask_hidden])[0, 0]


class PeagleModel(FeatureModel):
    """Arguments are those of :class:`~foretoken.models.forward.heads.features.HeadForward`."""

    model: PeagleNet

    @torch.no_grad()
    def mask_states(self, count: int) -> Tensor:
        """[count, D] features of positions after a sequence."""
        return self.model.mask_feature.float().expand(count, -1)
