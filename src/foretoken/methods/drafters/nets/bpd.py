"""Block-parallel heads: one hidden layer for all of them.  Stern, Shazeer, Uszkoreit 2018 (arXiv 1811.03115)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class BpdConfig:
    """Shape of the heads.

    Attributes:
        hidden_size: D of the target.
        k: block size in the paper's count: head 1 is the target itself, heads 2 to k are the network.
        width: hidden units per head; every head reads those of all heads.
        norm: final norm of each head: ``"rms"`` or ``"layer"``.
    """

    hidden_size: int
    k: int = 4
    width: int = 512
    norm: str = "rms"

    def __post_init__(self) -> None:
        if self.k < 2 or self.width < 1:
            raise ValueError(f"bpd needs k >= 2 (head 1 is the target) and width >= 1, not {self.k} and {self.width}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {self.norm!r}")


class BpdHeads(nn.Module):
    """Heads 2 to k: residual branches of one wide layer, each with its own norm.

    The branches start at zero, so that every head starts as a norm of its input state.

    Args:
        size: initial scale of the norms; with the usual size of the target's states, a new head's logits are about the
            target's.
    """

    def __init__(self, config: BpdConfig, size: float = 1.0) -> None:
        super().__init__()
        self.config = config
        count = config.k - 1
        self.up = nn.Linear(config.hidden_size, count * config.width)
        self.down = nn.Linear(count * config.width, count * config.hidden_size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        # Vectors, not one matrix: they are trained as scales.
        self.norms = nn.ModuleList(NORMS[config.norm](config.hidden_size, eps=1e-6) for _ in range(count))
        for norm in self.norms:
            nn.init.constant_(norm.weight, size)  # type: ignore[arg-type]

    def forward(self, states: Tensor, heads: Sequence[int]) -> Tensor:
        """States [n, D] after the target's final norm -> those of ``heads`` (2 to k), [len(heads), n, D].

        The target's vocabulary projection follows.
        """
        units = F.relu(self.up(states))  # [n, (k - 1) * width]
        return torch.stack([self._head(states, units, head - 2) for head in heads])

    def _head(self, states: Tensor, units: Tensor, position: int) -> Tensor:
        rows = slice(position * self.config.hidden_size, (position + 1) * self.config.hidden_size)
        branch = F.linear(units, self.down.weight[rows], self.down.bias[rows])
        return self.norms[position](states + branch)
