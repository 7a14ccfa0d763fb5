"""Products with 8-bit or 4-bit weights in our integer kernel.

PyTorch's weight-only products read weights at half the memory bandwidth and slow down with every row.  These convert a
row of activations to 15-bit integers with a sign, scaled by its own maximum, and sum integer products: eight rows cost
hardly more than one, and a row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight

WIDTH, FOUR, EIGHT = 32, 4, 8
"""Outputs per block, and inputs per block in 4 and 8 bits, as in the source."""
MIDDLE8, MIDDLE4 = 128, 8
"""Offset that makes an 8-bit or 4-bit weight unsigned."""


def fits(inner: int) -> bool:
    """Whether weights with ``inner`` inputs are supported."""
    return inner % EIGHT == 0


def laid_out8(weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """Bytes [ceil(out / 32), in / 4, 32, 4] and scales [ceil(out / 32) * 32]."""
    return packed8(weight.values), _filled(weight.scale)


def packed8(values: Tensor) -> Tensor:
    """Signed values [out, in] in the format of :func:`laid_out8`."""
    return blocks(values.view(torch.uint8) ^ MIDDLE8)  # plus 128


def values8(packed: Tensor, out: int) -> Tensor:
    """The values [out, in] from :func:`laid_out8`."""
    return (_rows(packed, out) ^ 128).view(torch.int8)


def laid_out4(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """:func:`packed4` of the values, with scales and zeros [ceil(out / 32), in / group, 2, 32]."""
    stacked = _filled(torch.stack([weight.scale, weight.zero], -1))  # [out, in / group, 2]
    return packed4(weight.values.to(torch.uint8)), stacked.unflatten(0, (-1, WIDTH)).permute(0, 2, 3, 1).contiguous()


def packed4(values: Tensor) -> Tensor:
    """Values [out, in] from 0 to 15 as bytes [ceil(out / 32), in / 8, 32, 4]; of eight inputs, the first four are in
    the low halves."""
    eights = values.unflatten(1, (-1, 2, FOUR))
    return blocks((eights[:, :, 0] | eights[:, :, 1] << 4).flatten(1))


def values4(packed: Tensor, out: int) -> Tensor:
    """The values [out, in] from :func:`laid_out4`."""
    bytes_ = _rows(packed, out).unflatten(1, (-1, FOUR))
    return torch.stack([bytes_ & 15, bytes_ >> 4], 2).flatten(1).to(torch.int32)


def blocks(rows: Tensor) -> Tensor:
    """Bytes [out, n] as [ceil(out / 32), n / 4, 32, 4]; four of them move as one number."""
    words = _filled(rows.contiguous()).view(torch.int32)  # [out, n / 4]
    return words.view(-1, WIDTH, words.shape[1]).transpose(1, 2).contiguous()[..., None].view(torch.uint8)


def _rows(packed: Tensor, out: int) -> Tensor:
    """The bytes [out, n] from :func:`blocks`."""
    words = packed.view(torch.int32)[..., 0]
    return words.transpose(1, 2).reshape(len(packed) * WIDTH, -1)[:out].contiguous().view(torch.uint8)


def _filled(x: Tensor) -> Tensor:
    """``x``, zero-padded to a whole block of outputs."""
    missing = -len(x) % WIDTH
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x
