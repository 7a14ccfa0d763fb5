"""Products with 8-bit or 4-bit weights and 8-bit activations in our kernel.

Every 32 inputs of a row are signed bytes with a common scale, as in GGUF's Q8_0.  A product is off by half a percent of
its norm, whereas 15-bit activations (:mod:`foretoken.models.native.integers`) round only its result; but it takes half
their additions, so that five rows are limited by memory.  A row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK, MOST_BYTE, TINY = 32, 127, 2.0**-111
"""Inputs per scale, their largest byte, and the limit below which a maximum counts as zero, as in the source."""


def rounded(x: Tensor) -> Tensor:
    """The numbers [n, in] in float64 that the kernel multiplies instead of x [n, in]; its readable twin."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n, in / 32, 32]
    top = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(top < TINY, 1.0, top / MOST_BYTE)
    whole = (blocks * (1 / scale)).round()
    return (whole.double() * scale.double()).flatten(1)[:, : x.shape[1]]
