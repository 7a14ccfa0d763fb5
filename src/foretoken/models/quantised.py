"""Linear layers with weights in 8 or 4 bits on a CPU: the products that read them, and which one is the fastest here.

All products are row-independent: what else is in a call changes a row's result by rounding at most.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.quantised_weights import (
    ROWS4,
    Int4Weight,
    Int8Weight,
    Quantised,
    block4,
    fits_int4,
    unpacked4,
)

MEASURED = 2048 * 4096
"""Most weights that a product is timed on: more than a cache holds, little enough for some milliseconds."""
WIDE, NEVER = 64, 2**62
"""The fewest rows that are worth dequantising a weight for; and when nothing is."""
COPIES = 10
"""Copies of a weight that are multiplied in turn: those of a large one do not fit into a cache, as in a model."""
TRIES = 2
"""Timed turns through the copies of a product, after one that warms up."""
GAIN4 = 1.25
"""How much faster int4 must be than int8 to be worth its larger error."""

VECTOR = 32
"""Inputs that the widest instructions read at once."""


class QuantisedProduct(ABC):
    """``x -> x W^T (+ bias)`` like :class:`foretoken.models.packing.Projection`, with a quantised W.

    Args:
        weight: the quantised weight.
        bias: [out] or ``None``; added in float32.

    Attributes:
        wide: whether calls of many rows may multiply by the dequantised weight where that is faster here: the same
            numbers, summed in another order.
        has_wide: whether that can be faster at all.
    """

    name: str
    bits: int
    wide: bool = False
    has_wide: bool = True

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        self.shape = shape
        self.bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out] in the dtype of ``x``."""
        many = self.wide and len(x) >= WIDE and len(x) >= wide_rows(type(self), *self.shape, getattr(self, "group", 32))
        out = self.by_dense(x) if many else self.product(x)
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out]."""
        return residual + self(x)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x [n, in] -> x W^T [n, out] in any float dtype."""

    def dense(self) -> Tensor:
        """The weight [out, in] that the numbers stand for, in float32 (made anew, to 8 bits or more)."""
        return self.product(torch.eye(self.shape[1])).float().t().contiguous()

    def by_dense(self, x: Tensor) -> Tensor:
        """What :meth:`product` gives, in bfloat16, by an ordinary product with the dequantised weight."""
        return F.linear(x.to(torch.bfloat16).float(), self.dense()).to(torch.bfloat16)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of the weight."""


class Dequantised(QuantisedProduct):
    """The readable twin: an ordinary product with the weights that the numbers stand for."""

    name = "dequantised"

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.bits = 8 if isinstance(weight, Int8Weight) else 4
        self.weight = weight.dequantised()

    def product(self, x: Tensor) -> Tensor:
        """In float32."""
        return F.linear(x.float(), self.weight)

    @property
    def nbytes(self) -> int:
        """Of float32."""
        return self.weight.nbytes


class Int8Product(QuantisedProduct):
    """int8 weights, the input in bfloat16.

    PyTorch's operator reads inputs in whole vectors: behind a width that is none it reads what lies there (wrong
    numbers on some CPUs, a crash on others).  Such weights and inputs get zeros up to the next one.
    """

    name, bits = "int8 weights, bf16 input", 8

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.weight = weight
        self.missing = -self.shape[1] % VECTOR
        self.padded = F.pad(weight.values, (0, self.missing)) if self.missing else weight.values

    def product(self, x: Tensor) -> Tensor:
        """bfloat16."""
        x = x.to(torch.bfloat16)
        x = F.pad(x, (0, self.missing)) if self.missing else x
        return torch._weight_int8pack_mm(x, self.padded, self.weight.scale)

    def dense(self) -> Tensor:
        """[out, in] float32, exactly."""
        return self.weight.dequantised()

    @property
    def nbytes(self) -> int:
        """A byte a weight, two a row."""
        return self.padded.nbytes + self.weight.scale.nbytes


class Int4Product(QuantisedProduct):
    """int4 weights, the input in bfloat16."""

    name, bits = "int4 weights, bf16 input", 4

    def __init__(self, weight: Int4Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        self.group = weight.group
        self.packed = torch._convert_weight_to_int4pack_for_cpu(weight.values, 1)
        self.scales = torch.stack([weight.scale.t(), weight.zero.t()], -1).contiguous()  # [in / group, out, 2]

    def product(self, x: Tensor) -> Tensor:
        """bfloat16."""
        return torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.packed, self.group, self.scales)

    def dense(self) -> Tensor:
        """[out, in] float32, exactly where the layout of the packed weight is a known one."""
        block = block4(self.shape[0])
        if block == 0:
            return super().dense()
        scale, zero = self.scales.permute(1, 0, 2).contiguous().unbind(-1)
        return Int4Weight(unpacked4(self.packed, self.shape, block), scale, zero, self.group).dequantised()

    @property
    def nbytes(self) -> int:
        """Half a byte a weight, four a group."""
        return self.packed.nbytes + self.scales.nbytes


class IntegerProduct(QuantisedProduct):
    """int8 weights, the input as two integers a number: FBGEMM's product, the fastest on CPUs without bfloat16.

    PyTorch's operator rounds the input to 7 bits (with 8, sums of two products overflow 16 bits on CPUs without VNNI)
    by the least and the greatest number of the *whole call*: too coarse, and a row's result would depend on the other
    rows.  Here a row is scaled to [-63, 63] by its own greatest number and split into its whole part and 126 times the
    rest, two rows of input for one: the weights are what takes time, and they are read once.  One more row holds -63.5
    and 63.5, so that the operator's scale is 1 in all calls.  Integers are summed exactly: a row has the same bits in
    any company, and the input has 14 bits.
    """

    name, bits, has_wide = "int8 weights, integer input", 8, False

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__((len(weight.values), weight.values.shape[1]), bias)
        scale = weight.scale.double()
        with _quietly():
            values = torch._make_per_channel_quantized_tensor(
                weight.values, scale, torch.zeros_like(scale, dtype=torch.long), 0
            )
            self.packed = torch.ops.quantized.linear_prepack(values, None)
        self.ends = torch.zeros(1, self.shape[1])
        self.ends[0, 0], self.ends[0, -1] = 63.5, -63.5

    def product(self, x: Tensor) -> Tensor:
        """float32."""
        n, wide = len(x), x.float()
        size = torch.linalg.vector_norm(wide, torch.inf, dim=1, keepdim=True).clamp_min_(1e-30).div_(63)  # [n, 1]
        scaled = wide / size
        whole = scaled.round()
        rows = torch.cat([whole, scaled.sub_(whole).mul_(126), self.ends])  # [2 n + 1, in]
        out: Tensor = torch.ops.quantized.linear_dynamic(rows, self.packed, True)
        return out[:n].add_(out[n:-1], alpha=1 / 126).mul_(size)

    @property
    def nbytes(self) -> int:
        """A byte a weight, eight a row for its scale and its sum."""
        return self.shape[0] * self.shape[1] + 8 * self.shape[0]


@contextmanager
def _quietly() -> Any:
    """Without PyTorch's warnings that quantised tensors are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def available() -> dict[str, type[QuantisedProduct]]:
    """The products that this build of PyTorch has, by name, tried out on a small weight."""
    found: dict[str, type[QuantisedProduct]] = {}
    weight, x = torch.linspace(-1, 1, 16 * 32).view(16, 32), torch.ones(1, 32)
    makers: tuple[tuple[type[QuantisedProduct], Callable[[], Any]], ...] = (
        (IntegerProduct, lambda: Int8Weight.of(weight)),
        (Int8Product, lambda: Int8Weight.of(weight)),
        (Int4Product, lambda: Int4Weight.of(weight, 32)),
    )
    for product, quantised in makers:
        try:
            product(quantised(), None)(x)
        except (RuntimeError, NotImplementedError, AttributeError):  # another platform, a build without FBGEMM
            continue
        found[product.name] = product
    return found


@cache
def fastest_draft_product(out: int, width: int, group: int, bits: str = "auto") -> type[QuantisedProduct] | None:
    """The product for draft steps with weights [out, width], by a short measurement with one row of input.

    Args:
        out, width: shape of the weight.
        group: of int4.
        bits: ``"8"``, ``"4"`` or ``"auto"``; int4 is taken for ``auto`` where it is 1.25 times as fast.

    Returns:
        ``None`` where no product takes this shape or nothing is available.
    """
    fitting = _fitting(out, width, group, bits)
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    times = measured(tuple(fitting), out, width, group, (1,))
    return min(fitting, key=lambda product: times[product] * (GAIN4 if product.bits == 4 else 1.0))


@cache
def fastest_target_product(out: int, width: int, group: int, bits: str) -> type[QuantisedProduct] | None:
    """The product for a target, which decodes plainly (one row) and verifies (eight); else as for drafts."""
    fitting = _fitting(out, width, group, bits)
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    times = measured(tuple(fitting), out, width, group, (1, 8))
    return min(fitting, key=times.__getitem__)


def _fitting(out: int, width: int, group: int, bits: str) -> list[type[QuantisedProduct]]:
    """The products that are there and take this shape."""
    return [
        product
        for product in available().values()
        if bits in ("auto", str(product.bits)) and (product.bits == 8 or fits_int4((out, width), group))
    ]


@torch.inference_mode()
def measured(
    products: Sequence[type[QuantisedProduct]], out: int, width: int, group: int, rows: Sequence[int]
) -> dict[type[QuantisedProduct], float]:
    """Seconds of each product with a random weight, summed over calls of so many ``rows``: of calls that read copy
    after copy of the weight, as a decoding step does, what the quickest quarter takes at most.  Large weights are cut
    to a few million numbers.

    (Calls with caches that something else has filled in between take twice as long here, most of all those of the
    products that are many small calls.)
    """
    out = max(ROWS4, min(out, MEASURED // width) // ROWS4 * ROWS4)
    # The time of this thread does not count those that other processes take; with several threads it misses theirs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    draws = torch.Generator().manual_seed(0)  # never torch's own: a caller's seed must not depend on what is timed
    weight = torch.randn(out, width, generator=draws)
    found = dict.fromkeys(products, 0.0)
    for product in products:
        copies = [make_product(product, weight, None, group) for _ in range(COPIES)]
        for x in (torch.randn(count, width, generator=draws) for count in rows):
            spent: list[float] = []
            for turn in range(TRIES + 1):
                for run in copies:
                    began = clock()
                    run(x)
                    spent += [clock() - began] if turn else []
            found[product] += sorted(spent)[len(spent) // 4]
    return found


@cache
@torch.inference_mode()
def wide_rows(product: type[QuantisedProduct], out: int, width: int, group: int) -> int:
    """From how many rows on the dequantised weight is faster by a tenth, measured; a large number where it never is."""
    made = make_product(product, torch.ones(out, width), None, group)
    if not product.has_wide or (product.bits == 4 and block4(out) == 0):
        return NEVER
    for rows in (WIDE, 2 * WIDE, 4 * WIDE):
        times, x = [], torch.ones(rows, width)
        for run in (made.product, made.by_dense, made.product, made.by_dense):
            began = time.perf_counter()
            run(x)
            times.append(time.perf_counter() - began)
        if 1.1 * min(times[1::2]) < min(times[::2]):
            return rows
    return NEVER


def make_product(product: type[QuantisedProduct], weight: Tensor, bias: Tensor | None, group: int) -> QuantisedProduct:
    """Quantise a weight [out, in] for a product."""
    quantised = Int4Weight.of(weight, group) if product.bits == 4 else Int8Weight.of(weight)
    return product(quantised, bias)  # type: ignore[arg-type]
