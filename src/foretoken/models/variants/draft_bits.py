"""In how many bits a draft model's layers are multiplied fastest on this machine.

A draft's distribution may be anything, so that errors of a few bits cost nothing but drafts that are rejected: 4 bits
agree with the full weights on .90 to .95 of tokens, 8 bits on .98 (``docs/methods/quantized.md``).

A draft model is larger than a cache, its layers are not: ten copies of one may lie in the cache, where 4 bits gain
nothing over 8.  So as many copies are timed as the cache cannot hold.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from foretoken.models.base import CapabilityError
from foretoken.models.linear.packing import Projection, is_plain
from foretoken.models.linear.quantised import (
    COPIES,
    available,
    fastest_draft_product,
    measured,
    measured_rows,
    reading_s,
)
from foretoken.models.linear.quantised_linear import is_ready_made
from foretoken.models.linear.quantised_weights import GROUP
from foretoken.models.machine import cache_bytes
from foretoken.models.variants.second_weights import linears

FASTER = 1.25
"""How much faster a layer must be: a rejected draft costs more than the noise of a measurement gains."""
MOST_COPIES = 40
"""Copies of a layer that are timed, at most."""


def fastest_kind(network: Any) -> str | None:
    """``"int4"`` where a draft step with such weights is faster than with those that the network has, or ``"int8"``
    where those are faster still, by a short measurement of its largest layer with one row; ``None`` where neither is,
    or the weights cannot be quantised."""
    if network.device.type != "cpu" or is_ready_made(network) or not available():
        return None
    head = network.get_output_embeddings()
    try:
        layers = [module for module in linears(network) if module is not head]
    except CapabilityError:
        return None
    shapes = [(m.out_features, m.in_features) for m in layers if is_plain(m) and m.weight.is_floating_point()]
    if not shapes:
        return None
    return _fastest(network.dtype, *max(shapes, key=lambda shape: shape[0] * shape[1]))


@cache
def _fastest(dtype: torch.dtype, out: int, width: int) -> str | None:
    """The kind for weights [out, width], which must be :data:`FASTER` times as fast as full ones."""
    chosen = [product for bits in ("4", "8") if (product := fastest_draft_product(out, width, GROUP, bits))]
    if not chosen:
        return None
    seconds = measured(chosen, out, width, GROUP, (1,), num_copies(measured_rows(out, width) * width // 2))
    best = min(chosen, key=seconds.__getitem__)
    return f"int{best.bits}" if FASTER * seconds[best] < _full_s(dtype, out, width) else None


def num_copies(nbytes: int) -> int:
    """How many copies of a weight a cache does not hold."""
    return min(MOST_COPIES, max(COPIES, cache_bytes() // nbytes))


@torch.inference_mode()
def _full_s(dtype: torch.dtype, out: int, width: int) -> float:
    """Seconds of one row through a full weight, in the layout that is fastest for it."""
    draws = torch.Generator().manual_seed(0)
    weight = (torch.randn(measured_rows(out, width), width, generator=draws) / width**0.5).to(dtype)
    copies = [Projection(weight.clone(), None) for _ in range(num_copies(weight.nbytes))]
    return reading_s(copies, torch.randn(1, width, generator=draws).to(dtype))
