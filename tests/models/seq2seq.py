"""Tiny random encoder-decoder models whose greedy answers are varied, and what Transformers generates with them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

VOCAB = 48
SHAPE = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 3, 4, 5, 6], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]]
"""Of unequal lengths; the first repeats itself, and the second is one token."""


def t5(seed: int = 1, config: Any = T5Config, model: Any = T5ForConditionalGeneration, **shape: Any) -> Any:
    """A model in float64, with small embeddings and large attention, so that a token does not just repeat itself."""
    torch.manual_seed(seed)
    network = model(config(**{**SHAPE, **shape})).double().eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * _scale(name, weight.shape[-1]))
    return network


def _scale(name: str, width: int) -> float:
    if "relative" in name or "shared" in name or "embed" in name:
        return 3.0 if "relative" in name else 0.3
    if "Attention" in name:
        return float((0.7 if name.endswith((".q.weight", ".k.weight")) else 3.0) * width**-0.5)
    return float(2.0 * width**-0.5)


def by_transformers(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """``count`` greedy tokens of ``model.generate``, without the one that its decoder begins with."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    return out[0, 1:].tolist()
