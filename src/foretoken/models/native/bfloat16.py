"""Products with bfloat16 weights in our kernel.

oneDNN multiplies one to eight rows at 50 to 75 % of a thread's memory bandwidth, and small matrices more slowly
(``docs/log.md``).  This kernel reaches that bandwidth, and a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 32
"""Outputs per block, as in the source."""


def laid_out(weight: Tensor) -> Tensor:
    """A bfloat16 weight [out, in] in the kernel's layout, [ceil(out / 32), in / 2, 32, 2]."""
    out, inner = weight.shape
    if inner % 2:
        raise ValueError(f"the number of inputs must be even, not {inner}")
    blocks = -(-out // WIDTH)
    if out % WIDTH:
        weight = torch.cat((weight, weight.new_zeros(blocks * WIDTH - out, inner)))
    if weight.storage_offset() % 2 or not weight.is_contiguous():
        weight = weight.clone(memory_format=torch.contiguous_format)
    pairs = weight.view(torch.int32)  # two numbers move as one
    return pairs.view(blocks, WIDTH, inner // 2).transpose(1, 2).contiguous()[..., None].view(weight.dtype)


def in_rows(packed: Tensor, out: int) -> Tensor:
    """The weight [out, in] from :func:`laid_out`; a copy."""
    pairs = packed.view(torch.int32)[..., 0]
    return pairs.transpose(1, 2).reshape(len(packed) * WIDTH, -1)[:out].contiguous().view(packed.dtype)
