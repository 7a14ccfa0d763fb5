"""Block drafters in other layouts: tensors by our names, the shape from ``config.json``.

A folder has ``model_type: "qwen3"`` and neither embedding nor projection, so its kind is recognised by the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.core.io.drafter_folders import our_name
from foretoken.training.formats.base import Target, by_names, check_sizes
from foretoken.training.formats.llama_layer import layer_shape, refuse_others
from foretoken.training.formats.values import MOST, class_of, flag, listed, merged, number, positive, whole

SINK = ".attention_sink_bias"


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` flattened: the layers' own configuration, the top level, and ``dflash_config`` over both, each a
    JSON object."""
    flat = dict(config)
    for key in ("transformer_layer_config", "dflash_config"):
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ValueError(f"{key} in config.json must be a JSON object")
        flat = merged(inner, flat) if key == "transformer_layer_config" else merged(flat, inner)
    return flat


def by_our_names(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by our names, with separate queries, keys and values."""
    renamed = by_names(tensors, our_name)
    for name in [name for name in renamed if name.endswith(".qkv_proj.weight")]:
        prefix, whole = name.removesuffix("qkv_proj.weight"), renamed.pop(name)
        dim = int(
            number(config, "head_dim", default=number(config, "hidden_size") / number(config, "num_attention_heads"))
        )
        query, key = (int(number(config, k)) * dim for k in ("num_attention_heads", "num_key_value_heads"))
        if len(whole) != query + 2 * key:
            raise ValueError(f"{name} has {len(whole)} rows and must have {query + 2 * key} for config.json")
        parts = zip("qkv", whole.split([query, key, key]), strict=True)
        renamed.update({f"{prefix}{letter}_proj.weight": part for letter, part in parts})
    return renamed


def in_halves(tensors: Mapping[str, Tensor], dim: int, rotated: int) -> dict[str, Tensor]:
    """Weights for rotary embeddings of interleaved pairs, permuted for ours, which rotate the two halves of the first
    ``rotated`` of a head's ``dim`` numbers.

    Attention scores do not depend on the order of a head's rows if queries and keys have the same.
    """
    order = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, dim)])

    def moved(name: str, value: Tensor) -> Tensor:
        if name.endswith((".q_norm.weight", ".k_norm.weight")):
            return value[order]
        if name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")):
            return value.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
        return value

    return {name: moved(name, value) for name, value in tensors.items()}


def is_interleaved(config: Mapping[str, Any]) -> bool:
    """Whether rotary embeddings rotate neighbours (GPT-J) instead of halves; LFM2's drafters do so without a key for
    it."""
    switch = flag(config, "rope_interleave", "rope_interleaved")
    return class_of(config).startswith("Lfm2") if switch is None else switch


def shape_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> dict[str, Any]:
    """Arguments of :class:`~foretoken.methods.drafters.nets.block.BlockConfig` from a flattened configuration
    (:func:`nested`), except for those that only tensors determine.

    Raises ``ValueError`` if a key is missing, is for another target, or requires features that our network lacks.
    """
    check_sizes(config, target)
    refuse_others(config, {"hidden_act": "silu"})
    # 256 layers: more than any published drafter has
    layers = whole(config, "num_hidden_layers", most=256)
    return {
        **layer_shape(config),
        "vocab_size": target.parts.vocab_size,
        "layers": layers,
        "taps": ",".join(map(str, taps_of(config, tensors, target))),
        "block": whole(config, "block_size", least=-MOST),
        "mask_token": _mask_token(config, "mask_embedding" in tensors, target),
        "own_mask": "mask_embedding" in tensors,
        "sinks": _has_sinks(config, tensors),
        "input_scale": positive(config, "input_embedding_scale", default=1.0),
        **_attention(config, layers),
    }


def _mask_token(config: Mapping[str, Any], own_embedding: bool, target: Target) -> int:
    token = next(
        (config[k] for k in ("mask_token_id", "pard_token", "ptd_token_id") if config.get(k) is not None), None
    )
    if token is None and own_embedding:
        return 0
    if token is None:
        raise ValueError(
            "config.json names no mask token (mask_token_id in dflash_config): the checkpoint is incomplete"
        )
    rows = len(target.parts.embed.weight)
    if type(token) is not int or not 0 <= token < min(rows, target.parts.vocab_size):
        raise ValueError(
            f"the checkpoint's mask token {token!r} is not one of the target's {target.parts.vocab_size} tokens"
        )
    return token


def _has_sinks(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether attention has sinks, by the tensors.  Raises ``ValueError`` if ``config.json`` promises missing ones."""
    sinks = any(name.endswith(SINK) for name in tensors)
    if not sinks and flag(config, "dflash_attention_sink", "attention_sink"):
        raise ValueError(f"the checkpoint lacks the tensor layers.0.self_attn{SINK}: it is incomplete")
    return sinks


def _mode(config: Mapping[str, Any]) -> bool | None:
    """Whether ``attention_mode`` makes rows causal; ``None`` if it does not say.  Raises ``ValueError`` for attention
    that is not over keys and values of heads."""
    mode = config.get("attention_mode")
    if mode is None or mode in ("gqa", "mqa", "mha"):
        return None
    if mode in ("causal", "bidirectional"):
        return bool(mode == "causal")
    raise ValueError(f"config.json has attention_mode {mode!r}, which this network does not have")


def _attention(config: Mapping[str, Any], layers: int) -> dict[str, str]:
    """``reach`` and ``causal``; a sliding layer is causal by default."""
    kinds = listed(config, "layer_types") or _default_kinds(config, layers)
    if flag(config, "use_swa"):
        kinds = ["sliding_attention"] * layers
    if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ValueError(f"layer_types in config.json must name {layers} layers as full_attention or sliding_attention")
    sliding = [kind == "sliding_attention" for kind in kinds]
    window = whole(config, "swa_window_size", "sliding_window", default=0, least=0) if any(sliding) else 0
    if any(sliding) and window < 1:
        raise ValueError("config.json has sliding layers and no sliding_window: the checkpoint is incomplete")
    # In Transformers the window is the distance to the farthest token; all others also count the token itself.
    reach = window if str(config.get("model_type", "")).endswith("_assistant") else window - 1
    mode, is_causal = _mode(config), flag(config, "is_causal", "causal", "causal_head")
    is_causal = mode if is_causal is None else is_causal
    if config.get("dflash_draft_attention") is not None:
        is_causal = config["dflash_draft_attention"] == "causal"
    free = flag(config, "sliding_window_non_causal") or str(config.get("model_type", "")).endswith("_assistant")
    causal = [slides and not free if is_causal is None else is_causal for slides in sliding]
    return {
        "reach": _joined([max(1, reach) if slides else 0 for slides in sliding]),
        "causal": _joined([int(value) for value in causal]),
    }


def _default_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of the layers where ``layer_types`` is missing, by the rule of Transformers' ``Qwen3Config``: those from
    ``max_window_layers`` on have the window, if there is one."""
    has_none = "sliding_window" in config and config["sliding_window"] is None
    slides = flag(config, "use_sliding_window") and not has_none
    first = whole(config, "max_window_layers", default=28, least=0) if slides else layers
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


def _joined(values: Sequence[int]) -> str:
    """The values joined by commas; a single number if all are equal."""
    return ",".join(map(str, values if len(set(values)) > 1 else values[:1]))


def taps_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> list[int]:
    """Depths of the target that are fused: k is the output of its first k layers.  Raises ``ValueError`` for depths
    that the target does not have, and if ``fc`` reads another number of them."""
    count, layers = target.parts.num_layers, config.get("num_target_layers")
    if layers is not None and layers != count:
        raise ValueError(f"the checkpoint is for a target of {layers} layers, and this one has {count}")
    width, size = tensors["fc.weight"].shape[-1], target.parts.hidden_size
    if width % size:
        raise ValueError(f"fc.weight reads {width} numbers, not a multiple of the target's hidden size {size}")
    fused = width // size
    depths = listed(config, "aux_hidden_state_layer_ids")
    if depths is None:
        ids = listed(config, "target_layer_ids")
        depths = default_taps(count, fused) if ids is None else [i + 1 if type(i) is int else i for i in ids]
        last, words = count - 1, f"target_layer_ids must be from 0 to {count - 2}"
    else:
        last, words = count, f"aux_hidden_state_layer_ids must be from 1 to {count}"
    if not all(type(i) is int and 1 <= i <= last for i in depths):
        raise ValueError(f"{words} for a target of {count} layers: the checkpoint is for another target")
    if len(depths) == fused - 1:  # the last layer is read after the named ones
        depths = [*depths, count]
    if len(depths) != fused:
        raise ValueError(f"fc.weight reads {width} numbers, and {len(depths)} layers have {size} each")
    return list(depths)


def default_taps(count: int, fused: int) -> list[int]:
    """Default depths: evenly from the second layer to the third last."""
    if fused == 1:
        return [count // 2 + 1]
    return [round(1 + i * (count - 4) / (fused - 1)) + 1 for i in range(fused)]


def check_scales(config: Mapping[str, Any], target: Target) -> None:
    """Raise ``ValueError`` for logits with another scale or cap than the target's, which is applied to them."""
    base = target.parts.config
    cap = config.get("final_logit_softcapping")
    if cap is not None and cap != getattr(base, "final_logit_softcapping", None):
        raise ValueError(f"the checkpoint caps its logits at {cap}, and the target does not")
    scale = number(config, "output_multiplier", default=1.0)
    target_scale = float(getattr(base, "logit_scale", None) or 1.0) / float(
        getattr(base, "logits_scaling", None) or 1.0
    )
    if scale not in (1.0, target_scale):
        raise ValueError(f"the checkpoint scales its logits by {scale}, and the target by {target_scale}")
