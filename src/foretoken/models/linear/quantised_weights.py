"""Storage of weights in 8 or 4 bits.

int8: a row of W [out, in] is ``values * scale`` with ``scale = max |row| / 127``.  int4: each ``group`` of weights in a
row is ``(values - 8) * scale + zero``, with values 0 to 15 from its minimum to its maximum, which is then fitted to the
outputs' error if the sizes of the inputs are known.  Scales are bfloat16, as PyTorch's packed products require.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

GROUP, GROUPS = 32, (32, 64, 128)
"""Weights per int4 scale: the default, and the choices."""
ROWS4 = 16
"""Block size of the packed int4 product's outputs."""
REFITS = 2
"""Times that scales and zeros are fitted to rounded values, and values rounded again: more gain nothing."""
FLAT = 1e-3
"""Variance of rounded values below which a group has one value, and no scale."""
AT_ONCE = 2**18
"""Weights quantised at a time: they stay in the CPU cache between operations, and a large vocabulary projection needs
no second copy in float32."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight in 8 bits.

    Attributes:
        values: [out, in] int8, from -127 to 127.
        scale: [out] bfloat16.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Quantise [out, in], row by row."""
        values = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(len(weight), dtype=torch.bfloat16)
        for rows in slabs(*weight.shape):
            wide = weight.detach()[rows].to(torch.float32, copy=True)
            scale[rows] = (torch.linalg.vector_norm(wide, torch.inf, dim=1) / 127).clamp_min_(1e-30)
            values[rows] = wide.div_(scale[rows].float()[:, None]).round_().clamp_(-127, 127)
        return cls(values, scale)

    def dequantised(self) -> Tensor:
        """[out, in] float32."""
        return self.values.float().mul_(self.scale.float()[:, None])


@dataclass(frozen=True)
class Int4Weight:
    """A weight in 4 bits.

    Attributes:
        values: [out, in] int32, from 0 to 15.
        scale, zero: [out, in / group] bfloat16.
        group: weights of a row that share a scale.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor
    group: int

    @classmethod
    def of(cls, weight: Tensor, group: int, power: Tensor | None = None) -> Int4Weight:
        """Quantise [out, in] in groups of each row.

        Args:
            power: [in] float32, mean squares of the inputs, by which errors are weighted; ``None``: groups end at their
                smallest and largest weights.
        """
        if not fits_int4(weight.shape, group):
            raise ValueError(f"int4 needs [{ROWS4} a, {group} b] weights, not {list(weight.shape)}")
        values = torch.empty(weight.shape, dtype=torch.int32)
        scale = torch.empty(len(weight), weight.shape[1] // group, dtype=torch.bfloat16)
        zero = torch.empty_like(scale)
        share = None if power is None else normalize(power.view(-1, group), p=1)
        for rows in slabs(*weight.shape):
            wide = weight.detach()[rows].float().unflatten(1, (-1, group))  # [n, in / group, group]
            low, high = wide.amin(-1), wide.amax(-1)
            scale[rows] = ((high - low) / 15).clamp_min_(1e-30)
            zero[rows] = low + 8 * scale[rows].float()
            rounded = _rounded(wide, scale[rows], zero[rows])
            if share is not None:
                for _ in range(REFITS):
                    scale[rows], zero[rows] = _fitted(wide, rounded, share)
                    rounded = _rounded(wide, scale[rows], zero[rows])
            values[rows] = rounded.add_(8).flatten(1).to(torch.int32)
        return cls(values, scale, zero, group)

    def dequantised(self) -> Tensor:
        """[out, in] float32."""
        wide = self.values.unflatten(1, (-1, self.group)).float().sub_(8)
        return wide.mul_(self.scale.float()[..., None]).add_(self.zero.float()[..., None]).flatten(1)


Quantised = Int8Weight | Int4Weight


def _rounded(wide: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Values from -8 to 7 of weights [n, groups, group]; scales and zeros [n, groups]."""
    return (wide - zero.float()[..., None]).div_(scale.float()[..., None]).round_().clamp_(-8, 7)


def _fitted(wide: Tensor, rounded: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros [n, groups] with the least squared error: the regression of weights on rounded values, both
    [n, groups, group], in which a weight counts as its ``share`` [groups, group] of the group's input."""
    counted = share * rounded
    centre = counted.sum(-1)
    variance = counted.mul_(rounded).sum(-1).sub_(centre.square())
    counted = torch.mul(share, wide, out=counted)
    mean = counted.sum(-1)
    covariance = counted.mul_(rounded).sum(-1).sub_(mean * centre)
    scale = torch.where(variance > FLAT, covariance / variance, 0.0).clamp_min_(1e-30).bfloat16()
    return scale, mean - centre * scale.float()


def slabs(out: int, width: int, at_once: int = AT_ONCE) -> Iterator[slice]:
    """Slices of the rows of a weight [out, width] that are processed together."""
    count = max(1, at_once // max(1, width))
    return (slice(start, start + count) for start in range(0, out, count))


def fits_int4(shape: Any, group: int) -> bool:
    """Whether a weight [out, in] can be packed in int4 with this group size."""
    return shape[0] % ROWS4 == 0 and shape[1] % group == 0


def unpacked4(packed: Tensor, shape: tuple[int, int], block: int) -> Tensor:
    """Values [out, in] of a packed int4 weight: for every ``block`` outputs and every input, a row of bytes whose low
    halves are the first half of the outputs."""
    rows = packed.view(shape[0] // block, shape[1], block // 2)
    return torch.cat([rows & 15, rows >> 4], -1).transpose(1, 2).reshape(shape)


@cache
def block4(out: int) -> int:
    """Outputs per block of the packed layout, determined by trial; 0 if the layout is unknown."""
    values = torch.randint(0, 16, (out, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch._convert_weight_to_int4pack_for_cpu(values, 1)
    fitting = (b for b in (64, 32, 16) if out % b == 0)
    return next((b for b in fitting if torch.equal(unpacked4(packed, (out, 32), b).int(), values)), 0)
