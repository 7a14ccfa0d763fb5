"""Expected gain of drafting with quantised weights for a model on this machine, by a short measurement.

A round of k drafts yields (1 - a^(k+1)) / (1 - a) tokens for k steps with quantised weights and one call of k + 1 rows.
The measurement times one row of the whole model, and the products of its largest layers: quantised with one row, and
full with several.  Other layers are assumed to cost the same per weight, and all other work to cost what it costs now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretoken.models.base import CapabilityError, Feed, opened
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.quantised import make_product
from foretoken.models.linear.quantised_products import QuantisedProduct
from foretoken.models.machine import any_text, free_bytes, timed
from foretoken.models.variants.second_weights import Scheme, check_quantisable, linears

SMALLEST = 50_000_000
"""Number of weights below which a step is mostly overhead, and nothing is measured."""
ACCEPTANCE = 0.95
"""Probability that a draft token is accepted after accepted ones: .97 to .99 for int8 on prose and code."""
SAMPLE = 48_000_000
"""Number of weights in the timed layers, run one after the other: one small layer alone would stay in a cache."""
REPEATS = 5


def expected_gain(model: Any, scheme: Scheme) -> float:
    """Expected speedup of quantised drafts over plain decoding; 0 if they are impossible or too small to pay.

    Args:
        scheme: quantisation of the draft.
    """
    if not isinstance(model, HuggingFaceModel) or not model.capabilities.layer_windows:
        return 0.0
    layers = list(linears(model.model))
    count = sum(linear.out_features * linear.in_features for linear in layers)
    draft_bytes = count * (1.0 if scheme.bits == "8" else 0.625)  # bytes; 4-bit weights have a scale and a zero per 32
    # If a target's weights are hardly larger (a 4-bit GGUF file), a draft that reads as many bytes cannot pay.  The
    # largest layer alone does not show that: half of the layers may be stored in more bits than the others.
    if draft_bytes > 0.75 * sum(_stored_bytes(linear, model.dtype) for linear in layers):
        return 0.0
    free = free_bytes()
    if count < SMALLEST or (free is not None and count > free / 2):  # memory taken without a request
        return 0.0
    try:
        check_quantisable(model.forwards, scheme)
    except (CapabilityError, ValueError):
        return 0.0
    head = model.model.get_output_embeddings()
    return _gain(model, _largest([linear for linear in layers if linear is not head]), count, scheme)


def _largest(layers: Sequence[Any]) -> list[Any]:
    """Layers of the largest shape, as many as :data:`SAMPLE` allows and at least one."""
    shapes = [(linear.out_features, linear.in_features) for linear in layers]
    widest = max(shapes, key=lambda shape: shape[0] * shape[1])
    alike = [linear for linear, shape in zip(layers, shapes, strict=True) if shape == widest]
    return alike[: max(1, SAMPLE // (widest[0] * widest[1]))]


def _stored_bytes(linear: Any, dtype: torch.dtype) -> int:
    product = getattr(linear, "product", None)
    if isinstance(product, QuantisedProduct):
        return product.nbytes
    return int(linear.out_features * linear.in_features * dtype.itemsize)


@torch.inference_mode()
def _gain(model: HuggingFaceModel, sample: Sequence[Any], count: int, scheme: Scheme) -> float:
    """The best gain over all lengths; layers outside the sample cost the same per weight."""
    shape = (sample[0].out_features, sample[0].in_features)
    product = scheme.product(shape)
    if product is None:
        return 0.0
    weight = torch.ones(shape)  # any values cost the same
    quantised = [make_product(product, weight, None, scheme.group) for _ in sample]
    lengths = (1, 3, 5, 8)
    inputs = [torch.ones(n, shape[1], dtype=model.dtype) for n in (1, *(k + 1 for k in lengths))]
    draft_s, plain_s, *verify_s = _seconds([_run(quantised, inputs[0]), *(_run(sample, x) for x in inputs)])
    scale = count / (len(sample) * shape[0] * shape[1])
    rest_s = max(0.0, _step_s(model) - scale * plain_s)
    draft, plain = (rest_s + scale * seconds for seconds in (draft_s, plain_s))
    gains = []
    for k, seconds in zip(lengths, verify_s, strict=True):
        tokens = (1 - ACCEPTANCE ** (k + 1)) / (1 - ACCEPTANCE)
        gains.append(tokens * plain / (k * draft + rest_s + scale * seconds))
    return max(gains)


def _run(products: Sequence[Callable[[torch.Tensor], Any]], x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for product in products:
            product(x)

    return run


def _step_s(model: HuggingFaceModel) -> float:
    """Seconds of one row of the whole model."""
    with opened(model, any_text(model, 64)) as (sequence,):

        def step() -> None:
            model.forward([Feed(sequence, [0])])
            sequence.clear_scratch()

        return timed({"step": [step]}, REPEATS)["step"]


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each call, interleaved."""
    return list(timed({number: [call] for number, call in enumerate(calls)}, REPEATS).values())
