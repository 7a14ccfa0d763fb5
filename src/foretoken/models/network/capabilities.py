"""Capabilities of a Transformers model for speculation, detected before any weight is used."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import Capabilities
from foretoken.models.network.traits import source_of


def detect(model: Any) -> Capabilities:
    """Capabilities of ``model``; ``missing`` gives the reason, with the layer type, for each absent one."""
    config = model.config.get_text_config()
    recurrent = _recurrent_layer(model, config)
    if recurrent == "conv":
        # Transformers' cache records past convolution inputs, so that the end of a chain can be dropped.
        reason = f"{config.model_type} has conv layers, which mix neighbouring slots, so paths cannot branch"
        return _chains_only(reason)
    if recurrent:
        # Whether its end can be dropped is decided by a trial (foretoken.models.stateful).
        reason = f"{config.model_type} has {recurrent} layers, whose state cannot be branched"
        return Capabilities(
            False, False, False, True, False, dict.fromkeys(("tree_mask", "keep_path", "rollback"), reason)
        )
    loops = loops_of(config)
    if loops > 1:
        return _chains_only(f"{config.model_type} runs its layers {loops} times, each with keys and values of its own")
    if _uses_alibi(config):
        return _chains_only(f"{config.model_type} has ALiBi attention layers, which take positions from the cache slot")
    reader = _slot_reader(model, config)
    if reader:
        return _chains_only(f"{config.model_type} has {reader} layers, which take positions from the cache slot")
    if not getattr(model, "_supports_attention_backend", False):
        return _chains_only(f"the attention layers of {config.model_type} do not use Transformers' attention interface")
    return Capabilities()


def loops_of(config: Any) -> int:
    """How often a looped network runs its layers for a token (``num_loops``, as Nanbeige4.2 calls it); 1 for others."""
    return int(getattr(config, "num_loops", None) or 1)


def _chains_only(reason: str) -> Capabilities:
    return Capabilities(False, False, True, True, False, dict.fromkeys(("tree_mask", "keep_path"), reason))


def _uses_alibi(config: Any) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or (attention is not None and getattr(attention, "alibi", False))
    )


def _slot_reader(model: Any, config: Any) -> str:
    """Class name of the first layer whose forward depends on cache slots, or an empty string."""
    if config.model_type == "llama4_text" and not (
        config.attn_temperature_tuning and config.floor_scale <= config.max_position_embeddings
    ):
        return ""  # its attention temperature depends on the slot only beyond a certain position
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        source = source_of(kind.forward)
        # Calls in layers that derive positions from the cache slot instead of the position ids.
        if any(word in source for word in ("get_seq_length(self.layer_idx", "get_query_offset(", "update_indexer(")):
            return kind.__name__
    return ""


def _recurrent_layer(model: Any, config: Any) -> str:
    """The first layer type with a recurrent state, else ``"conv"`` if there are convolutions, else an empty string."""
    kinds = [str(k) for k in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()]
    recurrent = ("linear_attention", "mamba", "recurrent", "rwkv", "ssm", "lightning", "kda")
    for kind in kinds:
        if any(word in kind for word in recurrent):
            return kind
    if getattr(model, "_is_stateful", False):
        return next((k for k in getattr(config, "block_types", None) or () if "attention" not in k), "recurrent")
    return "conv" if "conv" in kinds else ""
