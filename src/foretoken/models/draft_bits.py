"""In how many bits a draft model's layers are multiplied fastest on this machine.

A draft's distribution may be anything, so that errors of a few bits cost nothing but drafts that are rejected: 4 bits
agree with the full weights on .90 to .95 of tokens, 8 bits on .98 (``docs/methods/quantized.md``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from foretoken.models.base import CapabilityError
from foretoken.models.packing import Projection, is_plain
from foretoken.models.quantised import COPIES, GAIN4, available, fastest_draft_product, measured, measured_rows, reading_s
from foretoken.models.quantised_linear import GROUP, is_ready_made
from foretoken.models.second_weights import linears


def fastest_kind(network: Any) -> str | None:
    """``"int4"`` or ``"int8"`` where a draft step with weights of that kind is faster than with those that the network
    has, by a short measurement of its largest layer with one row; ``None`` where it is not, or they cannot be
    quantised.

    Args:
        network: a ``PreTrainedModel`` that is ours to change.
    """
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
    """The kind for weights [out, width], which must be :data:`GAIN4` times as fast as full ones."""
    product = fastest_draft_product(out, width, GROUP)
    if product is None:
        return None
    seconds = measured((product,), out, width, GROUP, (1,))[product]
    return f"int{product.bits}" if GAIN4 * seconds < _full_s(dtype, out, width) else None


@torch.inference_mode()
def _full_s(dtype: torch.dtype, out: int, width: int) -> float:
    """Seconds of one row through a full weight, in the layout that is fastest for it."""
    draws = torch.Generator().manual_seed(0)
    weight = (torch.randn(measured_rows(out, width), width, generator=draws) / width**0.5).to(dtype)
    copies = [Projection(weight.clone(), None) for _ in range(COPIES)]
    return reading_s(copies, torch.randn(1, width, generator=draws).to(dtype))
