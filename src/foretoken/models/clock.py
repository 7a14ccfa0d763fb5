"""Clock for work on a device: CUDA and MPS return from a call before its work is done."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


def now(device: Any) -> float:
    """``perf_counter`` seconds, after ``device`` (``None``: the CPU) has finished all queued work."""
    kind = getattr(device, "type", "cpu")
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    return perf_counter()
