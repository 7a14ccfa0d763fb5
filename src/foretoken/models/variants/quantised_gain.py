"""Whether drafting with quantised weights is expected to pay for a model on this machine, by a short measurement.

A round of k drafts writes (1 - a^(k+1)) / (1 - a) tokens for k steps with quantised weights and one call of k + 1 rows.
The products of the largest layer are timed, quantised with one row and full with several; the rest of the model is
taken to cost the same for each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretoken.models.base import CapabilityError
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised import make_product
from foretoken.models.linear.quantised_products import QuantisedProduct
from foretoken.models.machine import free_bytes, timed
from foretoken.models.variants.second_weights import Scheme, check_quantisable, linears

SMALLEST = 50_000_000
"""Weights below which a step is mostly overhead: not even measured."""
ACCEPTANCE = 0.95
"""How often a draft token is accepted, given that those before it were: .97 to .99 for int8 on prose and code."""
LAYER_S = 0.0002
"""Seconds of a layer beside its products."""
LENGTHS = (1, 3, 5)
"""Draft lengths that are weighed."""
REPEATS = 5


def expected_gain(model: Any, scheme: Scheme) -> float:
    """Speed over plain decoding that quantised drafts promise; 0 where they cannot be made or are too small to pay.

    Args:
        model: the target.
        scheme: how its weights would be quantised.
    """
    if not isinstance(model, HuggingFaceModel) or not model.capabilities.layer_windows:
        return 0.0
    layers = list(linears(model.model))
    count = sum(linear.out_features * linear.in_features for linear in layers)
    wanted = count * (1.0 if scheme.bits == "8" else 0.625)  # bytes; 4 bits have a scale and a zero for 32 weights
    # A target whose weights take hardly more (a GGUF file in 4 bits) is not drafted for by the same bytes read again.
    # The largest layer alone does not show that: half of them may be stored in more bits than the others.
    if wanted > 0.75 * sum(_stored_bytes(linear, model.dtype) for linear in layers):
        return 0.0
    free = free_bytes()
    if count < SMALLEST or (free is not None and count > free / 2):  # memory that is taken unasked
        return 0.0
    try:
        check_quantisable(model.forwards, scheme)
    except (CapabilityError, ValueError):
        return 0.0
    head = model.model.get_output_embeddings()
    largest = max((one for one in layers if one is not head), key=lambda one: one.out_features * one.in_features)
    return _gain(largest, count, len(layers), scheme, model.dtype)


def _stored_bytes(linear: Any, dtype: torch.dtype) -> int:
    """What a layer's weights take as they are multiplied."""
    product = getattr(linear, "product", None)
    if isinstance(product, QuantisedProduct):
        return product.nbytes
    return int(linear.out_features * linear.in_features * dtype.itemsize)


@torch.inference_mode()
def _gain(linear: Any, count: int, num_linears: int, scheme: Scheme, dtype: torch.dtype) -> float:
    """The best of some lengths; what is not the largest layer costs what it does for each weight."""
    shape = (linear.out_features, linear.in_features)
    product = scheme.product(shape)
    if product is None:
        return 0.0
    quantised = make_product(product, torch.ones(shape), None, scheme.group)  # any numbers cost the same
    rows = (1, *(k + 1 for k in LENGTHS))
    inputs = [torch.ones(n, shape[1], dtype=dtype) for n in rows]
    draft_s, plain_s, *verify_s = _seconds([lambda: quantised(inputs[0]), *((lambda x=x: linear(x)) for x in inputs)])
    scale, rest_s = count / (shape[0] * shape[1]), LAYER_S * num_linears / 7  # a layer has about seven of them
    draft, plain = (rest_s + scale * seconds for seconds in (draft_s, plain_s))
    gains = []
    for k, seconds in zip(LENGTHS, verify_s, strict=True):
        tokens = (1 - ACCEPTANCE ** (k + 1)) / (1 - ACCEPTANCE)
        gains.append(tokens * plain / (k * draft + rest_s + scale * seconds))
    return max(gains)


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each call; they take turns."""
    return list(timed({place: [call] for place, call in enumerate(calls)}, REPEATS).values())
