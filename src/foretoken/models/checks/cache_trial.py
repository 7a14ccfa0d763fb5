"""Trial on a few tokens: is a model causal, and does its cache preserve its logits?

All decoding with a cache relies on both.  Without the trial, wrong output would go unnoticed for a language model that
sees later tokens (a BERT that is not a decoder, XLM), one whose attention interprets masks differently, or one whose
tokens see other states of tokens read in the same call than of earlier ones (looped layers that share a cache).  The
trial costs three forwards of at most six rows, once per model object.
"""

from __future__ import annotations

from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, opened
from foretoken.models.checks.self_test import cause_of, relative
from foretoken.models.linear.packing import is_plain
from foretoken.models.linear.product import has_quantised
from foretoken.models.network.alone import alone
from foretoken.models.network.own_code import forwards_of
from foretoken.models.network.placement import device_of
from foretoken.models.network.traits import parameters_of

ROWS, KEPT = 6, 3
"""Number of trial tokens, and of those read first."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
LIMIT, HALF_LIMIT = 1e-3, 0.5
"""Relative differences beyond rounding: in float32 (at most 1e-6 in random models), and in 16 bits, where rounding can
route a token to another expert.  Unrelated logits differ by 1.4."""

_FAULTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()
"""Results by the form a model runs in: every call of ``custom_generate`` wraps the same model again."""


@torch.inference_mode()
def cache_fault(model: Any, wrapped: LanguageModel) -> str | None:
    """Difference between the logits of ``wrapped`` and those of the model's own forward; ``None`` if they agree.

    Raises:
        CapabilityError: the model is not causal, its forward fails, or it returns other rows than requested.
    """
    faults, key = _FAULTS.setdefault(model, {}), _form(model, wrapped)
    if key not in faults:
        faults[key] = _tried(model, wrapped) if wrapped.context_length >= ROWS else None
    return faults[key]


def _tried(model: Any, wrapped: LanguageModel) -> str | None:
    rollback = wrapped.capabilities.rollback
    coarse = getattr(wrapped, "exact", "") == "approximate" or has_quantised(model)
    limit = HALF_LIMIT if model.dtype in HALF_DTYPES or coarse else LIMIT  # quantised kernels return bfloat16
    reference, mixed = _without_cache(model, wrapped.vocab_size, limit)
    if mixed:
        return f"its quantised layers scale all tokens of a call together (logits move by {mixed:.2g} of their size)"
    if not reference.isfinite().all():  # damaged weights: decoding reports them, with their location
        return None
    tokens = _text(wrapped.vocab_size)
    last = ROWS if rollback else KEPT + 1  # without rollback, tokens are read one by one
    try:
        with opened(wrapped, tokens[:KEPT]) as (sequence,):
            logits = wrapped.forward([Feed(sequence, tokens[KEPT:last])])[0].logits
    except Exception as error:
        raise CapabilityError(f"{_name(model)} cannot be decoded here: {cause_of(error)}") from error
    if logits.shape != reference[KEPT:last].shape:
        raise CapabilityError(f"{_name(model)} cannot be decoded here: it does not read the tokens that it is given")
    difference = relative(logits.float(), reference[KEPT:last].to(logits.device))
    if rollback and not difference <= limit:
        return f"its logits of several tokens differ from those without a cache by {difference:.2g} of their size"
    return None


def _without_cache(model: Any, vocab_size: int, limit: float) -> tuple[Tensor, float]:
    """Float32 logits [6, V] of the model's own forward, and how much later tokens change them in quantised layers (0 if
    that is rounding)."""
    tokens = _text(vocab_size)
    altered = tokens[:KEPT] + [(token + 1) % vocab_size for token in tokens[KEPT:]]
    try:
        logits, changed = (_forward(model, ids) for ids in (tokens, altered))
    except CapabilityError:
        raise
    except Exception as error:
        raise CapabilityError(f"{_name(model)} cannot be decoded here: {cause_of(error)}") from error
    difference = relative(changed[:KEPT], logits[:KEPT])
    # Quantised layers that scale all tokens of a call together gave 0.02 to 0.1.
    if LIMIT < difference <= 0.3 and _mixes_tokens(model):
        return logits, difference
    if difference > limit:
        raise CapabilityError(
            f"{_name(model)} is not a causal language model: its logits for a token depend on later tokens "
            "(a BERT-like model needs is_decoder=True in its configuration)"
        )
    return logits, 0.0


def _mixes_tokens(model: Any) -> bool:
    """Whether the output of one of the first linear layers other than PyTorch's own depends on the other rows: kernels
    for 8-bit activations often use one scale for all rows of a call."""
    layers = (m for m in model.modules() if hasattr(m, "in_features") and not is_plain(m))
    return any(_sees_other_rows(layer, model) for layer in islice(layers, 16))


def _sees_other_rows(layer: Any, model: Any) -> bool:
    ramp = torch.linspace(-1, 1, ROWS * layer.in_features, dtype=torch.float64).cos()
    rows = ramp.view(1, ROWS, -1).to(device_of(model), model.dtype)
    altered = rows.clone()
    altered[:, KEPT:] *= 32
    try:
        before, changed = (layer(x)[:, :KEPT].float() for x in (rows, altered))
    except Exception:  # not a layer over rows of hidden states
        return False
    return relative(changed, before) > LIMIT


def _forward(model: Any, tokens: list[int]) -> Tensor:
    parameters = parameters_of(model)
    ids = torch.tensor([tokens], device=device_of(model))
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if "position_ids" in parameters:  # as generate passes them
        options["position_ids"] = torch.arange(len(tokens), device=ids.device)[None]
    with alone(model):
        logits: Tensor | None = getattr(model(input_ids=ids, **options), "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[2] < model.config.get_text_config().vocab_size:
        raise CapabilityError(
            f"{type(model).__name__} does not return logits for every token: load the model as a causal one"
        )
    return logits[0].float()


def _form(model: Any, wrapped: LanguageModel) -> tuple[Any, ...]:
    exact, lean = getattr(wrapped, "exact", None), getattr(wrapped, "is_lean", None)
    return model.dtype, device_of(model), exact, lean, *map(id, forwards_of(model.modules()))


def _text(vocab_size: int) -> list[int]:
    return [(7 * i + 3) % vocab_size for i in range(ROWS)]


def _name(model: Any) -> str:
    return str(model.config.get_text_config().model_type)
