"""Permanently quantised linear layers of a model: less memory, and faster steps if reading weights dominates.  The
model's distribution then differs from that with full weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from foretoken.models.base import CapabilityError
from foretoken.models.linear.input_power import input_powers
from foretoken.models.linear.packing import children_of, embedded_in, is_plain
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.linear.quantised import WITHOUT_BYTES, available, fastest_target_product, multiplies_bytes
from foretoken.models.linear.quantised_weights import GROUP

KINDS = ("int8", "int4", "int8-a8", "int4-a8")
"""Available quantisations; ``a8`` means 8-bit activations instead of 15 or 16."""


def is_ready_made(model: Any) -> bool:
    """Whether a network comes from a quantised checkpoint (GPTQ, AWQ, compressed-tensors, ...)."""
    return getattr(model.config, "quantization_config", None) is not None


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}, not {kind!r}")


def quantise_linears(model: Any, kind: str, wide: bool = True, text: Callable[[], Sequence[int]] | None = None) -> int:
    """Replace every ``nn.Linear`` below ``model`` by a quantised one, one by one; return their number.

    Sets ``model.quantised_to`` to ``kind``.

    Weights shared with an embedding stay unquantised, and with ``int4`` also shapes that do not fit.  The vocabulary
    projection is at least int8: its errors are errors of logits.

    Args:
        model: a network on the CPU that may be changed.
        kind: one of :data:`KINDS`.
        wide: let calls of many rows dequantise a layer if that is faster; a row's bits then depend on their number.
        text: token ids of a short ordinary text, to whose inputs weights of 4 bits are fitted.
    """
    check_kind(kind)
    if model.device.type != "cpu":
        raise CapabilityError(f"quantize={kind} is for the cpu, and the weights are on {model.device}: use device=cpu")
    if not available():
        raise CapabilityError("this build of PyTorch has no quantised matrix products")
    bits, _, short = kind.removeprefix("int").partition("-a")
    if short and not multiplies_bytes():
        raise CapabilityError(f"quantize={kind}: {WITHOUT_BYTES}: use quantize=int{bits}")
    if is_ready_made(model):
        raise CapabilityError("the weights of this checkpoint are quantised already: leave quantize out")
    embeddings, head, count = embedded_in(model), model.get_output_embeddings(), 0
    layers = [
        (parent, name, child)
        for parent, name, child in children_of(model)
        if isinstance(child, nn.Linear) and is_plain(child) and id(child.weight) not in embeddings
    ]
    powers = input_powers(model, [child for _, _, child in layers], text()) if text and bits == "4" else {}
    for parent, name, child in layers:
        layer_bits = "8" if child is head else bits
        product = fastest_target_product(child.out_features, child.in_features, GROUP, layer_bits, short or "15")
        if product is not None and child.weight.is_floating_point():
            setattr(parent, name, QuantisedLinear.of(child, product, wide, powers.get(child)))
            count += 1
    if count <= isinstance(model.get_output_embeddings(), QuantisedLinear):
        raise CapabilityError(
            f"{type(model).__name__} has no nn.Linear that quantize={kind} fits: int4 needs outputs in multiples of 16 "
            f"and inputs in multiples of {GROUP}; use int8, or leave quantize out"
        )
    model.quantised_to = kind
    return count
