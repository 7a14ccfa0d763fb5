"""Properties of a Transformers model's forward: masks, end-of-sequence ids, cache argument, attention
configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from foretoken.models.base import CapabilityError
from foretoken.models.cache.masks import LayerMask

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Names of the cache in arguments and outputs of Transformers' forwards; ``cache`` since 5.24."""


def cache_name(module: Any) -> str | None:
    """Name of the cache argument of a model's or decoder layer's forward; ``None`` if there is none.

    A forward that passes ``**kwargs`` on (a subclass, a wrapper like PEFT's) uses the name of the inner forward.
    """
    for inner in module.modules():
        parameters = parameters_of(inner)
        argument = next((name for name in CACHE_NAMES if name in parameters), None)
        if argument is not None or all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            return argument
    return None


def parameters_of(module: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(module).forward)).parameters


@lru_cache(maxsize=1024)
def source_of(function: Any) -> str:
    """Source text of a function; empty if there is none.  Cached, as it takes Python's tokenizer milliseconds."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def context_length_of(config: Any) -> int:
    """Maximum tokens of a text; 2^20 if the configuration does not set it (or to -1, like XLNet)."""
    length = int(getattr(config, "max_position_embeddings", 0) or 0)
    return length if length > 0 else 2**20


def cache_argument(module: Any) -> str:
    """:func:`cache_name` of a module that must take a cache.  Raises ``CapabilityError`` if it does not."""
    name = cache_name(module)
    if name is None:
        raise CapabilityError(f"the forward of {type(module).__name__} takes no cache")
    return name


def eos_ids(model: Any) -> frozenset[int]:
    """All end-of-sequence ids in the generation config, or else in the config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, list | tuple) else [value])
    return frozenset()


def layer_masks(model: Any) -> dict[str, LayerMask]:
    """The masks of the model's forward by layer type if it takes a dictionary, else one under ``""``."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not _makes_masks_by(model, "causal_mask_mapping"):
        # Without layer types, either all layers of a model slide (mistral, phi3) or none.
        if window and _makes_masks_by(model, "create_sliding_window_causal_mask"):
            return {"": LayerMask("sliding", window)}
        return {"": LayerMask()}
    kinds = {
        "full_attention": LayerMask(),
        "sliding_attention": LayerMask("sliding", window or 0),
        "chunked_attention": LayerMask("chunked", getattr(config, "attention_chunk_size", None) or 0),
    }
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = types - set(kinds)
    if unknown:
        raise CapabilityError(f"layers of type {', '.join(sorted(unknown))} cannot take trees")
    return {name: kinds[name] for name in sorted(types)}


def _makes_masks_by(model: Any, word: str) -> bool:
    """Whether ``word`` is in the source of a forward between the model and its decoder, where masks could be built."""
    makers = (m for name, m in model.named_modules() if name.count(".") <= 2 and hasattr(m, "config"))
    return any(word in source_of(type(module).forward) for module in makers)


def attention_configs(model: Any) -> list[Any]:
    """The distinct config objects from which attention modules read their implementation."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())
