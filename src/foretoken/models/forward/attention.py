"""Attention functions registered with Transformers.

``foretoken`` folds the query heads that share a key head into query rows: [b, Hq, n, D] -> [b, Hkv, r*n, D].
Transformers' own sdpa instead copies the whole cache in every layer and step (``repeat_kv``) if there is a mask.
``foretoken_exact`` computes scores, softmax and the weighted sum in float64, so that the rounded result does not depend
on slot order or on the number of rows scored together (``exact="bitwise"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FOLDED = "foretoken"
EXACT = "foretoken_exact"

_WATCHED: ContextVar[dict[int, Tensor] | None] = ContextVar("watched queries", default=None)


@contextmanager
def watching_queries() -> Iterator[dict[int, Tensor]]:
    """Inside the block, record the query [Hq, D] of the last node of the first row, by layer."""
    queries: dict[int, Tensor] = {}
    token = _WATCHED.set(queries)
    try:
        yield queries
    finally:
        _WATCHED.reset(token)


@contextmanager
def few_plans(device: torch.device | None) -> Iterator[None]:
    """Inside the block, PyTorch does not choose cuDNN attention on a CUDA device.

    cuDNN builds a plan for every new shape, which takes longer than the attention; with a mask the shape changes
    whenever the longest sequence grows (162 plans in 478 eager forwards).
    """
    if device is None or device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def attention_for(exact: str, device: torch.device) -> str:
    """Name of the attention function for an ``exact`` setting."""
    if exact != "bitwise":
        return FOLDED
    if device.type == "mps":
        raise ValueError(
            "exact='bitwise' sums attention in float64, which mps does not support: leave it out, or use device=cpu"
        )
    return EXACT


def _note(module: nn.Module, query: Tensor) -> None:
    queries = _WATCHED.get()
    if queries is not None:
        queries[int(module.layer_idx)] = query[0, :, -1]  # type: ignore[arg-type]


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of query [b, Hq, n, D] over key/value [b, Hkv, S, D*]; returns [b, n, Hq, Dv].

    ``attention_mask`` [b, 1, n, S] is additive ([b, Hq, n, S] in models with a mask per head); ``softcap`` and
    ``s_aux`` (attention sinks [Hq]) have the meaning of the models that use them.
    """
    _note(module, query)
    if softcap is not None or s_aux is not None:
        return _explicit(query, key, value, attention_mask, scaling, softcap, s_aux, torch.float32), None
    b, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if groups > 1:
        query = query.reshape(b, kv_heads, groups * n, dim)
        if attention_mask is not None and attention_mask.shape[1] == heads:
            attention_mask = attention_mask.reshape(b, kv_heads, groups * n, -1)
        elif attention_mask is not None and n > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(b, heads, n, value.shape[-1]).transpose(1, 2).contiguous(), None  # some models call view on it


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same with float64 sums, rounded once."""
    _note(module, query)
    return _explicit(query, key, value, attention_mask, scaling, softcap, s_aux, torch.float64), None


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    accumulate: torch.dtype,
) -> Tensor:
    b, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    wide = torch.promote_types(query.dtype, accumulate)
    folded = query.reshape(b, kv_heads, groups * n, dim).to(wide)
    scores = folded @ key.to(wide).transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(b, kv_heads, groups, n, -1)
    if mask is not None:
        scores = scores + (mask.view(b, kv_heads, groups, n, -1) if mask.shape[1] == heads else mask[:, :, None])
    if sinks is not None:
        column = sinks.to(wide).view(1, kv_heads, groups, 1, 1).expand(b, -1, -1, n, 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    out = weights.view(b, kv_heads, groups * n, -1) @ value.to(wide)
    return out.view(b, heads, n, -1).transpose(1, 2).to(query.dtype).contiguous()


ALL_ATTENTION_FUNCTIONS.register(FOLDED, folded_attention)
ALL_ATTENTION_FUNCTIONS.register(EXACT, exact_attention)
