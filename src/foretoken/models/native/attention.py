"""Attention of a few rows over cached bfloat16 keys and values in our kernel.

A row's bits depend only on the tokens that it sees, not on other rows or on the slots of its ancestors.  With products
of the same kind, a token in a tree has the same logits as in plain decoding.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from foretoken.models.native.library import address, function, why_not

SIZES = (32, 64, 96, 128, 256)
"""Supported head dimensions."""


def fits(dtype: torch.dtype | None, size: int) -> bool:
    """Whether this machine has the kernel for this dtype and head dimension."""
    return dtype == torch.bfloat16 and size in SIZES and why_not() is None


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention output [b, n, H, d], computed in float32.

    Args:
        query: [b, H, n, d] bfloat16, like the others; the numbers of a head are contiguous.
        keys, values: [b, H', S, d].
        mask: [b, 1, n, S], zero at visible slots; ``None``: all are visible.

    Raises:
        MemoryError: If the intermediate results do not fit.
        RuntimeError: Another dtype.
    """
    if not query.dtype == keys.dtype == values.dtype == torch.bfloat16:
        raise RuntimeError(f"attention takes bfloat16, not {query.dtype}, {keys.dtype} and {values.dtype}")
    batch, heads, rows, size = query.shape
    slots = keys.shape[2]
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    result = query.new_empty(batch, rows, heads, size)
    strides = (ctypes.c_long * 9)(*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3])
    mask_places = (address(mask), 0, 0) if mask is None else (address(mask), mask.stride(0), mask.stride(2))
    sizes = batch, heads, keys.shape[1], rows, slots, size
    addresses = address(query), address(keys), address(values), ctypes.addressof(strides)
    failed = ctypes.c_long(0)
    attend = function("attention", "pppppnnnnnnnndpnp")
    attend(*addresses, *mask_places, *sizes, scale, address(result), torch.get_num_threads(), ctypes.addressof(failed))
    if failed.value:
        raise MemoryError(f"too little memory for attention over {slots} positions: use a shorter context")
    return result
