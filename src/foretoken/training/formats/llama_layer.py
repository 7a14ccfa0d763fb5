"""Our decoder layer in other layouts: names of tensors and keys of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.models.network.frequencies import BY_LENGTH, PLAIN
from foretoken.training.formats.base import Target
from foretoken.training.formats.values import flag, listed, number, positive, whole

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
FACTORS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
)
"""Parameters of scaled rotary embeddings."""


def layer_names(ours: str, theirs: str, config: LayerConfig, head_norms: bool = False) -> dict[str, str]:
    """Their names of a layer's matrices and biases, and of the norm before its MLP, by our names.

    Args:
        head_norms: whether the layer has norms of the heads.
    """
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    parts = {f"{name}.weight": attention for name in (*ATTENTION, *("q_norm", "k_norm") * head_norms)}
    parts |= {f"{name}.weight": mlp for name in MLP}
    parts |= {f"{name}.bias": attention for name in ATTENTION * config.attention_bias}
    parts |= {f"{name}.bias": mlp for name in MLP * config.mlp_bias}
    parts["post_attention_layernorm.weight"] = theirs
    return {f"{ours}.{name}": f"{place}.{name}" for name, place in parts.items()}


def layer_keys(config: LayerConfig, target: Target) -> dict[str, Any]:
    """``config.json`` of one layer of a target, in Llama's keys."""
    base = target.parts.config
    rope = dict(config.rope or {})
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
        "max_position_embeddings": rope.pop("max_position_embeddings", target.model.context_length),
        **({"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}),
        **({"rope_scaling": rope} if "rope_type" in rope else {}),
        "vocab_size": target.parts.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(base, "bos_token_id", None),
        "eos_token_id": getattr(base, "eos_token_id", None),
        "torch_dtype": "bfloat16",
    }


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`LayerConfig` from their ``config.json``, except for biases (:func:`with_biases`).  Raises
    ``ValueError`` if a key is missing or requires features that our layer lacks."""
    _refuse(config)
    return layer_shape(config)


def layer_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes and the rotary embedding among them.  Raises ``ValueError`` for a missing key or an unsupported rotary
    embedding."""
    heads = whole(config, "num_attention_heads")
    size = whole(config, "hidden_size")
    return {
        "hidden_size": size,
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads", default=heads),
        "head_dim": whole(config, "head_dim", default=size // heads),
        "ffn": whole(config, "intermediate_size"),
        "rope_theta": _theta(config),
        "rope": rope_of(config),
        "eps": positive(config, "rms_norm_eps", default=1e-6),
    }


def with_biases(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, bool], dict[str, Tensor]]:
    """``attention_bias`` and ``mlp_bias``, by the tensors or ``config.json``; and the tensors.  A checkpoint that has
    biases of queries, keys and values only (Qwen2) gets zeros for the output projection."""
    given = {".".join(name.split(".")[-3:]) for name in tensors}
    attention = bool(flag(config, "attention_bias")) or any(f"self_attn.{name}.bias" in given for name in ATTENTION)
    mlp = bool(flag(config, "mlp_bias")) or any(f"mlp.{name}.bias" in given for name in MLP)
    filled = dict(tensors)
    if "self_attn.q_proj.bias" in given and "self_attn.o_proj.bias" not in given:
        for name, weight in tensors.items():
            if name.endswith(".o_proj.weight"):
                filled[f"{name.removesuffix('weight')}bias"] = weight.new_zeros(len(weight))
    return {"attention_bias": attention, "mlp_bias": mlp}, filled


def rope_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parameters of the common rotary embedding of all layers; ``None`` if it is a plain one.  Raises ``ValueError`` if
    layers differ."""
    found: dict[str, dict[str, Any]] = {}
    for name, rope in _ropes(config).items():
        if not rope:
            continue
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        found[name] = {} if kind in PLAIN else {"rope_type": kind, **_factors(config, rope)}
        share = number(rope, "partial_rotary_factor", default=number(config, "partial_rotary_factor", default=1.0))
        if share != 1.0:
            found[name]["partial_rotary_factor"] = share
    if not found and config.get("partial_rotary_factor") not in (None, 1.0):
        return {"partial_rotary_factor": number(config, "partial_rotary_factor")}
    first = next(iter(found.values()), {})
    if any(other != first for other in found.values()):
        raise ValueError(f"the checkpoint has several rotary embeddings ({', '.join(found)}), and this layer has one")
    return first or None


def _factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a scaled rotary embedding; the lengths may stand beside it."""
    values = {key: rope[key] for key in FACTORS if rope.get(key) is not None}
    beside = ("original_max_position_embeddings", "max_position_embeddings")
    return {**{key: whole(config, key) for key in beside if config.get(key) is not None}, **values}


def _theta(config: Mapping[str, Any]) -> float:
    """The common base of all rotary embeddings in the configuration."""
    thetas = {}
    for name, rope in {"config.json": {"rope_theta": config.get("rope_theta")}, **_ropes(config)}.items():
        if rope.get("rope_theta") is not None:
            thetas[name] = positive(rope, "rope_theta", default=0.0)
    if len(set(thetas.values())) > 1:
        values = ", ".join(f"{theta:g} in {name}" for name, theta in thetas.items())
        raise ValueError(f"the checkpoint has several values of rope_theta ({values}), and this layer has one")
    return next(iter(thetas.values()), 10000.0)


def length_warning(config: LayerConfig) -> list[str]:
    """A note for the user about a rotary embedding whose frequencies depend on the length of a text."""
    rope = config.rope or {}
    kind = rope.get("rope_type")
    if kind not in BY_LENGTH:
        return []
    length = rope.get("original_max_position_embeddings" if kind == "longrope" else "max_position_embeddings")
    up_to = "short texts" if length is None else f"texts up to {length} tokens"
    return [f"the rotary embedding ({kind}) changes with the length of a text: this drafter keeps that of {up_to}"]


def interleave_warning(config: Mapping[str, Any]) -> list[str]:
    """A note for the user about a rotary embedding of pairs, where only halves are read."""
    stated = flag(config, "rope_interleave", "rope_interleaved")
    return ["config.json has rope_interleave, which is ignored: layers of this kind rotate halves"] * bool(stated)


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
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"the checkpoint's hidden_act is {config['hidden_act']!r}, and this layer has 'silu'")
    is_off = flag(config, "use_sliding_window") is False  # the target's window may be listed too
    followed: dict[str, Any] = {"logit_scale": 1.0}
    refuse_others(config, followed if is_off else {**followed, "sliding_window": None})
    if "sliding_attention" in (listed(config, "layer_types") or ()):
        raise ValueError("the checkpoint has a sliding window, which this layer does not support")
