"""Hydra's heads, each of which also reads the tokens drafted before its own.  Ankner et al. 2024 (2402.05109)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.nets.decoder import DecoderLayer, Keep, LayerConfig, Mask
from foretoken.methods.drafters.nets.medusa import MedusaConfig
from foretoken.models.forward.heads.pieces import BlockParts, HeadParts


@dataclass(frozen=True)
class HydraConfig(MedusaConfig):
    """Shape of the heads, Medusa's except for their inputs.

    Attributes:
        layers: blocks of a head (Hydra++: 4).
        prefix: whether a decoder layer over all states of the sequence precedes the heads (Hydra++).
        layer: shape of that layer, the fields of ``LayerConfig``.
    """

    method = "hydra"
    prefix: bool = False
    layer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size:
            raise ValueError("hydra has no draft vocabulary of its own: leave draft_vocab_size out")
        if self.prefix and not self.layer:
            raise ValueError("hydra with prefix needs the shape of the layer: give layer, the fields of LayerConfig")


class PrefixLayer(nn.Module):
    """One decoder layer over the target's states, as a ``FeatureModel`` runs it; starts as the identity."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(config)
        for linear in (self.layer.o_proj, self.layer.down_proj):
            nn.init.zeros_(linear.weight)

    def forward(
        self, embeddings: Tensor | None, states: Tensor, positions: Tensor, mask: Mask = None, keep: Keep | None = None
    ) -> Tensor:
        """States [b, n, D] of tokens t -> the heads' inputs [b, n, D]; embeddings are not read."""
        return self.layer(states, positions, mask, keep)

    def head_state(self, output: Tensor) -> Tensor:
        return output

    def pieces(self) -> HeadParts:
        return HeadParts(self.layer, predicts=False)


class HydraHeads(nn.Module):
    """K heads; each starts as the target's projection of the state, ignoring tokens.

    The first block maps the state and i + 1 embeddings to D with a linear residual path, because the widths differ.
    """

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        size, count = config.hidden_size, config.heads
        widths = [(i + 2) * size for i in range(count)]
        self.residual = nn.ModuleList(nn.Linear(width, size, bias=False) for width in widths)
        self.first = nn.ModuleList(nn.Linear(width, size) for width in widths)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(config.layers - 1)) for _ in range(count)
        )
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.zeros_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for residual in self.residual:
            with torch.no_grad():
                residual.weight[:, :size].copy_(torch.eye(size))  # type: ignore[index]
        self.projections = nn.ModuleList(
            nn.Linear(size, config.vocab_size, bias=False) for _ in range(count if config.own_projection else 0)
        )
        self.prefix = PrefixLayer(LayerConfig(**config.layer)) if config.prefix else None

    def forward(self, head: int, inputs: Tensor) -> Tensor:
        """[n, D] for the vocabulary projection, from the state and ``head + 1`` embeddings [n, (head + 2) D]."""
        x: Tensor = self.residual[head](inputs) + F.silu(self.first[head](inputs))
        for block in self.blocks[head].children():
            x = x + F.silu(block(x))
        return x

    def pieces(self, head: int) -> BlockParts:
        layers: list[Any] = list(self.blocks[head].children())
        return BlockParts([self.residual[head], self.first[head]], [layers], residual=True)  # type: ignore[list-item]
