"""Our decoder layer in other layouts: names of tensors and keys of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.training.formats.base import Target
from foretoken.training.formats.values import flag, listed, number, positive, whole


def layer_names(ours: str, theirs: str) -> dict[str, str]:
    """Their names of a layer's matrices and of the norm before its MLP, by our names."""
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = {f"{ours}.{name}.weight": f"{theirs}.self_attn.{name}.weight" for name in projections}
    mlp = {f"{ours}.{name}.weight": f"{theirs}.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    norm = f"{ours}.post_attention_layernorm.weight"
    return {**attention, **mlp, norm: f"{theirs}.post_attention_layernorm.weight"}


def layer_keys(config: LayerConfig, target: Target) -> dict[str, Any]:
    """``config.json`` of one layer of a target, in Llama's keys."""
    base = target.parts.config
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": target.model.context_length,
        "vocab_size": target.parts.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(base, "bos_token_id", None),
        "eos_token_id": getattr(base, "eos_token_id", None),
        "torch_dtype": "bfloat16",
    }


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`LayerConfig` from their ``config.json``.  Raises ``ValueError`` if a key is missing or
    requires features that our layer lacks."""
    _refuse(config)
    return layer_shape(config)


def layer_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes among them.  Raises ``ValueError`` for a missing key or an unsupported rotary embedding."""
    heads = whole(config, "num_attention_heads")
    size = whole(config, "hidden_size")
    return {
        "hidden_size": size,
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads", default=heads),
        "head_dim": whole(config, "head_dim", default=size // heads),
        "ffn": whole(config, "intermediate_size"),
        "rope_theta": _theta(config),
        "eps": positive(config, "rms_norm_eps", default=1e-6),
    }


def _theta(config: Mapping[str, Any]) -> float:
    """The common base of all rotary embeddings in the configuration."""
    thetas = {}
    for name, rope in {"config.json": {"rope_theta": config.get("rope_theta")}, **_ropes(config)}.items():
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"the checkpoint's rotary embedding is of the type {kind!r}, and this layer has 'default'")
        refuse_others(rope, {"partial_rotary_factor": 1.0})
        if rope.get("rope_theta") is not None:
            thetas[name] = positive(rope, "rope_theta", default=0.0)
    if len(set(thetas.values())) > 1:
        values = ", ".join(f"{theta:g} in {name}" for name, theta in thetas.items())
        raise ValueError(f"the checkpoint has several values of rope_theta ({values}), and this layer has one")
    return next(iter(thetas.values()), 10000.0)


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rotary settings of a configuration by key, separate for each kind of layer if it has them so."""
    ropes: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        entry = config.get(key) or {}
        rope: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"rope_type": entry}
        parts = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
        shared = {name: value for name, value in rope.items() if name not in parts}
        ropes.update({f"{key}.{name}": {**shared, **part} for name, part in parts.items()} if parts else {key: rope})
    return ropes


def refuse_others(config: Mapping[str, Any], followed: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for values of keys other than the supported ones."""
    for key, value in followed.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"the checkpoint has {key} = {config[key]!r}, which this layer does not support")


def _refuse(config: Mapping[str, Any]) -> None:
    if number(config, "num_hidden_layers", default=1) != 1:
        raise ValueError(f"the checkpoint has {config['num_hidden_layers']} layers, and this network has one")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"the checkpoint's hidden_act is {config['hidden_act']!r}, and this layer has 'silu'")
    is_off = flag(config, "use_sliding_window") is False  # the target's window may be listed too
    followed: dict[str, Any] = {
        "attention_bias": False,
        "mlp_bias": False,
        "logit_scale": 1.0,
        "partial_rotary_factor": 1.0,
    }
    refuse_others(config, followed if is_off else {**followed, "sliding_window": None})
    if "sliding_attention" in (listed(config, "layer_types") or ()):
        raise ValueError("the checkpoint has a sliding window, which this layer does not support")
