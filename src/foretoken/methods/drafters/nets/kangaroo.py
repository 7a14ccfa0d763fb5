"""Kangaroo's adapter: one attention between an early exit and the vocabulary.  Liu et al. 2024 (arXiv 2404.18911)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from foretoken.methods.drafters.nets.decoder import Attention, Keep, LayerConfig, Mask, RmsNorm
from foretoken.models.forward.heads.pieces import HeadParts


@dataclass(frozen=True)
class KangarooConfig(LayerConfig):
    """Shape of the adapter: the attention of the target's layers (``ffn`` is 0, there is no MLP).

    Attributes:
        layer: the exit layer E: number of the target's layers that run before the adapter; by default a sixteenth.
    """

    layer: int = 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise ValueError(f"kangaroo needs an exit layer >= 1, not {self.layer}")


class KangarooNet(nn.Module):
    """``norm(h + attention(norm(h)))`` over the hidden states h of the exit layer; the target's projection follows."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RmsNorm(config.hidden_size, config.eps)
        self.attention = Attention(config)
        self.norm = RmsNorm(config.hidden_size, config.eps)
        # Zero at first: an untrained adapter is an early exit.
        nn.init.zeros_(self.attention.o_proj.weight)

    def forward(
        self, embeddings: Tensor | None, states: Tensor, positions: Tensor, mask: Mask = None, keep: Keep | None = None
    ) -> Tensor:
        """States [b, n, D] of the exit layer -> [b, n, D] for :meth:`head_state`.

        A token is in its state already, so ``embeddings`` are not read.
        """
        return states + self.attention.mixed(self.input_layernorm(states), positions, mask, keep)

    def head_state(self, output: Tensor) -> Tensor:
        """Input [..., D] of the vocabulary projection."""
        return self.norm(output)

    def pieces(self) -> HeadParts:
        return HeadParts(self.attention, before=self.input_layernorm, last=self.norm)
