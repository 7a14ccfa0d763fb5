"""Products by bfloat16 weights in a kernel of our own.

oneDNN multiplies one to eight rows at 50 to 75 % of the speed at which a thread can read memory, and small matrices at
less (``docs/log.md``).  The kernel reads at that speed, and a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.models.native.library import address, function

WIDTH = 32
"""Outputs that are stored together, as in the source."""
ALIASED_BYTES, ALIASED_ROWS, SHIFT = 1024, 6, 32
"""More than this many rows that lie a multiple of so many bytes apart share few places of the nearest cache: they are
copied, each row this many numbers further."""


def laid_out(weight: Tensor) -> Tensor:
    """A bfloat16 weight [out, in] as the kernel reads it, [ceil(out / 32), in / 2, 32, 2]."""
    out, inner = weight.shape
    if inner % 2:
        raise ValueError(f"weights of an even number of inputs are multiplied in pairs, not of {inner}")
    blocks = -(-out // WIDTH)
    if out % WIDTH:
        weight = torch.cat((weight, weight.new_zeros(blocks * WIDTH - out, inner)))
    if weight.storage_offset() % 2 or not weight.is_contiguous():
        weight = weight.clone(memory_format=torch.contiguous_format)
    pairs = weight.view(torch.int32)  # two numbers move as one
    return pairs.view(blocks, WIDTH, inner // 2).transpose(1, 2).contiguous()[..., None].view(weight.dtype)


def in_rows(packed: Tensor, out: int) -> Tensor:
    """The weight [out, in] that :func:`laid_out` was given; a copy."""
    pairs = packed.view(torch.int32)[..., 0]
    return pairs.transpose(1, 2).reshape(len(packed) * WIDTH, -1)[:out].contiguous().view(packed.dtype)


def product(x: Tensor, packed: Tensor, out: int, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias) (+ residual)`` [n, out] of x [n, in], summed in float32 and rounded once; all are bfloat16.

    ``packed`` is the weight as :func:`laid_out` gives it, with ``out`` outputs; bias [out], residual [n, out].
    """
    rows, inner = x.shape
    if rows > ALIASED_ROWS and 2 * inner % ALIASED_BYTES == 0:
        x = torch.cat((x, x.new_empty(rows, SHIFT)), 1)
    elif x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    result = x.new_empty(rows, out)
    offset = None if bias is None else bias.float()
    places = address(offset), address(residual), address(result)
    function("product", "pnnnpnppp")(address(x), rows, inner, x.stride(0), address(packed), out, *places)
    return result
