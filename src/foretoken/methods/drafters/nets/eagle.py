"""EAGLE's head, which extrapolates the target's features by one token.  Li et al. 2024 (arXiv 2401.15077)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, Mask
from foretoken.models.forward.heads.pieces import HeadParts


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """Shape of the head: the target's layer."""


class EagleNet(nn.Module):
    """``fc([embedding of the next token; feature])`` and one decoder layer without input norm predict the next feature.

    Features are the target's states after its final norm, the input of its vocabulary projection.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = DecoderLayer(config, input_norm=False)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, mask: Mask = None, keep: Keep | None = None
    ) -> Tensor:
        """Embeddings of tokens t + 1 and features of tokens t, both [b, n, D] -> features of tokens t + 1 [b, n, D]."""
        x = self.fc(torch.cat([embeddings, features], -1))
        return self.layer(x, positions, mask, keep)

    def head_state(self, output: Tensor) -> Tensor:
        """Input [..., D] of the vocabulary projection."""
        return output

    def pieces(self) -> HeadParts:
        return HeadParts(self.layer, entry=self.fc)
