"""Tiny random checkpoints for the tests of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = "def add(a, b):\n    return a + b\n\nfor item in items:\n    print(item)\n" * 4
CONTEXT = 160


def save_model(folder: Path, tokenizer: Any, seed: int = 0, noise: float = 0.0, context: int = CONTEXT) -> Path:
    """A random two-layer Llama; ``noise`` moves its weights, so that a copy becomes a fair draft model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
