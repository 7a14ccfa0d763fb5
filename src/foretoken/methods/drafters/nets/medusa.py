"""Medusa's heads: residual blocks on the target's last hidden state.  Cai et al. 2024 (arXiv 2401.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.forward.heads.pieces import BlockParts


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads.

    Attributes:
        hidden_size: D of the target.
        vocab_size: V of the target.
        heads: K; head i (from 0) predicts the token i + 2 positions after the one whose state it reads.
        layers: residual blocks per head.
        own_projection: whether every head has a vocabulary projection, as in the paper; otherwise they share the
            target's.
        draft_vocab_size: size V_d of the draft vocabulary, whose ids are stored with the heads; 0: all tokens.
    """

    method: ClassVar[str] = "medusa"
    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1
    own_projection: bool = False
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"{self.method} drafts from 0 to {self.vocab_size} tokens, not {self.draft_vocab_size}")
        if self.heads < 1 or self.layers < 1:
            raise ValueError(f"{self.method} needs heads >= 1 and layers >= 1, not {self.heads} and {self.layers}")


class MedusaHeads(nn.Module):
    """K heads; zero-initialised, so that each starts as the target's projection of the state.

    Attributes:
        vocabulary: [V_d] target ids of the draft vocabulary; ``None``: all tokens.
    """

    vocabulary: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(config.layers)) for _ in range(config.heads)
        )
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)
        num_draft_ids = config.draft_vocab_size or config.vocab_size
        self.projections = nn.ModuleList(
            nn.Linear(size, num_draft_ids, bias=False) for _ in range(config.heads if config.own_projection else 0)
        )
        self.register_buffer("vocabulary", torch.arange(num_draft_ids) if config.draft_vocab_size else None)

    def forward(self, hidden: Tensor) -> Tensor:
        """States [n, D] after the final norm -> states [K, n, D] for the vocabulary projection."""
        states = []
        for head in self.blocks:
            x = hidden
            for block in head.children():
                x = x + F.silu(block(x))
            states.append(x)
        return torch.stack(states)

    def pieces(self) -> BlockParts:
        layers: list[list[Any]] = [list(head.children()) for head in self.blocks]
        return BlockParts([head[0] for head in layers], [head[1:] for head in layers])
