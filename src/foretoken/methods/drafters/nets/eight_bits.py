"""Weights of drafters on disk in 8 bits: 32 of them in a row share a scale, as in GGUF's Q8_0.

A file then has 53 % of its size in bfloat16.  Loading restores full weights, so only the reader knows of the format.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
"""Weights that share a scale."""
SCALES = ".scales"
"""Suffix of the name of a tensor's scales."""


def check_bits(bits: int) -> None:
    """Raise ``ValueError`` unless weights can be stored in ``bits``: 16 (bfloat16), or 8 and a share of a scale."""
    if bits not in (16, 8):
        raise ValueError(f"weights are stored in 16 or 8 bits, not {bits}")


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 beside their scales; norms, biases, tables and matrices without whole blocks are unchanged.

    Returns:
        A matrix of N weights as int8 of the same shape, and float16 [N / 32] under its name and :data:`SCALES`.
    """
    stored = {}
    for name, value in tensors.items():
        if not value.is_floating_point() or value.ndim < 2 or value.numel() % BLOCK:
            stored[name] = value
            continue
        blocks = value.detach().float().reshape(-1, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
        steps = torch.where(scales > 0, blocks / scales.float(), torch.zeros(()))
        stored[name] = steps.round().clamp(-127, 127).to(torch.int8).reshape(value.shape)
        stored[name + SCALES] = scales[:, 0].contiguous()
    return stored


def unpacked(stored: Mapping[str, Tensor], source: object) -> dict[str, Tensor]:
    """Full bfloat16 weights from the result of :func:`packed`; other tensors are unchanged.

    Raises:
        ValueError: scales for another number of weights; names the tensor.
    """
    full = {}
    for name, value in stored.items():
        scales = stored.get(name + SCALES)
        if name.endswith(SCALES) and stored.get(name.removesuffix(SCALES), value).dtype == torch.int8:
            continue
        if scales is None or value.dtype != torch.int8:
            full[name] = value
            continue
        if scales.numel() * BLOCK != value.numel() or not scales.is_floating_point():
            raise ValueError(f"{name}{SCALES} in {source} does not fit {name}: copy the file again")
        blocks = value.reshape(-1, BLOCK).float() * scales.float().reshape(-1, 1)
        full[name] = blocks.to(torch.bfloat16).reshape(value.shape)
    return full
