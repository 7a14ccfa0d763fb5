"""What a Transformers model can do for speculation, found before any weight is used."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import Capabilities

RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "rwkv", "ssm", "lightning", "kda")


def detect(model: Any) -> Capabilities:
    """Capabilities of ``model``; ``missing`` names the layer type for each absent one."""
    config = model.config.get_text_config()
    recurrent = _recurrent_layer(model, config)
    if recurrent:
        reason = f"{config.model_type} has {recurrent} layers, whose state cannot be rolled back or branched"
        return Capabilities(False, False, False, True, False, dict.fromkeys(("tree_mask", "keep_path", "rollback"), reason))
    if _uses_alibi(config):
        reason = f"{config.model_type} has ALiBi attention layers, which take positions from the cache slot"
        return Capabilities(False, False, True, True, False, dict.fromkeys(("tree_mask", "keep_path"), reason))
    if not getattr(model, "_supports_attention_backend", False):
        reason = f"the attention layers of {config.model_type} do not use Transformers' attention interface"
        return Capabilities(False, False, True, True, False, dict.fromkeys(("tree_mask", "keep_path"), reason))
    return Capabilities()


def _uses_alibi(config: Any) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or (attention is not None and getattr(attention, "alibi", False))
    )


def _recurrent_layer(model: Any, config: Any) -> str:
    """The first layer type with a recurrent state, or an empty string."""
    for kind in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ():
        if any(word in str(kind) for word in RECURRENT_LAYERS):
            return str(kind)
    if getattr(model, "_is_stateful", False):
        return "recurrent"
    return ""
