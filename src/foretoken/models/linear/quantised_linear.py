"""A model whose linear layers are quantised for good: less memory, and faster steps where reading weights takes the
time.  Its distribution is its own, not that of the model with full weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.base import CapabilityError
from foretoken.models.linear.packing import children_of, embedded_in, is_plain
from foretoken.models.linear.product import QuantisedLayer
from foretoken.models.linear.quantised import (
    WITHOUT_BYTES,
    available,
    fastest_target_product,
    make_product,
    multiplies_bytes,
    wide_rows,
)
from foretoken.models.linear.quantised_products import QuantisedProduct, side_by_side

KINDS = ("int8", "int4", "int8-a8", "int4-a8")
"""What weights can be quantised to; ``a8``: activations of 8 bits instead of 15 or 16."""
GROUP = 32
"""Weights that share an int4 scale."""


class QuantisedLinear(QuantisedLayer):
    """Drop-in for an ``nn.Linear`` on CPU, for models that the library loaded itself.

    Args:
        product: what multiplies.
        dtype: of the model.
    """

    def __init__(self, product: QuantisedProduct, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = product.shape
        self.product, self._dtype = product, dtype

    @classmethod
    def of(cls, linear: nn.Linear, product: type[QuantisedProduct], wide: bool = True) -> QuantisedLinear:
        """A layer's weight, quantised."""
        bias = None if linear.bias is None else linear.bias.detach()
        quantised = make_product(product, linear.weight, bias, GROUP)
        quantised.wide = wide_rows if wide else None
        return cls(quantised, linear.weight.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def weight(self) -> Tensor:
        """[out, in] as an ordinary tensor: made every time that it is asked for."""
        return self.product.dense().to(self._dtype)

    def sampled(self, count: int) -> Tensor:
        """``count`` rows of the weight, evenly spaced."""
        step = max(1, self.out_features // count)
        return self.product.some(slice(None, None, step))[:count].to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """[out], or ``None``."""
        return None if self.product.bias is None else self.product.bias.to(self._dtype)

    @property
    def packed_bytes(self) -> int:
        return self.product.nbytes

    @staticmethod
    def joined(linears: Sequence[Any]) -> SideBySide:
        if len(linears) > 1 and all(isinstance(one, QuantisedLinear) for one in linears):
            whole = side_by_side(linears)
            if whole is not None:
                return SideBySide([whole])
        return SideBySide([one.product if isinstance(one, QuantisedLinear) else _plain(one) for one in linears])

    def forward(self, x: Tensor) -> Tensor:
        """Same as ``nn.Linear``: [..., in] -> [..., out]."""
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def multiply_dequantised(model: nn.Module) -> None:
    """Let every quantised layer below ``model`` multiply by its weight as numbers, without its kernel."""
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.product.product = module.product.by_dense  # type: ignore[method-assign]


def _plain(linear: Any) -> Callable[[Tensor], Tensor]:
    """A layer that is not quantised, for input of any dtype."""
    return lambda x: linear(x.to(linear.weight.dtype)).to(x.dtype)


class SideBySide:
    """Several products of one input as one: what a fused projection is for weights that cannot be joined."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.products = products

    @property
    def alone(self) -> bool:
        """Whether a row's bits do not depend on the other rows."""
        return all(getattr(product, "alone", False) for product in self.products)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, all outs]."""
        if len(self.products) == 1:
            return self.products[0](x)
        return torch.cat([product(x) for product in self.products], -1)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` [n, out] and the product."""
        return residual + self(x)


def is_stored(module: Any) -> bool:
    """Whether a layer multiplies by the numbers of a GGUF file, which may be quantised once more to draft with."""
    return isinstance(module, QuantisedLinear) and module.product.stored


def is_ready_made(model: Any) -> bool:
    """Whether a network was read from a checkpoint whose weights are quantised (GPTQ, AWQ, compressed-tensors, ...)."""
    return getattr(model.config, "quantization_config", None) is not None


def check_kind(kind: str) -> None:
    """Refuse what weights cannot be quantised to."""
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, not {kind!r}")


def quantise_linears(model: Any, kind: str, wide: bool = True) -> int:
    """Replace every ``nn.Linear`` below ``model`` by a quantised one, one after another; returns how many.

    Left as they are: weights that are shared with an embedding, and with ``int4`` shapes that do not fit.  The
    vocabulary projection is int8 at the least: its errors are errors of logits.

    Args:
        model: a network on the CPU that is ours to change.
        kind: one of :data:`KINDS`.
        wide: let calls of many rows dequantise a layer where that is faster; a row's bits then depend on how many there
            are.

    Raises:
        ValueError: another kind.
        CapabilityError: the weights are not on the CPU, or there is nothing to quantise.
    """
    check_kind(kind)
    if model.device.type != "cpu":
        raise CapabilityError(f"quantize={kind} is for the cpu, and the weights are on {model.device}: use device=cpu")
    if not available():
        raise CapabilityError("this build of PyTorch has no products of quantised weights")
    bits, _, short = kind.removeprefix("int").partition("-a")
    if short and not multiplies_bytes():
        raise CapabilityError(f"quantize={kind}: {WITHOUT_BYTES}: use quantize=int{bits}")
    if is_ready_made(model):
        raise CapabilityError("the weights of this checkpoint are quantised already: leave quantize out")
    embeddings, head, count = embedded_in(model), model.get_output_embeddings(), 0
    for parent, name, child in list(children_of(model)):
        if not isinstance(child, nn.Linear) or not is_plain(child) or id(child.weight) in embeddings:
            continue
        own = "8" if child is head else bits
        product = fastest_target_product(child.out_features, child.in_features, GROUP, own, short or "15")
        if product is not None and child.weight.is_floating_point():
            setattr(parent, name, QuantisedLinear.of(child, product, wide))
            count += 1
    if count <= isinstance(model.get_output_embeddings(), QuantisedLinear):
        raise CapabilityError(
            f"{type(model).__name__} has no nn.Linear that quantize={kind} fits: int4 needs outputs in multiples of 16 "
            f"and inputs in multiples of {GROUP}; use int8, or leave quantize out"
        )
    return count
