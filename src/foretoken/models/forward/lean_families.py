"""Model families of the lean forward: names of their modules, and how a layer combines them.

Everything else (biases, sizes, epsilons, activations, multipliers) comes from the modules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """Module names, and facts that no module states.  An empty name is the module itself, ``None`` is nothing.

    Attributes:
        decoder: the stack of layers inside the causal language model.
        after_attention: norm of the attention's output.
        after_mlp: norm of the MLP's output.
        qkv: projections in the attention, one name each or one for all.
        interleaved: whether a fused projection stores query, key and value head by head.
        gate_up: gate and up projection in the MLP, one name each or one for both.
        up: the projection of an MLP without a gate.
        experts: whether to call the model's own MLP module, with its router and experts.
        norm_offset: addend of the norm weights.
        soft_cap: attribute of the attention with the cap of its scores.
        parallel: attribute of a layer that is true if the MLP reads the attention's input.
        refused: configuration values that change the forward in ways that a check may miss; such models are not
            covered.
    """

    decoder: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    mlp: str | None = "mlp"
    norm_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    norm_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    interleaved: bool = False
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str | None = None
    down: str = "down_proj"
    activation: str | None = "act_fn"
    experts: bool = False
    norm_offset: float = 0.0
    soft_cap: str | None = None
    parallel: str | None = None
    refused: tuple[str, ...] = ()


SANDWICH = Family(
    after_attention="post_attention_layernorm",
    norm_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
    refused=("use_bidirectional_attention",),
)
"""Norms before and after every sublayer, as in Gemma from version 2 on."""
EXPERTS = Family(experts=True)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite"), Family()),
    "gemma": Family(norm_offset=1.0, refused=("use_bidirectional_attention",)),
    "gemma2": replace(SANDWICH, soft_cap="attn_logit_softcapping"),
    "gemma3_text": SANDWICH,
    "phi3": Family(qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn"),
    "olmo2": Family(
        norm_attention=None,
        after_attention="post_attention_layernorm",
        norm_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    "gpt_neox": Family(
        decoder="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        interleaved=True,
        out="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        activation="act",
        parallel="use_parallel_residual",
    ),
    **dict.fromkeys(("mixtral", "qwen3_moe"), EXPERTS),
    "olmoe": replace(EXPERTS, refused=("clip_qkv",)),
    "granitemoe": replace(EXPERTS, mlp="block_sparse_moe"),
}
"""Families by ``model_type``."""


def family_of(config: Any) -> Family | None:
    """The family of a model's text configuration; ``None`` if the lean forward does not cover it."""
    family = FAMILIES.get(config.model_type)
    if family is None or any(getattr(config, name, None) for name in family.refused):
        return None
    # The last two use foretoken.models.network.rotary.
    rope_types = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
    return family if all(rope.get("rope_type", "default") in rope_types for rope in _ropes(config)) else None


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Parameters of the rotary embeddings: one set, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in rope.values() if isinstance(value, Mapping)]
    return by_layer or [rope]


def part(module: Any, name: str | None) -> Any:
    """The module called ``name`` in ``module``; ``None`` for ``None``, and ``module`` for an empty name."""
    return None if name is None else getattr(module, name) if name else module
