"""What the host reads of a device, in one transfer: every one of them waits until the device has done all its work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, by one transfer.

    Args:
        tensors: of one device, of any shapes.  Whole numbers must be below 2^24, as token ids are: they travel as
            floats.

    Returns:
        float32, or float64 where one of them is; whole numbers as int64.
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
