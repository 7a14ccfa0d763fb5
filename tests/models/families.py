"""A tiny model of every family that the lean forward covers, with everything switched on that the family can have."""

from __future__ import annotations

from typing import Any

from checkpoints import HALF, new_model, prompt_of

from foretoken.models.base import Feed, Rows
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.layers import LayerPlan

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
LOCAL_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "attention_bias": True},
    "gemma2": {**HALF, **CAPS, "head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {**HALF, "head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": LOCAL_ROPE},
    "phi3": {"sliding_window": 8, "partial_rotary_factor": 0.5},
    "olmo2": {"attention_bias": True},
    "granite": {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
    "olmoe": EXPERTS,
    "granitemoe": {**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""By family, with everything switched on that it can have."""


def model_of(name: str, **changes: Any) -> Any:
    """A tiny random model; its experts are multiplied one by one, which any dtype can."""
    return new_model(name, **{**MODELS[name], **changes}, experts_implementation="eager")


def windows(model: HuggingFaceModel) -> list[Rows]:
    """Parts of the network, and a whole forward that goes on from where one of them ended."""
    sequence = model.open()
    model.prefill(sequence, prompt_of(13))
    rows = []
    for plan in (
        LayerPlan(skip_attention=frozenset({0}), skip_mlp=frozenset({1})),
        LayerPlan(skip_attention=frozenset({1}), skip_mlp=frozenset({0, 2})),
        LayerPlan(stop=2),
    ):
        rows += model.forward_part([Feed(sequence, [5, 6, 7, 8], [-1, 0, 0, 1])], plan, ["last"])
        if plan.stop is None:
            model.commit(sequence, [])
    rows += model.forward([Feed(sequence, [5, 6, 7, 9, 3], [-1, 0, 0, 1, 3])], ["layer:3", "last"])
    model.release(sequence)
    return rows
