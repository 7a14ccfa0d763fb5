"""GGUF matrices in memory: the file's integers in 8 or 4 bits, with its scales as stored.

A number is ``(value - middle) * scale + zero``, rounded like ``gguf.dequantize``.  In the K types, scale and zero are a
block's float16 numbers times integer steps of its groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.gguf.file import GgufTensor
from foretoken.models.gguf.types import KINDS, PLAIN, QuantisedType
from foretoken.models.linear.quantised_weights import slabs

AT_ONCE = 2**19
"""Numbers processed at a time, so that they stay in the CPU cache between operations."""


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix [out, in] in groups, each with its scale.

    Attributes:
        values: [out, in] int8, with the middle subtracted; or, in 4 bits, [out, in / 2] uint8 with the first half of
            each group in the low half bytes.
        scale: [out, in / each] float16.
        zero: the same for zeros; ``None``: no zeros.
        steps: [out, in / group] int8 factors of the scales; ``None``: none.
        zero_steps: the same for zeros.
        group: number of values that share a scale.
        bits: 8 or 4.
        middle: offset of 4-bit values.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    steps: Tensor | None
    zero_steps: Tensor | None
    group: int
    bits: int
    middle: int

    @classmethod
    def of(cls, stored: Tensor, kind: str) -> GroupedWeight:
        """From the bytes [out, k] of a quantised type, unpacked some rows at a time."""
        form, (block, size) = KINDS[kind], _block(kind)
        out, width = len(stored), stored.shape[1] // size * block
        values = (
            torch.empty(out, width // 2, dtype=torch.uint8)
            if form.bits == 4
            else torch.empty(out, width, dtype=torch.int8)
        )
        numbers: dict[str, list[Tensor]] = {}
        for rows in widened_together((out, width)):
            parts = form.parts(stored[rows].reshape(-1, size))
            values[rows] = _in_memory(parts.values, form).reshape(values[rows].shape)
            for name in ("scale", "zero", "steps", "zero_steps"):
                part = getattr(parts, name)
                if part is not None:
                    numbers.setdefault(name, []).append(part.reshape(len(values[rows]), -1))
        zero, steps, zero_steps = (
            torch.cat(numbers[name]) if name in numbers else None for name in ("zero", "steps", "zero_steps")
        )
        return cls(values, torch.cat(numbers["scale"]), zero, steps, zero_steps, form.group, form.bits, form.middle)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return len(self.values), self.values.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scale, self.zero, self.steps, self.zero_steps)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, which depends on scales and zeros only."""
        return all(bool(part.isfinite().all()) for part in (self.scale, self.zero) if part is not None)

    def integers(self, rows: slice = slice(None)) -> Tensor:
        """Int8 values [n, in / group, group] of some rows, with the middle subtracted."""
        groups = self.values[rows].unflatten(1, (self.shape[1] // self.group, -1))
        if self.bits == 8:
            return groups
        return torch.cat([groups & 15, groups >> 4], -1).view(torch.int8).sub_(self.middle)

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Float32 numbers [n, in] of some rows."""
        steps, zero_steps = (None if each is None else each[rows] for each in (self.steps, self.zero_steps))
        scale = factors(self.scale[rows], steps)
        zero = None if self.zero is None else factors(self.zero[rows], zero_steps)
        return numbers(self.integers(rows), scale, zero)


def factors(scale: Tensor, steps: Tensor | None) -> Tensor:
    """Float32 scales [n, k] of groups, from stored scales [n, k / m] and their steps [n, k] or ``None``."""
    if steps is None:
        return scale.float()
    wide = steps.float().unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]
    return wide.flatten(1)


def numbers(integers: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Integers [n, k, group] times scales plus zeros [n, k]: [n, k group] float32."""
    wide = integers.float().mul_(scale[..., None])
    return (wide if zero is None else wide.add_(zero[..., None])).flatten(1)


@dataclass(frozen=True)
class PlainWeight:
    """A matrix [out, in] of floating-point numbers, as in the file."""

    numbers: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    @property
    def is_finite(self) -> bool:
        return bool(self.numbers.isfinite().all())

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        return self.numbers[rows].float()


StoredWeight = GroupedWeight | PlainWeight


def numbers_of(tensor: GgufTensor) -> Tensor:
    """All numbers of a tensor, in its shape; quantised ones in float32."""
    if tensor.kind in PLAIN:
        return tensor.data.contiguous().view(PLAIN[tensor.kind]).view(tensor.shape)
    return dequantised(tensor.data.reshape(-1, tensor.data.shape[-1]), tensor.kind).view(tensor.shape)


def dequantised(stored: Tensor, kind: str) -> Tensor:
    """Numbers [n, in] of stored rows [n, bytes]; float32 if quantised."""
    if kind in PLAIN:
        return stored.contiguous().view(PLAIN[kind])
    form, (block, size) = KINDS[kind], _block(kind)
    parts = form.parts(stored.reshape(-1, size))
    integers = (parts.values.to(torch.int8) - form.middle).unflatten(1, (block // form.group, -1))
    zero = None if parts.zero is None else factors(parts.zero, parts.zero_steps)
    return numbers(integers, factors(parts.scale, parts.steps), zero).reshape(len(stored), -1)


def weight_of(stored: Tensor, kind: str) -> StoredWeight:
    """The matrix of stored rows [out, bytes]."""
    return PlainWeight(dequantised(stored, kind).clone()) if kind in PLAIN else GroupedWeight.of(stored, kind)


def widened_together(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices of a matrix [out, in], some rows at a time."""
    return slabs(*shape, AT_ONCE)


def _in_memory(values: Tensor, form: QuantisedType) -> Tensor:
    """Values [n, b] in their memory format."""
    if form.bits == 8:
        return values.view(torch.int8) - form.middle
    low, high = values.view(torch.int32).unflatten(1, (-1, 2, form.group // 8)).unbind(2)  # four values at a time
    return (low | high << 4).view(torch.uint8)


def _block(kind: str) -> tuple[int, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(block), int(size)
