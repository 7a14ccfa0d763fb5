"""The clock for work on a device: CUDA and MPS return from a call before its work is done."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


def now(device: Any) -> float:
    """Seconds by ``perf_counter``, read when ``device`` has done everything that it was given.

    Args:
        device: a ``torch.device``; on the CPU, or with ``None``, there is nothing to wait for.
    """
    kind = getattr(device, "type", "cpu")
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    return perf_counter()
