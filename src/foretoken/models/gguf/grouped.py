"""Matrices of a GGUF file in memory: the file's integers in 8 or 4 bits, its scales in the precision that they have.

A number is ``(value - middle) * scale + zero``, rounded as ``gguf.dequantize`` rounds it.  Scales and zeros that
float16 holds stay in float16; those of the K types are products of a float16 number and an integer, and take float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.gguf.file import GgufTensor
from foretoken.models.gguf.types import KINDS, PLAIN, Kind

AT_ONCE = 2**19
"""Numbers that are taken apart, or widened, together: they stay in a cache from one operation to the next."""


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix [out, in] in groups with a scale each.

    Attributes:
        values: [out, in] int8 without the middle; or, in 4 bits, [out, in / 2] uint8, the first half of each group in
            the low halves of the bytes.
        scale: [out, in / group] float16 or float32.
        zero: the same, or ``None``: no zeros.
        group: numbers that share a scale.
        bits: 8 or 4.
        middle: what is subtracted from a value in 4 bits.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    bits: int
    middle: int

    @classmethod
    def of(cls, stored: Tensor, kind: str) -> GroupedWeight:
        """Of the bytes [out, k] of a quantised type, taken apart some rows at a time."""
        how, (block, size) = KINDS[kind], _block(kind)
        out, width = len(stored), stored.shape[1] // size * block
        values = torch.empty(out, width // 2, dtype=torch.uint8) if how.bits == 4 else _int8(out, width)
        scale = torch.empty(out, width // how.group)
        zero: Tensor | None = None
        for rows in slabs(out, width):
            parts = how.parts(stored[rows].reshape(-1, size))
            values[rows] = _kept(parts.values, how).reshape(values[rows].shape)
            scale[rows] = parts.scale.reshape(scale[rows].shape)
            if parts.zero is not None:
                zero = torch.empty_like(scale) if zero is None else zero
                zero[rows] = parts.zero.reshape(scale[rows].shape)
        return cls(values, _narrow(scale), None if zero is None else _narrow(zero), how.group, how.bits, how.middle)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return len(self.scale), self.scale.shape[1] * self.group

    @property
    def nbytes(self) -> int:
        """Memory of values, scales and zeros."""
        return self.values.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def integers(self, rows: slice = slice(None)) -> Tensor:
        """Values [n, in / group, group] of some rows without the middle, int8."""
        groups = self.values[rows].unflatten(1, (self.scale.shape[1], -1))
        if self.bits == 8:
            return groups
        return torch.cat([groups & 15, groups >> 4], -1).view(torch.int8).sub_(self.middle)

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Numbers [n, in] float32 of some rows."""
        wide = self.integers(rows).float().mul_(self.scale[rows].float()[..., None])
        return (wide if self.zero is None else wide.add_(self.zero[rows].float()[..., None])).flatten(1)


@dataclass(frozen=True)
class PlainWeight:
    """A matrix [out, in] of floating-point numbers, as they are in the file."""

    numbers: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory of the numbers."""
        return self.numbers.nbytes

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Numbers [n, in] float32 of some rows."""
        return self.numbers[rows].float()


StoredWeight = GroupedWeight | PlainWeight


def numbers_of(tensor: GgufTensor) -> Tensor:
    """All numbers of a tensor, in its shape; quantised ones in float32."""
    if tensor.kind in PLAIN:
        return tensor.data.contiguous().view(PLAIN[tensor.kind]).view(tensor.shape)
    return dequantised(tensor.data.reshape(-1, tensor.data.shape[-1]), tensor.kind).view(tensor.shape)


def dequantised(stored: Tensor, kind: str) -> Tensor:
    """Numbers [n, in] of stored rows [n, bytes]; float32 where they are quantised."""
    if kind in PLAIN:
        return stored.contiguous().view(PLAIN[kind])
    how, (block, size) = KINDS[kind], _block(kind)
    parts = how.parts(stored.reshape(-1, size))
    wide = (parts.values.to(torch.int8) - how.middle).unflatten(1, (block // how.group, -1)).float()
    wide = wide.mul_(parts.scale[..., None])
    return (wide if parts.zero is None else wide.add_(parts.zero[..., None])).reshape(len(stored), -1)


def weight_of(stored: Tensor, kind: str) -> StoredWeight:
    """The matrix of stored rows [out, bytes]."""
    return PlainWeight(dequantised(stored, kind).clone()) if kind in PLAIN else GroupedWeight.of(stored, kind)


def slabs(out: int, width: int) -> Iterator[slice]:
    """Rows of a matrix [out, width] that are widened together."""
    count = max(1, AT_ONCE // max(1, width))
    return (slice(start, start + count) for start in range(0, out, count))


def _int8(out: int, width: int) -> Tensor:
    return torch.empty(out, width, dtype=torch.int8)


def _kept(values: Tensor, how: Kind) -> Tensor:
    """Values [n, b] as they are kept in memory."""
    if how.bits == 8:
        return values.to(torch.int8) - how.middle
    low, high = values.unflatten(1, (-1, 2, how.group // 2)).unbind(2)
    return low | high << 4


def _narrow(numbers: Tensor) -> Tensor:
    """In float16 where that holds all of them."""
    half = numbers.half()
    return half if torch.equal(half.float(), numbers) else numbers


def _block(kind: str) -> tuple[int, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(block), int(size)
