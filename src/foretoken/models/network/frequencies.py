"""Rotary frequencies of small networks that we run ourselves, by Transformers' rules for scaled embeddings."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.core.values import one_line

PLAIN = ("default", "mrope")
"""Types without scaling; the three axes of ``mrope`` are equal in a text."""
BY_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies change when a text exceeds the length of the first training."""
SCALED = ("linear", "llama3", "yarn", *BY_LENGTH)


def rotary_frequencies(
    dim: int, theta: float, rope: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Frequencies [r / 2] in radians per position, and the factor of cosines and sines.

    The first r numbers of a head are rotated, all by default. Types of ``BY_LENGTH`` have the frequencies of texts up
    to the length of the first training.

    Args:
        dim: width of a head.
        theta: base of the embedding.
        rope: Transformers' parameters of a scaled or partial embedding: ``rope_type`` and its numbers,
            ``partial_rotary_factor`` and ``max_position_embeddings``.

    Raises:
        ValueError: an unknown type, or missing or impossible parameters.
    """
    return _frequencies(dim, theta, json.dumps(rope, sort_keys=True) if rope else "{}", torch.device(device))


@functools.lru_cache(maxsize=64)
def _frequencies(dim: int, theta: float, parameters: str, device: torch.device) -> tuple[Tensor, float]:
    # Not inference tensors, because a network that learns reads them too
    with torch.inference_mode(False), torch.device("cpu"):
        frequencies, scale = _on_cpu(dim, theta, json.loads(parameters))
        return frequencies.to(device), scale


def _on_cpu(dim: int, theta: float, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind not in (*PLAIN, *SCALED):
        kinds = ", ".join((*PLAIN, *SCALED))
        raise ValueError(f"a rotary embedding is of the type {kind!r}, which is not supported: it can be {kinds}")
    rotated = int(dim * share)
    if rotated < 2 or rotated % 2 or rotated > dim:
        raise ValueError(f"partial_rotary_factor = {share:g} rotates {rotated} of {dim} numbers, not an even part")
    if kind in PLAIN:
        return theta ** -(torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0
    try:
        return _scaled(kind, dim, theta, rope)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(f"the rotary embedding of the type {kind!r} cannot have these parameters: {reason}") from None


def _scaled(kind: str, dim: int, theta: float, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": theta, **rope}
    # By default the length that the scaling is for, so that Transformers logs no doubt
    longest = parameters.pop("max_position_embeddings", None) or math.ceil(
        parameters.get("original_max_position_embeddings", 2048) * parameters.get("factor", 1.0)
    )
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        rope_parameters=parameters,
        max_position_embeddings=longest,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if not bool(torch.isfinite(frequencies * scale).all()):
        raise ValueError("its frequencies are not finite")
    return frequencies.float(), float(scale)
