"""A forward through the model's own code, with our attention, masks, cache and kernels, restored afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.models.checks.fast_paths import Checks
from foretoken.models.checks.judging import Run
from foretoken.models.linear.packing import BlockedProducts, pack_linears, unpack_linears
from foretoken.models.linear.product import has_quantised, multiply_dequantised
from foretoken.models.network.alone import switched_attention
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.extra import embedding_rows
from foretoken.models.network.layers import running
from foretoken.models.network.placement import decoding
from foretoken.models.network.taps import recording

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network


def run_public(network: Network, call: NetworkCall) -> Outputs:
    """Logits [n, V] per feed, and taps."""
    ids, width, first = call.ids, call.ids.shape[1], call.first
    mask: Any = {kind: _at_least_zero(network, mask, call) for kind, mask in call.masks.items()}
    if network.single_mask:
        mask = mask[""]
    products = BlockedProducts() if network.exact == "bitwise" else nullcontext()
    part = running(network.model, call.plan, call.states)  # entered below, when no other thread runs the network
    rows = network.extra_rows
    embedding = nullcontext(ids) if rows is None else embedding_rows(network.model, ids, rows, network.vocab_size)
    turning = nullcontext() if network.rotary is None else network.rotary.switched(call.positions, call.lengths)
    recorded = recording(network.model, call.taps)
    with switched_attention(network), products, turning, recorded as hidden, part, embedding as embedded_ids:
        decoding(network.model)
        out = network.model(
            input_ids=embedded_ids,
            position_ids=call.positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=max(width - first, 1),
            **{network.cache_argument: call.cache},
        )
    return call.feed_logits(out.logits[:, -(width - first) :] if width > first else out.logits[:, :0]), hidden


def _at_least_zero(network: Network, mask: Tensor | None, call: NetworkCall) -> Tensor:
    """All zeros instead of ``None``, for which Transformers would build its own mask."""
    if mask is not None:
        return mask
    size = len(call.ids), 1, call.ids.shape[1], call.cache.num_read
    return torch.zeros(size, dtype=network.dtype, device=network.device)


def lay_out(network: Network, checks: Checks) -> None:
    """Use the fastest kernels in the public forward; failed checks are recorded in ``network.refused``."""
    if has_quantised(network.model):
        reason = checks.fault(f"quantised kernels {network.way}", lambda: (network.run_public, network.dtype, True))
        if reason is not None:
            multiply_dequantised(network.model)
            network.refuse("quantised kernels", reason, "layers are dequantised in every call, several times as slow")
    elif network.packing.home is not None and network.exact != "bitwise":
        reason = checks.fault(f"packed weights {network.way}", lambda: _packed(network))
        if reason is None:
            _packed(network)  # again, since the check does nothing where its result was stored
        else:
            unpack_linears(network.model)
            network.refuse("packed weights", reason, "products of a few rows take up to three times as long")


def _packed(network: Network) -> tuple[Run, torch.dtype, bool]:
    pack_linears(network.model, network.packing)
    return network.run_public, network.dtype, network.packing.layout == "half"
