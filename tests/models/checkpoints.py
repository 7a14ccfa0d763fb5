"""Tiny random checkpoints of many architectures, saved to disk and loaded with the library's own loader.

Weights are scaled up so that logits depend clearly on the whole path: with Transformers' own initialisation a wrong
mask would hide below the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GPTJForCausalLM

from foretoken.core.io.quiet import NO_BARS
from foretoken.loading import load_model
from foretoken.models.base import LanguageModel

VOCAB = 97
CONTEXT = 128

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# name: (model_type, config values on top of COMMON)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama_gqa_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_sliding": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {**HALF, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**HALF, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "phi3_sliding": ("phi3", {"sliding_window": 8}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48, "pad_token_id": 1}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**HALF, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN_ROPE},
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],
            "attn_temperature_tuning": False,
        },
    ),
}

if getattr(GPTJForCausalLM, "_supports_attention_backend", False):  # not before Transformers 5.24
    ARCHITECTURES["gptj"] = (
        "gptj",
        {"n_embd": 48, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": CONTEXT},
    )

for _name in ("afmoe", "doge"):  # one views what attention gives it, the other has a mask for every head
    if _name in CONFIG_MAPPING:
        ARCHITECTURES[_name] = (
            _name,
            {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        )


FLOAT32_ONLY = ("afmoe", "deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss")
"""Transformers' grouped matrix product of experts knows no float64."""


def best_dtype(name: str) -> str:
    """The most exact dtype that the architecture runs in."""
    return "float32" if name in FLOAT32_ONLY else "float64"


def new_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random Transformers model in float32 with lively weights."""
    model_type, values = ARCHITECTURES.get(name, (name, {}))
    config = AutoConfig.for_model(model_type, **{**COMMON, **values, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    enliven(model, seed)
    return model


@torch.no_grad()
def enliven(model: Any, seed: int = 0) -> None:
    """Redraw the weights: matrices keep the size of what goes through them, biases and norms are not trivial."""
    generator = torch.Generator().manual_seed(seed + 1)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() < 2:
            weight.add_(0.1 * noise)
        elif any(word in key for word in ("embed", "wte", "wpe")):
            weight.copy_(noise)
        else:
            weight.copy_(1.3 * noise / min(weight.shape[-2:]) ** 0.5)


def save(model: Any, folder: Path) -> Path:
    """Write a checkpoint as users have it."""
    with NO_BARS.changed():
        model.save_pretrained(folder)
    return folder


def checkpoint(folder: Path, name: str, dtype: str | None = None, **changes: Any) -> LanguageModel:
    """Make, save and load an architecture; all through ``save_pretrained`` and the library's loader."""
    return load_model(save(new_model(name, **changes), folder / name), dtype=dtype or best_dtype(name))


@torch.inference_mode()
def plain_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[n, V] logits of a Transformers model's own forward on the whole text, without any cache."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
