"""Parts of a lean layer: fused projections, norms in few calls, MLPs, and residual sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from foretoken.models.forward.lean_families import Family, part
from foretoken.models.linear.packing import BlockedProducts, Packing
from foretoken.models.linear.product import Product

Norm = Callable[[Tensor], Tensor]
"""[..., d] -> [..., d]."""


class LeanRmsNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension.

    PyTorch's own takes eight tensor calls on a CPU, this one four to six: |x| is a vector norm, and sqrt(|x|^2 + d eps)
    the hypotenuse of two lengths.  If bits must not depend on the number of rows, PyTorch's own is used.
    """

    def __init__(self, module: Any, packing: Packing, offset: float = 0.0) -> None:
        self.weight, self.eps = _weight(module, packing), getattr(module, "variance_epsilon", None) or module.eps
        self.by_length = self.weight.device.type == "cpu" and not packing.blocks
        self.wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        if offset:  # added before the weight is rounded to its dtype
            self.weight = self.weight.to(self.wide) + offset
        if self.by_length:
            size = self.weight.shape[-1]
            self.scaled = self.weight.to(self.wide) * size**0.5
            self.floor = torch.tensor((size * self.eps) ** 0.5, dtype=self.wide)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.by_length:
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        wide = x.to(self.wide)
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self.floor)
        return (wide / length).mul_(self.scaled).to(x.dtype)


def _weight(module: Any, packing: Packing) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight.to(packing.activations(weight.dtype))


def norm_of(module: Any, packing: Packing, offset: float = 0.0) -> Norm | None:
    """The same norm in few calls; ``None`` for ``None``."""
    if module is None:
        return None
    if type(module) is nn.LayerNorm:
        shape, weight, eps = module.normalized_shape, _weight(module, packing), module.eps
        bias: Tensor | None = None if module.bias is None else module.bias.detach().to(weight.dtype)
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)
    return LeanRmsNorm(module, packing, offset)


class Joined:
    """``residual + scale * norm(y)`` for the output y of a sublayer."""

    def __init__(self, after: Norm | None, scale: float) -> None:
        self.after, self.scale = after, scale
        self.plain = after is None and scale == 1.0

    def __call__(self, y: Tensor, residual: Tensor) -> Tensor:
        """Both [n, D]."""
        y = y if self.after is None else self.after(y)
        # Not add(alpha=scale), which in bfloat16 rounds differently at the end of a row.
        return residual + (y if self.scale == 1.0 else y * self.scale)


class OutputProjection:
    """Last projection of a sublayer and its sum with the residual stream."""

    def __init__(self, projection: Product, joined: Joined) -> None:
        self.projection, self.joined = projection, joined

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[n, in] and [n, D] -> [n, D]."""
        if residual is None:
            return self.projection(x)
        if self.joined.plain:
            return self.projection.plus(x, residual)
        return self.joined(self.projection(x), residual)


Change = Callable[[Product, tuple[str, ...]], Product]
"""A product and the names of its linear layers within the decoder layer -> another product."""


def linear_names(module: str | None, *linears: str) -> tuple[str, ...]:
    """Names, within a decoder layer, of linear layers in one of its modules (an empty name is the layer itself)."""
    return tuple(".".join(filter(None, (module, name))) for name in linears)


Mlp = Callable[[Tensor, Tensor], Tensor]
"""Normalised inputs and the residual stream, both [n, D] -> [n, D]."""


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gate_up: Product, activation: Callable[[Tensor], Tensor], output: OutputProjection) -> None:
        self.gate_up, self.activation, self.output = gate_up, activation, output
        self.projections = (gate_up, output.projection)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.output(self.activation(gate).mul_(up), residual)


class _PlainMlp:
    def __init__(self, up: Product, activation: Callable[[Tensor], Tensor], output: OutputProjection) -> None:
        self.up, self.activation, self.output = up, activation, output
        self.projections = (up, output.projection)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.output(self.activation(self.up(x)), residual)


class _OwnMlp:
    """The model's own module, which reads [1, n, D]."""

    def __init__(self, module: Any, joined: Joined, blocks: bool) -> None:
        self.module, self.joined, self.blocks = module, joined, blocks
        self.dtype: torch.dtype = next(module.parameters()).dtype
        self.projections = (self,)

    @property
    def alone(self) -> bool:
        """PyTorch multiplies the experts, and the rows decide which of them share a product."""
        return self.blocks

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        with BlockedProducts() if self.blocks else nullcontext():
            y = self.module(x[None].to(self.dtype))[0].to(x.dtype)
        return self.joined(y, residual)


def mlp_of(module: Any, family: Family, joined: Joined, packing: Packing) -> Mlp:
    """The MLP of a layer; for a layer without one, a function that returns the residual stream."""
    if module is None:
        return lambda x, residual: residual
    if family.experts:
        return _OwnMlp(module, joined, packing.blocks)
    module_activation = part(module, family.activation)
    is_silu = module_activation is None or isinstance(module_activation, nn.SiLU | SiLUActivation)
    activation = F.silu if is_silu else module_activation
    output = OutputProjection(packing.projection(part(module, family.down)), joined)
    if family.up is not None:
        return _PlainMlp(packing.projection(part(module, family.up)), activation, output)
    return GatedMlp(packing.projection(*(part(module, n) for n in family.gate_up)), activation, output)


def with_products(mlp: Mlp, family: Family, change: Change) -> Mlp:
    """The same MLP with other products; the model's own module stays unchanged."""
    if not isinstance(mlp, GatedMlp | _PlainMlp):
        return mlp
    inside = partial(linear_names, family.mlp)
    output = OutputProjection(change(mlp.output.projection, inside(family.down)), mlp.output.joined)
    if isinstance(mlp, GatedMlp):
        return GatedMlp(change(mlp.gate_up, inside(*family.gate_up)), mlp.activation, output)
    return _PlainMlp(change(mlp.up, inside(str(family.up))), mlp.activation, output)
