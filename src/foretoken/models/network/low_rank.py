"""Low-rank updates of a network's linear layers, W + B A with B [out, r] and A [r, in], and their merge.

Hu et al. 2021 (arXiv 2106.09685).  During training, every ``weight`` reads as the updated one, so the rest of the
network is unaffected; a served model has ordinary layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foretoken.models.network.taps import decoder_layers


class LowRank(nn.Module):
    """Parametrisation of a weight [out, in] as the sum of itself and B A.

    B is initially zero, so that the network is unchanged; ``generator`` draws A.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        # With orthogonal rows of A (on average), a step of B moves W as far as the same step of W would.
        first = torch.randn(rank, columns, generator=generator) / rank**0.5
        self.a = nn.Parameter(first.to(weight.device, weight.dtype))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """The decoder's linear layers by name."""
    inside = {id(module) for module in decoder_layers(network).modules()}
    modules = network.named_modules()
    return {name: each for name, each in modules if isinstance(each, nn.Linear) and id(each) in inside}


def factor_shapes(network: nn.Module, rank: int) -> list[tuple[int, int]]:
    """Shapes of A and B for every linear layer of the decoder."""
    weights = [layer.weight for layer in linear_layers(network).values()]
    return [shape for weight in weights for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))]


def add_low_rank(network: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze a network and add a trainable update to each linear layer of its decoder."""
    if rank < 1:
        raise ValueError(f"a low-rank update needs rank >= 1, not {rank}")
    layers = linear_layers(network)
    if not layers:
        raise ValueError(f"{type(network).__name__} has no linear layers to update: use rank=0")
    network.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers.values():
        weight = layer.weight.detach()
        parametrize.register_parametrization(layer, "weight", LowRank(weight, rank, generator))


def low_rank_factors(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) by layer name; empty if there are no updates."""
    factors = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            update: Any = module.parametrizations["weight"][0]  # type: ignore[index]
            factors[name] = update.a.detach(), update.b.detach()
    return factors


@torch.no_grad()
def merge_low_rank(network: nn.Module, dtype: torch.dtype) -> None:
    """Merge the updates, rounded to ``dtype`` as stored, into the weights and remove them."""
    for name, (a, b) in low_rank_factors(network).items():
        before: Any = network.get_submodule(name)
        # A new layer: torch's removal changes the class, which copies of the network share.
        layer = nn.Linear(before.in_features, before.out_features, before.bias is not None, device="meta")
        weight = before.parametrizations["weight"].original
        layer.weight = nn.Parameter(merged(weight, a.to(dtype), b.to(dtype)))
        layer.bias = before.bias
        network.set_submodule(name, layer.train(before.training))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """W + scale B A, computed in float32 (float64 for float64 weights) and rounded once to the weight's dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
