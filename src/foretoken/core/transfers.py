"""Device-to-host copies in one transfer; every transfer waits for all pending work of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, copied in one transfer.

    Args:
        tensors: of one device, of any shapes. Integers must be below 2^24, as token ids are, because they are copied as
            floats.

    Returns:
        float32, or float64 if one of them is; integers as int64.
    """
    if not tensors:
        return []
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    flat = torch.cat([tensor.flatten().to(wide) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        (part if tensor.is_floating_point() else part.long()).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
