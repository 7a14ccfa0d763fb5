"""Matrix products with a weight in any format, and linear layers with quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.models.linear.quantised import make_product, wide_rows
from foretoken.models.linear.quantised_products import QuantisedProduct, side_by_side
from foretoken.models.linear.quantised_weights import GROUP


class Product(Protocol):
    """``x -> x W^T (+ bias)`` with a packed weight, a quantised one, or several concatenated."""

    @property
    def alone(self) -> bool:
        """Whether a row's bits do not depend on the other rows."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [n, in] -> [n, out] in the dtype of ``x``."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out], in a single call if available."""


class QuantisedLinear(nn.Module):
    """Permanently quantised replacement of an ``nn.Linear`` on CPU, in models that the library loaded itself."""

    def __init__(self, product: QuantisedProduct, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = product.shape
        self.product, self.dtype = product, dtype

    @classmethod
    def of(
        cls, linear: nn.Linear, product: type[QuantisedProduct], wide: bool = True, power: Tensor | None = None
    ) -> QuantisedLinear:
        bias = None if linear.bias is None else linear.bias.detach()
        quantised = make_product(product, linear.weight, bias, GROUP, power)
        quantised.wide = wide_rows if wide else None
        return cls(quantised, linear.weight.dtype)

    @property
    def weight(self) -> Tensor:
        """[out, in] as an ordinary tensor, computed on every access."""
        return self.product.dense().to(self.dtype)

    def sampled(self, count: int) -> Tensor:
        """``count`` evenly spaced rows of the weight."""
        step = max(1, self.out_features // count)
        return self.product.some(slice(None, None, step))[:count].to(self.dtype)

    @property
    def bias(self) -> Tensor | None:
        """[out], or ``None``."""
        return None if self.product.bias is None else self.product.bias.to(self.dtype)

    @property
    def packed_bytes(self) -> int:
        return self.product.nbytes

    @staticmethod
    def joined(linears: Sequence[Any]) -> SideBySide:
        """The products of several layers with a common input, some of which may be plain."""
        if len(linears) > 1 and all(isinstance(linear, QuantisedLinear) for linear in linears):
            whole = side_by_side(linears)
            if whole is not None:
                return SideBySide([whole])
        return SideBySide(
            [linear.product if isinstance(linear, QuantisedLinear) else _plain(linear) for linear in linears]
        )

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state:  # which load_state_dict(strict=False) would drop without a word
            raise ValueError(f"{prefix}weight is quantised: load the model without quantize=")

    def forward(self, x: Tensor) -> Tensor:
        """Same as ``nn.Linear``: [..., in] -> [..., out]."""
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def multiply_dequantised(model: nn.Module) -> None:
    """Let every quantised layer below ``model`` multiply by its dequantised weight, without its kernel."""
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.product.product = module.product.by_dense  # type: ignore[method-assign]


def _plain(linear: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x.to(linear.weight.dtype)).to(x.dtype)


class SideBySide:
    """Several products with a common input as one: a fused projection for weights that cannot be joined."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.products = products

    @property
    def alone(self) -> bool:
        return all(getattr(product, "alone", False) for product in self.products)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, all outs]."""
        if len(self.products) == 1:
            return self.products[0](x)
        return torch.cat([product(x) for product in self.products], -1)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


def is_stored(module: Any) -> bool:
    """Whether a layer multiplies by numbers from a GGUF file, which a draft may quantise further."""
    return isinstance(module, QuantisedLinear) and module.product.stored


def has_quantised(model: nn.Module) -> bool:
    """Whether any layer below ``model`` is quantised."""
    return any(isinstance(module, QuantisedLinear) for module in model.modules())
