"""Products with 8-bit or 4-bit weights on a CPU.

All products are row-independent: other rows in a call change a row's result by rounding at most.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight, Quantised, block4, unpacked4
from foretoken.models.native import integers, integers8, linear, why_not
from foretoken.models.native.library import address
from foretoken.models.native.linear import Linear, bytes_linear

WIDE = 64
"""Minimum number of rows for which dequantising a weight can pay."""


class QuantisedProduct(ABC):
    """A :class:`~foretoken.models.linear.product.Product` with a quantised weight and a bias added in float32.

    Attributes:
        wide: measures the number of rows from which a product of this shape may use the dequantised weight instead (the
            same numbers, summed in another order); ``None``: never.
        has_wide: whether that can ever be faster.
        activations: bits of its input.
        stored: whether the numbers come from the model's file instead of our quantisation.
    """

    name: str
    bits: int
    activations: int = 15
    wide: Callable[[type[QuantisedProduct], int, int, int], int] | None = None
    has_wide: bool = True
    alone: bool = False
    stored: bool = False

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        self.shape = shape
        self.bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        out = self.by_dense(x) if self._has_many(x) else self.product(x)
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _has_many(self, x: Tensor) -> bool:
        if self.wide is None or not self.has_wide or len(x) < WIDE:
            return False
        return len(x) >= self.wide(type(self), *self.shape, getattr(self, "group", 32))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)

    def copied(self) -> QuantisedProduct:
        """The same product in separate memory, without packing the weight again."""
        return copy.deepcopy(self)

    @classmethod
    def fused(cls, products: Sequence[QuantisedProduct]) -> QuantisedProduct | None:
        """Products with a common input as one with concatenated outputs; ``None`` if impossible."""
        return None

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x [n, in] -> x W^T [n, out] in any float dtype."""

    def read(self, x: Tensor) -> Tensor:
        """x [..., in] as rounded by the product, if it uses few bits for activations."""
        if self.activations != 8:
            return x
        return integers8.rounded(x.to(torch.bfloat16).flatten(0, -2)).view(x.shape)

    def dense(self) -> Tensor:
        """The dequantised weight [out, in] in float32 (computed anew, to 8 bits or more)."""
        return self.product(torch.eye(self.shape[1])).float().t().contiguous()

    def some(self, rows: slice) -> Tensor:
        """Some rows of :meth:`dense`."""
        return self.dense()[rows]

    def by_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [..., in] -> x W^T (+ bias) [..., out] in ``dtype``, with the dequantised weight."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.dense().to(dtype), bias)

    def by_dense(self, x: Tensor) -> Tensor:
        """:meth:`product` as an ordinary product with the dequantised weight, in bfloat16."""
        return F.linear(x.to(torch.bfloat16).float(), self.dense()).to(torch.bfloat16)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight."""


class Share(QuantisedProduct):
    """Outputs ``start`` to ``stop`` of a product shared by several layers."""

    def __init__(self, whole: QuantisedProduct, start: int, stop: int) -> None:
        super().__init__((stop - start, whole.shape[1]), None if whole.bias is None else whole.bias[start:stop])
        self.whole, self.start, self.stop = whole, start, stop
        self.name, self.bits, self.alone, self.stored = whole.name, whole.bits, whole.alone, whole.stored
        self.mark = getattr(whole, "mark", "")

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.start : self.stop]

    def product(self, x: Tensor) -> Tensor:
        return self.whole.product(x)[:, self.start : self.stop]

    def dense(self) -> Tensor:
        return self.whole.some(slice(self.start, self.stop))

    def some(self, rows: slice) -> Tensor:
        indices = range(self.start, self.stop)[rows]
        return self.whole.some(slice(indices.start, indices.stop, indices.step))

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * self.shape[0] // self.whole.shape[0]


def side_by_side(linears: Sequence[Any]) -> QuantisedProduct | None:
    """Join the products of several quantised layers with a common input, which then share it; ``None`` if
    impossible."""
    products = [linear.product for linear in linears]
    shared = products[0].whole if isinstance(products[0], Share) else None
    if shared is not None and all(isinstance(product, Share) and product.whole is shared for product in products):
        return shared
    whole: QuantisedProduct | None = type(products[0]).fused(products)
    start = 0
    if whole is not None:
        for linear in linears:
            linear.product = Share(whole, start, start + linear.out_features)
            start += linear.out_features
    return whole


class Int8Product(QuantisedProduct):
    """int8 weights, bfloat16 input.

    PyTorch's operator reads inputs in whole vectors, and beyond the end of widths that are not (wrong numbers on some
    CPUs, a crash on others).  Such weights and inputs are zero-padded.
    """

    name, bits = "int8 weights, bf16 input", 8

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.weight = weight
        self.missing = -self.shape[1] % 32  # padding to the widest vector
        self.padded = F.pad(weight.values, (0, self.missing)) if self.missing else weight.values

    def product(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        x = F.pad(x, (0, self.missing)) if self.missing else x
        return torch._weight_int8pack_mm(x, self.padded, self.weight.scale)

    def dense(self) -> Tensor:
        return self.weight.dequantised()

    @property
    def nbytes(self) -> int:
        return self.padded.nbytes + self.weight.scale.nbytes


class Int4Product(QuantisedProduct):
    """int4 weights, bfloat16 input."""

    name, bits = "int4 weights, bf16 input", 4

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.group = weight.group
        self.packed = torch._convert_weight_to_int4pack_for_cpu(weight.values, 1)
        self.scales = torch.stack([weight.scale.t(), weight.zero.t()], -1).contiguous()  # [in / group, out, 2]

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.packed, self.group, self.scales)

    def dense(self) -> Tensor:
        """[out, in] float32, exact if the layout of the packed weight is known."""
        block = block4(self.shape[0])
        if block == 0:
            return super().dense()
        scale, zero = self.scales.permute(1, 0, 2).contiguous().unbind(-1)
        return Int4Weight(unpacked4(self.packed, self.shape, block), scale, zero, self.group).dequantised()

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


class IntegerProduct(QuantisedProduct):
    """int8 weights, with the input as two integers per number: FBGEMM's product, the fastest on CPUs without bfloat16.

    PyTorch's operator rounds the input to 7 bits (with 8, sums of two products overflow 16 bits on CPUs without VNNI),
    by the minimum and maximum of the *whole call*: too coarse, and dependent on other rows.  Here each row is scaled to
    [-63, 63] by its own maximum and split into its integer part and 126 times the rest.  These two rows cost little,
    since reading the weights takes the time.  One more row holds -63.5 and 63.5, so that the operator's scale is always
    1. Integer sums are exact: a row has the same bits in any batch, and the input has 14 bits.
    """

    name, bits, has_wide, alone = "int8 weights, integer input", 8, False, True

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        scale = weight.scale.double()
        with warnings.catch_warnings():  # PyTorch's deprecation of quantised tensors
            warnings.simplefilter("ignore")
            values = torch._make_per_channel_quantized_tensor(
                weight.values, scale, torch.zeros_like(scale, dtype=torch.long), 0
            )
            self.packed = torch.ops.quantized.linear_prepack(values, None)
        self.ends = torch.zeros(1, self.shape[1])
        self.ends[0, 0], self.ends[0, -1] = 63.5, -63.5

    def product(self, x: Tensor) -> Tensor:
        n, wide = len(x), x.float()
        size = torch.linalg.vector_norm(wide, torch.inf, dim=1, keepdim=True).clamp_min_(1e-30).div_(63)  # [n, 1]
        scaled = wide / size
        whole = scaled.round()
        rows = torch.cat([whole, scaled.sub_(whole).mul_(126), self.ends])  # [2 n + 1, in]
        # The operator refuses a call with one number that is not finite.  The size of such a row is not finite, either.
        rows.nan_to_num_(0.0, 0.0, 0.0)
        out: Tensor = torch.ops.quantized.linear_dynamic(rows, self.packed, True)
        return out[:n].add_(out[n:-1], alpha=1 / 126).mul_(size)

    @property
    def nbytes(self) -> int:
        """One byte per weight, and eight per row for its scale and sum."""
        return self.shape[0] * self.shape[1] + 8 * self.shape[0]


class NativeProduct(QuantisedProduct):
    """Base of the products in our kernels: integer input, bfloat16 result.

    Raises:
        RuntimeError: this machine has no such kernel, or the kernel does not support the shape.
    """

    has_wide, alone = False, True
    packed: Tensor
    scales: Tensor
    group: int = 0

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        reason = why_not()
        if reason is not None or not integers.fits(self.shape[1]):
            raise RuntimeError(reason or f"the number of inputs must be a multiple of 8, not {self.shape[1]}")

    @abstractmethod
    def linear(self) -> Linear:
        """The weight in the kernels' format, without its bias."""

    def product(self, x: Tensor) -> Tensor:
        return linear.product(x.to(torch.bfloat16), self.linear())

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


class NativeInt8Product(NativeProduct):
    """int8 weights in our kernel."""

    name, bits = "int8 weights, own kernel", 8

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed, self.scales = integers.laid_out8(weight)

    def linear(self) -> Linear:
        out, inner = self.shape
        return Linear(linear.EIGHT, inner, out, inner, address(self.packed), address(self.scales))

    def dense(self) -> Tensor:
        out = self.shape[0]
        return Int8Weight(integers.values8(self.packed, out), self.scales[:out]).dequantised()


class NativeInt4Product(NativeProduct):
    """int4 weights in our kernel."""

    name, bits = "int4 weights, own kernel", 4

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.group = weight.group
        self.packed, self.scales = integers.laid_out4(weight)

    def linear(self) -> Linear:
        out, inner = self.shape
        return Linear(linear.FOUR, inner, out, self.group, address(self.packed), address(self.scales))

    def dense(self) -> Tensor:
        out = self.shape[0]
        scale, zero = self.scales.permute(2, 0, 3, 1).flatten(1, 2)[:, :out].contiguous()
        return Int4Weight(integers.values4(self.packed, out), scale, zero, self.group).dequantised()


class NativeInt8ByteProduct(NativeInt8Product):
    """The same weights with 8-bit activations."""

    name, activations = "int8 weights, own kernel, 8-bit input", 8

    def linear(self) -> Linear:
        return bytes_linear(
            self.shape, 8, self.shape[1], self.packed, self.scales, form=linear.PER_ROW, middle=integers.MIDDLE8
        )


class NativeInt4ByteProduct(NativeInt4Product):
    """The same weights with 8-bit activations."""

    name, activations = "int4 weights, own kernel, 8-bit input", 8

    def linear(self) -> Linear:
        form, middle = linear.PAIRS, integers.MIDDLE4
        return bytes_linear(self.shape, 4, self.group, self.packed, self.scales, form=form, zeros=True, middle=middle)
