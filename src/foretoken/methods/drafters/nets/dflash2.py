"""DFlash2: convolutions let rows of a block read the previous row, and candidates are scored in pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.nets.block import BlockConfig, BlockLayer
from foretoken.methods.drafters.nets.pairs import PairConfig, PairNet
from foretoken.models.forward.heads.pieces import LayerParts


@dataclass(frozen=True)
class Dflash2Config(PairConfig):
    """Shape of the network.

    Attributes:
        conv: rows that a convolution reads, including the row itself.
        group: channels that share their part of a convolution's kernel.
    """

    conv: int = 2
    group: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv < 1 or self.group < 1 or self.hidden_size % self.group:
            raise ValueError(
                f"dflash2 needs conv >= 1 and a group that divides {self.hidden_size} channels, "
                f"not {self.conv} and {self.group}"
            )


class DynamicConv(nn.Module):
    """A causal convolution over the rows of a block with input-dependent kernels; it starts as the identity."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__()
        self.taps, self.group, self.block = config.conv, config.group, config.block
        size = config.hidden_size
        self.base_kernel = nn.Parameter(torch.zeros(2, config.conv, size))
        self.kernel_projection = nn.Linear(size, 2 * config.conv * size // config.group, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, x: Tensor) -> Tensor:
        """Kernels [2, b, n, taps, D] before and after the sublayer, from its normed input [b, n, D]."""
        moving = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        kernels: Tensor = self.base_kernel + moving
        return kernels.movedim(2, 0)

    def forward(self, x: Tensor, kernels: Tensor) -> Tensor:
        """[b, n, D] of rows [b, n, D] by kernels [b, n, taps, D], with zeros before a block's first row."""
        rows = min(self.block, x.shape[1])
        blocks = x.unflatten(1, (-1, rows))
        shifted = [F.pad(blocks, (0, 0, tap, 0))[:, :, :rows] for tap in range(self.taps)]
        return (torch.stack(shifted, 3).flatten(1, 2) * kernels).sum(2)


class Dflash2Layer(BlockLayer):
    """The sublayers of a block's layer, each between two convolutions."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = DynamicConv(config), DynamicConv(config)

    def pieces(self) -> LayerParts:
        return replace(super().pieces(), around_attention=self.attention_conv, around_mlp=self.mlp_conv)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, keep: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(normed)
        mixed = self.self_attn(self.attention_conv(normed, before), cos, sin, mask, keep)
        x = x + self.attention_conv(mixed, after)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after)


class CandidateSelector(nn.Module):
    """``<A[p] * (P h), B[c]>``; the codebooks have a row per token of the target."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, config.rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)


class Dflash2Net(PairNet):
    config: Dflash2Config

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def layer(self, config: BlockConfig) -> nn.Module:
        return Dflash2Layer(config)  # type: ignore[arg-type]

    def query(self, before: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``A[p] * (P h)``."""
        selector = self.candidate_selector
        return selector.predecessor_codebook[before] * selector.hidden_projection(states), None

    @property
    def successors(self) -> Tensor:
        """B."""
        return self.candidate_selector.successor_codebook
