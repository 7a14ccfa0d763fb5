"""UNO's learned weights: low-rank updates of the target's linear layers.  Ifm 2026 (arXiv 2609.04010)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.models.variants.gated import LowRankUpdates


@dataclass(frozen=True)
class UnoConfig:
    """Shape of the updates, and the input of unknown positions.

    Attributes:
        vocab_size: V of the target.
        shapes: [out, in] of the linear layers that are updated, by their names in a decoder layer.
        rank: rank of the updates (published: 128).
        alpha: updates are scaled by ``alpha / rank`` (published: 2048); 0: not scaled, so that training steps have the
            same effect at every rank.
        places: tokens that one forward predicts, including the target's own first one.
        noise: input of unknown positions: ``"random"`` tokens from 1 to below ``mask_token``, or ``"mask"``, that token
            itself.
        mask_token: id of the mask token; with ``noise="random"`` the bound of the random ids.
    """

    vocab_size: int
    num_layers: int
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rank: int = 16
    alpha: float = 0.0
    places: int = 4
    noise: str = "random"
    mask_token: int = -1

    def __post_init__(self) -> None:
        # As in JSON, so that a stored shape is equal.
        object.__setattr__(self, "shapes", {name: [int(out), int(width)] for name, (out, width) in self.shapes.items()})
        if self.rank < 1 or not self.alpha >= 0:
            raise ValueError(f"uno needs rank >= 1 and alpha >= 0, not {self.rank} and {self.alpha}")
        if self.places < 2:
            raise ValueError(f"uno needs places >= 2, not {self.places}: the first is the target's own")
        if self.noise not in ("random", "mask"):
            raise ValueError(f"noise must be random or mask, not {self.noise!r}")
        if self.mask_token == -1:
            raise ValueError(f"uno needs a mask_token for unknown positions with noise={self.noise}")
        least, most = (2, self.vocab_size) if self.noise == "random" else (0, self.vocab_size - 1)
        if not least <= self.mask_token <= most:
            raise ValueError(
                f"the mask token must be from {least} to {most} for noise={self.noise}, not {self.mask_token}"
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank if self.alpha else 1.0

    def filler(self, positions: Tensor) -> Tensor:
        """Input ids of unknown positions, any shape: a function of the position alone, so that no random number of a
        request is used."""
        if self.noise == "mask":
            return torch.full_like(positions, self.mask_token)
        return 1 + _hashed(positions) % (self.mask_token - 1)


def _hashed(numbers: Tensor) -> Tensor:
    """Int64 from 0 on, of the same shape: the 32-bit mixing of "splitmix32"."""
    low = (1 << 32) - 1
    x = ((numbers + 1) * 0x9E3779B9) & low
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & low
    x = ((x ^ (x >> 15)) * 0x735A2D97) & low
    return x ^ (x >> 15)


class UnoNet(LowRankUpdates):
    def __init__(self, config: UnoConfig) -> None:
        super().__init__(config.shapes, config.num_layers, config.rank, config.scale)
        self.config = config
