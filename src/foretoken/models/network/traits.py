"""What the forward of a Transformers model depends on: its masks, its ends of text, where it looks its attention up."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from foretoken.models.base import CapabilityError
from foretoken.models.cache.masks import LayerMask

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What forwards of Transformers call their cache, in their arguments and in their outputs: ``cache`` since 5.24."""


def cache_name(module: Any) -> str | None:
    """How the forward of a model or a decoder layer calls its cache; ``None`` when it takes none.

    A forward that hands ``**kwargs`` on (a subclass, a wrapper like PEFT's) calls it as what it hands them to.
    """
    for inner in module.modules():
        parameters = parameters_of(inner)
        argument = next((name for name in CACHE_NAMES if name in parameters), None)
        if argument is not None or all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            return argument
    return None


def parameters_of(module: Any) -> Mapping[str, inspect.Parameter]:
    """What the forward of a module takes."""
    return inspect.signature(inspect.unwrap(type(module).forward)).parameters


@lru_cache(maxsize=1024)
def source_of(function: Any) -> str:
    """The text of a function; empty where there is none.  Kept: finding it takes Python's tokenizer milliseconds."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def context_length_of(config: Any) -> int:
    """Most tokens of a text; where the configuration names none (or -1, as XLNet's does), more than anybody has."""
    length = int(getattr(config, "max_position_embeddings", 0) or 0)
    return length if length > 0 else 2**20


def cache_argument(module: Any) -> str:
    """:func:`cache_name` of a module that must take a cache.  Raises ``CapabilityError`` where it takes none."""
    name = cache_name(module)
    if name is None:
        raise CapabilityError(f"the forward of {type(module).__name__} takes no cache")
    return name


def eos_ids(model: Any) -> frozenset[int]:
    """All end-of-sequence ids that the generation config, else the config, names."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, list | tuple) else [value])
    return frozenset()


def layer_masks(model: Any) -> dict[str, LayerMask]:
    """Which masks the model's forward wants: by layer type where it takes a dictionary, else one under ``""``."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not _makes_masks_by(model, "causal_mask_mapping"):
        # Without layer types a model either slides everywhere (mistral, phi3) or nowhere.
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
    """Whether a forward of the model's stack of wrappers down to the decoder, which could build masks, has a word."""
    makers = (m for name, m in model.named_modules() if name.count(".") <= 2 and hasattr(m, "config"))
    return any(word in source_of(type(module).forward) for module in makers)


def attention_configs(model: Any) -> list[Any]:
    """The distinct config objects that attention modules read their implementation from."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())
