"""Matrices of a GGUF file in the kernel for weights in 4 bits, exactly.

The kernel (:mod:`foretoken.models.native.integers`) multiplies by ``(value - 8) * scale + zero`` with values of 4 bits
and scales and zeros in bfloat16.  The file's scales have 11 significant bits, or 18 in the K types, and its values up
to 8 bits.  So a product is a sum of a few: the halves of values in 8 bits, and for each half the scale as a sum of
bfloat16 numbers.  Halves are stored once.  What two bfloat16 numbers leave of a zero is less than 2^-17 of it and is
multiplied by sums of activations.  Nothing is rounded but activations and results, which are bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.gguf.grouped import AT_ONCE, GroupedWeight, StoredWeight, slabs
from foretoken.models.gguf.products import WidenedProduct, by_slabs, mark_of
from foretoken.models.native import bfloat16, integers, why_not
from foretoken.models.quantised_products import QuantisedProduct
from foretoken.models.quantised_weights import Int4Weight

MIDDLE = 8
"""What the kernel subtracts from a value."""
MOST_PARTS = 3
"""Bfloat16 numbers that a float32 number is the sum of."""


@dataclass(frozen=True)
class Half:
    """Four bits of every value, and the scales and zeros that they are multiplied with, one pass each.

    Attributes:
        packed: [out / 32, in / 8, 32, 4] bytes.
        scales: [out / 32, in / group, 2, 32] bfloat16 scales and zeros of each pass.
    """

    packed: Tensor
    scales: tuple[Tensor, ...]


class SummedProduct(QuantisedProduct):
    """A few products in 4 bits.

    Args:
        weight: the matrix.
        bias: [out] or ``None``.

    Raises:
        RuntimeError: this machine has no such kernel, or it does not take the shape.
    """

    name, has_wide, alone, stored = "GGUF weights, own kernel", False, True, True

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.shape, bias)
        reason = why_not()
        if reason is not None or not integers.fits(self.shape[1]) or weight.group % integers.EIGHT:
            raise RuntimeError(reason or f"inputs come in eights, not in {self.shape[1]}")
        self.bits, self.group, self.mark = weight.bits, weight.group, mark_of(weight)
        self.halves, rest = _halves(weight)
        self.rest = _laid_out(rest)

    def product(self, x: Tensor) -> Tensor:
        """float32."""
        x, out = x.to(torch.bfloat16), self.shape[0]
        found: Tensor | None = None
        for half in self.halves:
            for scales in half.scales:
                part = integers.product(x, half.packed, scales, out, self.group).float()
                found = part if found is None else found.add_(part)
        assert found is not None  # there is always a half, with a pass
        if self.rest is not None:
            sums = x.float().unflatten(1, (-1, self.group)).sum(-1).to(torch.bfloat16)
            found += bfloat16.product(F.pad(sums, (0, sums.shape[1] % 2)), self.rest, out, None)
        return found

    def dense(self) -> Tensor:
        """[out, in] float32, what all passes together multiply by."""
        return self.some(slice(None))

    def some(self, rows: slice) -> Tensor:
        """Some rows [n, in] of it."""
        places = range(self.shape[0])[rows]
        found = torch.empty(len(places), self.shape[1])
        done, blocks = 0, max(1, AT_ONCE // (integers.WIDTH * self.shape[1]))
        while done < len(places):
            block = places[done] // integers.WIDTH
            first = block * integers.WIDTH
            end = min(first + blocks * integers.WIDTH, self.shape[0])
            here = range(places[done], end, places.step)[: len(places) - done]
            whole = self._widened(slice(block, block + blocks), end - first)
            found[done : done + len(here)] = whole[here.start - first : here.stop - first : here.step]
            done += len(here)
        return found

    def _widened(self, blocks: slice, out: int) -> Tensor:
        """Numbers [out, in] of some blocks of outputs: one sum of integers for all halves, times the sum of the scales,
        which float32 holds, and one zero."""
        values, scale, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.zeros(1)
        for place, half in enumerate(self.halves):
            values = (integers.values4(half.packed[blocks], out) - MIDDLE) * 16**place + values
            for scales in half.scales:
                each = scales[blocks].permute(2, 0, 3, 1).flatten(1, 2)[:, :out].float()
                scale = scale + each[0] if place == 0 else scale
                zero = zero + each[1]
        if len(self.halves) > 1:  # the zeros of the low half are what makes its values begin at 0
            values, zero = values + MIDDLE, zero - MIDDLE * scale
        if self.rest is not None:
            zero = zero + bfloat16.in_rows(self.rest[blocks], out)[:, : zero.shape[1]].float()
        return (values.unflatten(1, (-1, self.group)) * scale[..., None]).add_(zero[..., None]).flatten(1)

    def by_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As for all products, some rows of the matrix at a time."""
        return by_slabs(self, x.to(dtype))

    @property
    def nbytes(self) -> int:
        """Of halves, scales and what is left of zeros."""
        halves = sum(half.packed.nbytes + sum(scales.nbytes for scales in half.scales) for half in self.halves)
        return halves + (0 if self.rest is None else self.rest.nbytes)

    @classmethod
    def fused(cls, products: Sequence[QuantisedProduct]) -> SummedProduct | None:
        """Products of one input as one with their outputs side by side; ``None`` where their passes differ."""
        own = [product for product in products if isinstance(product, cls)]
        if len(own) < len(products) or len({product._layout for product in own}) > 1:
            return None
        if any(product.shape[0] % integers.WIDTH for product in own[:-1]):
            return None
        found = object.__new__(cls)
        first, biases = own[0], [product.bias for product in own]
        found.shape = (sum(product.shape[0] for product in own), first.shape[1])
        found.bits, found.group, found.mark = first.bits, first.group, " ".join(product.mark for product in own)
        found.bias = None
        if any(bias is not None for bias in biases):
            filled = [torch.zeros(p.shape[0]) if b is None else b for p, b in zip(own, biases, strict=True)]
            found.bias = torch.cat(filled)
        found.halves = [
            Half(torch.cat([half.packed for half in same]), tuple(map(torch.cat, zip(*(h.scales for h in same), strict=True))))
            for same in zip(*(product.halves for product in own), strict=True)
        ]
        found.rest = None
        if first.rest is not None:
            found.rest = torch.cat([product.rest for product in own if product.rest is not None])
        return found

    @property
    def _layout(self) -> tuple[object, ...]:
        passes = tuple(len(half.scales) for half in self.halves)
        return self.shape[1], self.bits, self.group, passes, self.rest is None


def product_of(weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedProduct:
    """The fastest product with a matrix for activations of a dtype; wider ones than bfloat16 are never rounded to that."""
    if dtype == torch.bfloat16 and isinstance(weight, GroupedWeight):
        try:
            return SummedProduct(weight, bias)
        except RuntimeError:
            pass
    return WidenedProduct(weight, bias)


def _halves(weight: GroupedWeight) -> tuple[list[Half], Tensor]:
    """A matrix for the kernel, and the zeros [out, in / group] float32 that are left over."""
    scale = weight.scale.float()
    zero = torch.zeros_like(scale) if weight.zero is None else weight.zero.float()
    scales = parts_of(scale)
    if weight.bits == 4:
        # value - middle = (value - 8) + (8 - middle)
        rest = (scale.double() * (MIDDLE - weight.middle) + zero.double()).float()
        zeros, rest = _taken(rest, len(scales))
        return [_half(weight, scales, zeros, high=False)], rest
    # value = 16 (high - 8) + (low - 8) + 8 with high and low halves of value + 128
    low = _half(weight, scales, [MIDDLE * part for part in scales], high=False)
    zeros, rest = _taken(zero, len(scales))
    return [low, _half(weight, [16 * part for part in scales], zeros, high=True)], rest


def _half(weight: GroupedWeight, scales: Sequence[Tensor], zeros: Sequence[Tensor], high: bool) -> Half:
    values = torch.empty(weight.shape, dtype=torch.uint8)
    for rows in slabs(*weight.shape):
        found = weight.integers(rows).flatten(1)
        if weight.bits == 4:
            values[rows] = (found + weight.middle).view(torch.uint8)
        else:
            shifted = found.view(torch.uint8) ^ 128
            values[rows] = shifted >> 4 if high else shifted & 15
    packed, first = integers.laid_out4(Int4Weight(values, scales[0], zeros[0], weight.group))
    others = (integers.scales4(scale, zero) for scale, zero in zip(scales[1:], zeros[1:], strict=True))
    return Half(packed, (first, *others))


def parts_of(numbers: Tensor) -> list[Tensor]:
    """Float32 numbers as a sum of bfloat16 numbers, at least one."""
    found, rest = [], numbers
    while not found or (len(found) < MOST_PARTS and bool(rest.any())):
        found.append(rest.to(torch.bfloat16))
        rest = rest - found[-1].float()
    return found


def _taken(numbers: Tensor, count: int) -> tuple[list[Tensor], Tensor]:
    """As many bfloat16 parts of float32 numbers as there are passes, and what they leave."""
    found = []
    for _ in range(count):
        found.append(numbers.to(torch.bfloat16))
        numbers = numbers - found[-1].float()
    return found, numbers


def _laid_out(rest: Tensor) -> Tensor | None:
    """Zeros [out, k] in the layout of the bfloat16 kernel, which takes an even number of inputs; ``None`` for none."""
    if not bool(rest.any()):
        return None
    return bfloat16.laid_out(F.pad(rest, (0, rest.shape[1] % 2)).to(torch.bfloat16))
