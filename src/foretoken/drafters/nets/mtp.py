"""DeepSeek-V3's multi-token prediction module (arXiv 2412.19437, section 2.2), used again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, RmsNorm


@dataclass(frozen=True)
class MtpConfig(LayerConfig):
    """Shape of the module: the target's own layer."""


class MtpNet(nn.Module):
    """``proj([norm(embedding of the next token); norm(state)])``, a full decoder layer, and a norm before the head."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm, self.hnorm = RmsNorm(size, config.eps), RmsNorm(size, config.eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = RmsNorm(size, config.eps)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """Embeddings of tokens t + 1 and states of tokens t, both [b, n, D] -> states of tokens t + 1 [b, n, D]."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(features)], -1))
        found: Tensor = self.layer(x, positions, mask, keep)
        return found

    def head_state(self, output: Tensor) -> Tensor:
        """What the vocabulary projection reads of an output [..., D]."""
        found: Tensor = self.norm(output)
        return found
