"""GGUF matrices in our kernel, with the file's integers and scales and 8-bit activations.

The kernel (:mod:`foretoken.models.native.integers8`) multiplies by the file's ``(value - middle) * scale + zero``
without rounding the weights.  Activations are signed bytes with one scale per 32, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.gguf.grouped import AT_ONCE, GroupedWeight, StoredWeight, factors, numbers, widened_together
from foretoken.models.gguf.products import WidenedProduct, by_slabs, mark_of
from foretoken.models.linear.quantised_products import NativeProduct, QuantisedProduct
from foretoken.models.native import integers, linear, why_not
from foretoken.models.native.linear import Linear, bytes_linear

BLOCK = 32
"""Inputs per block."""
HALVES = 0x0F0F0F0F
"""The low halves of four bytes."""


class GroupedProduct(NativeProduct):
    name, stored, activations = "GGUF weights, own kernel", True, 8

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        QuantisedProduct.__init__(self, weight.shape, bias)
        reason = why_not()
        if reason is not None or self.shape[1] % BLOCK or weight.group not in (BLOCK, BLOCK // 2):
            raise RuntimeError(reason or f"the number of inputs must be a multiple of {BLOCK}, not {self.shape[1]}")
        self.bits, self.group, self.middle = weight.bits, weight.group, weight.middle
        self.mark = mark_of(weight)
        self.packed = _packed(weight)
        self.scales = _side_by_side(weight.scale, weight.zero)
        self.steps = None if weight.steps is None else _side_by_side(weight.steps, weight.zero_steps)

    def linear(self) -> Linear:
        form = linear.HALVES if self.steps is None else linear.STEPS
        # 8-bit values are signed, with the middle already subtracted.
        middle = integers.MIDDLE8 if self.bits == 8 else self.middle
        weight = self.shape, self.bits, self.group, self.packed, self.scales
        return bytes_linear(*weight, form=form, steps=self.steps, zeros=self.scales.shape[2] == 2, middle=middle)

    def dense(self) -> Tensor:
        return self.some(slice(None))

    def some(self, rows: slice) -> Tensor:
        indices = range(self.shape[0])[rows]
        dense = torch.empty(len(indices), self.shape[1])
        together = max(1, AT_ONCE // (integers.WIDTH * self.shape[1])) * integers.WIDTH
        first = 0
        while first < len(indices):  # the rows in whole blocks, from the block of the next row on
            start = indices[first] - indices[first] % integers.WIDTH
            count = len(range(indices[first], min(start + together, indices.stop), indices.step))
            last = indices[first + count - 1]
            blocks = self._blocks(slice(start // integers.WIDTH, last // integers.WIDTH + 1))
            dense[first : first + count] = blocks[indices[first] - start : last - start + 1 : indices.step]
            first += count
        return dense

    def _blocks(self, blocks: slice) -> Tensor:
        """Rows [n, in] of whole output blocks."""
        packed = self.packed[blocks]
        out = len(packed) * integers.WIDTH
        if self.bits == 8:
            values = integers.values8(packed, out)
        else:
            values = integers.values4(packed, out).to(torch.int8) - self.middle
        scale, zero = _apart(self.scales[blocks])
        steps: Tensor | None = None
        zero_steps: Tensor | None = None
        if self.steps is not None:
            steps, zero_steps = _apart(self.steps[blocks])
        zeros = None if zero is None else factors(zero, zero_steps)
        return numbers(values.unflatten(1, (-1, self.group)), factors(scale, steps), zeros)

    def by_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return by_slabs(self, x.to(dtype))

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.steps is None else self.steps.nbytes)

    @classmethod
    def fused(cls, products: Sequence[QuantisedProduct]) -> GroupedProduct | None:
        grouped = [product for product in products if isinstance(product, cls)]
        if len(grouped) < len(products) or len({product._layout for product in grouped}) > 1:
            return None
        if any(product.shape[0] % integers.WIDTH for product in grouped[:-1]):
            return None
        whole = object.__new__(cls)
        first = grouped[0]
        whole.shape = (sum(product.shape[0] for product in grouped), first.shape[1])
        whole.bits, whole.group, whole.middle = first.bits, first.group, first.middle
        whole.mark, whole.bias = " ".join(product.mark for product in grouped), None
        if any(product.bias is not None for product in grouped):
            whole.bias = torch.cat([torch.zeros(p.shape[0]) if p.bias is None else p.bias for p in grouped])
        whole.packed = torch.cat([product.packed for product in grouped])
        whole.scales = torch.cat([product.scales for product in grouped])
        steps = [product.steps for product in grouped if product.steps is not None]
        whole.steps = torch.cat(steps) if steps else None
        return whole

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.shape[1], self.bits, self.group, self.middle, self.scales.shape[1:], self.steps is None


def product_of(weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedProduct:
    """The fastest product of a matrix for an activation dtype; dtypes wider than bfloat16 are never rounded."""
    if dtype == torch.bfloat16 and isinstance(weight, GroupedWeight):
        try:
            return GroupedProduct(weight, bias)
        except RuntimeError:
            pass
    return WidenedProduct(weight, bias)


def _packed(weight: GroupedWeight) -> Tensor:
    """Values in the kernel's layout: signed bytes, or unsigned half bytes."""
    if weight.bits == 8:
        return integers.packed8(weight.values)
    packed = torch.empty_like(weight.values)
    for rows in widened_together(weight.shape):  # four bytes (values) at a time
        fours = weight.values[rows].view(torch.int32).unflatten(1, (-1, weight.group // 16, 2))
        first, second = fours.unbind(3)
        low = first & HALVES | (second & HALVES) << 4
        high = first >> 4 & HALVES | second & ~HALVES
        packed[rows] = torch.stack([low, high], 2).view(torch.uint8).flatten(1)
    return integers.blocks(packed)


def _side_by_side(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Numbers [out, k] as [ceil(out / 32), k, 1 or 2, 32], scales before zeros."""
    stacked = torch.stack([scale] if zero is None else [scale, zero], -1)
    stacked = F.pad(stacked, (0, 0, 0, 0, 0, -len(stacked) % integers.WIDTH))
    return stacked.unflatten(0, (-1, integers.WIDTH)).permute(0, 2, 3, 1).contiguous()


def _apart(stacked: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros [out, k] from :func:`_side_by_side`."""
    kinds = stacked.permute(2, 0, 3, 1).flatten(1, 2)
    return kinds[0], kinds[1] if len(kinds) > 1 else None
