"""The fastest quantisation of a draft model's layers on this machine.

A draft's distribution is free, so errors of few bits only cost rejected drafts: 4 bits agree with the full weights on
.90 to .95 of tokens, 8 bits on .98 (``docs/methods/quantized.md``).

A draft model exceeds the cache, but its single layers do not: ten copies of one may fit into it, where 4 bits gain
nothing over 8.  So the timing uses more copies than the cache can hold.
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


def fastest_kind(network: Any) -> str | None:
    """``"int4"`` or ``"int8"``, whichever makes a draft step faster, by a short measurement of the network's largest
    layer with one row; ``None`` if neither beats the present weights, or they cannot be quantised."""
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
    """The kind for weights [out, width], which must be 1.25 times as fast as full ones: a rejected draft costs more
    than measurement noise gains."""
    chosen = [product for bits in ("4", "8") if (product := fastest_draft_product(out, width, GROUP, bits))]
    if not chosen:
        return None
    seconds = measured(chosen, out, width, GROUP, (1,), num_copies(measured_rows(out, width) * width // 2))
    best = min(chosen, key=seconds.__getitem__)
    return f"int{best.bits}" if 1.25 * seconds[best] < _full_s(dtype, out, width) else None


def num_copies(nbytes: int) -> int:
    """Number of copies of a weight that exceeds the cache."""
    return min(40, max(COPIES, cache_bytes() // nbytes))


@torch.inference_mode()
def _full_s(dtype: torch.dtype, out: int, width: int) -> float:
    """Seconds of one row through a full weight in its fastest layout."""
    draws = torch.Generator().manual_seed(0)
    weight = (torch.randn(measured_rows(out, width), width, generator=draws) / width**0.5).to(dtype)
    copies = [Projection(weight.clone(), None) for _ in range(num_copies(weight.nbytes))]
    return reading_s(copies, torch.randn(1, width, generator=draws).to(dtype))
