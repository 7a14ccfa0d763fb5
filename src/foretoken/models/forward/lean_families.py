"""What the lean forward must know of a family of models: where its modules are and how a layer joins them.

Everything else (biases, sizes, epsilons, activations, multipliers) is read from the modules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """Names of modules, and facts that no module tells.  An empty name is the module itself, ``None`` is nothing.

    Attributes:
        decoder: the stack of layers inside the causal language model.
        after_attention: norm of its output.
        after_mlp: norm of its output.
        qkv: in the attention, one name each or one for all.
        interleaved: whether a fused projection holds query, key and value head by head.
        gate_up: in the MLP, gate and up, one name each or one for both.
        up: instead of them in an MLP without a gate.
        experts: whether the MLP is called as it is: routers and experts are the model's own.
        norm_offset: what is added to the weights of its norms.
        soft_cap: attribute of the attention that caps its scores.
        parallel: attribute of a layer that tells whether the MLP reads what the attention reads.
        refused: configuration values that change the forward in a way that a check may not see; with them the model
            is not covered.
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


LLAMA = Family()
SANDWICH = Family(
    after_attention="post_attention_layernorm",
    norm_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
    refused=("use_bidirectional_attention",),
)
"""Norms before and behind every sublayer, as Gemma has them from its second version on."""
EXPERTS = Family(experts=True)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite"), LLAMA),
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
"""By ``model_type``."""


def family_of(config: Any) -> Family | None:
    """The family of a model's text configuration, or ``None`` where the lean forward does not cover it."""
    family = FAMILIES.get(config.model_type)
    if family is None or any(getattr(config, name, None) for name in family.refused):
        return None
    # The last two through foretoken.models.network.rotary.
    rope_types = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
    return family if all(rope.get("rope_type", "default") in rope_types for rope in _ropes(config)) else None


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of every rotary embedding: one, or one by layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in rope.values() if isinstance(value, Mapping)]
    return by_layer or [rope]


def part(module: Any, name: str | None) -> Any:
    """The module of that name below ``module``; ``None`` for ``None``, and itself for an empty name."""
    return None if name is None else getattr(module, name) if name else module
