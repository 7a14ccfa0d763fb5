"""Model objects passed instead of a path: wrappers are removed, and anything that is not a model is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretoken.core import with_article
from foretoken.core.io.checkpoints import LoadError
from foretoken.loading.networks import parse_device, parse_dtype
from foretoken.loading.stored import check_method
from foretoken.models.base import LanguageModel
from foretoken.models.network.placement import device_of, has_no_weights

EXPECTED = "give the path or hub id of a model, 'builtin', or a Transformers model"
WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Attributes in which ``torch.compile`` and the wrappers of multi-device training keep the model, by class name.
Decoding runs its own forwards, so anything such a wrapper adds to the public one has no effect."""


def unwrapped(source: Any) -> Any:
    """A source without wrappers that leave its model's computation unchanged."""
    while isinstance(source, nn.Module) and type(source).__name__ in WRAPPERS:
        source = getattr(source, WRAPPERS[type(source).__name__])
    return source


def check_handed_in(source: Any) -> None:
    """Raise ``LoadError`` for a source that cannot be used as a model."""
    if isinstance(source, str | Path):
        if not str(source).strip():
            raise LoadError(f"the name of the model is empty: {EXPECTED}")
        return
    if isinstance(source, LanguageModel):
        return
    if not isinstance(source, nn.Module) or isinstance(source, type):
        raise LoadError(_kind_of(source))
    name = type(source).__name__
    if name == "FullyShardedDataParallel":
        raise LoadError(
            f"{with_article(name)} holds only a part of every weight in this process: save it, and load its path"
        )
    if not hasattr(getattr(source, "config", None), "get_text_config"):
        raise LoadError(f"{with_article(name)} is not a Transformers model (it has no configuration): {EXPECTED}")
    network: Any = source
    if getattr(network.config, "is_encoder_decoder", False) and network.get_output_embeddings() is None:
        raise LoadError(f"{name} has no vocabulary projection: give the model for conditional generation")
    check_method(getattr(source.config, "quantization_config", None), name)
    shared = next((type(weight).__name__ for weight in source.parameters() if hasattr(weight, "device_mesh")), "")
    if shared:
        raise LoadError(
            f"{with_article(name)} is sharded over several processes ({shared}): save it, and "
            "load its path, with tensor_parallel=N to split it here"
        )
    _check_adapters(source, name)
    if has_no_weights(source):
        raise LoadError(f"{name} has no weights (they are on the device meta): load it with from_pretrained")


def check_dtype_and_device(source: Any, dtype: str | torch.dtype | None, device: str | torch.device | None) -> None:
    """Raise ``ValueError`` for a dtype or device other than the model's own; ``"auto"`` accepts any device."""
    requested_dtype, requested_device = parse_dtype(dtype), parse_device(device)
    model_dtype: Any = getattr(source, "dtype", None)
    if None not in (requested_dtype, model_dtype) and requested_dtype != model_dtype:
        as_it_is = str(model_dtype).removeprefix("torch.")
        raise ValueError(
            f"a model passed as an object keeps its dtype, {as_it_is}: call model.to({requested_dtype}) first"
        )
    model_device: Any = device_of(source) if isinstance(source, nn.Module) else getattr(source, "device", None)
    if str(device) == "auto" or requested_device is None or model_device is None:
        return
    if requested_device.type != model_device.type or requested_device.index not in (None, model_device.index):
        raise ValueError(
            f"a model passed as an object keeps its device, {model_device}: call model.to({str(requested_device)!r}) "
            "first"
        )


def _kind_of(source: Any) -> str:
    kind = with_article(type(source).__name__)
    if source is None:
        return f"no model was given (None): {EXPECTED}"
    if isinstance(source, type):
        return f"{source.__name__} is a class: give {source.__name__}.from_pretrained(PATH), or the path itself"
    if isinstance(getattr(source, "model", None), nn.Module):
        return f"{kind} is not a model, but has one: give its .model, with tokenizer=(its .tokenizer)"
    if hasattr(source, "convert_ids_to_tokens"):
        return f"{kind} is a tokenizer: give it as tokenizer=..., and as the model the path it was loaded from"
    if hasattr(source, "get_text_config"):
        return f"{kind} has no weights: give the model, or the path that the configuration was loaded from"
    if isinstance(source, Mapping):
        return f"{kind} of weights or settings is not a model: give a model that has them, or save it and give its path"
    return f"{kind} is not a model: {EXPECTED}"


def _check_adapters(model: nn.Module, name: str) -> None:
    """Refuse an active PEFT adapter that is not inside the layers of the model that it wraps."""
    for settings in _active(model):
        kind = getattr(settings, "peft_type", "prompt learning")
        kind = str(getattr(kind, "value", kind))
        if getattr(settings, "is_prompt_learning", False):
            raise LoadError(
                f"{name} prepends learned rows to every sequence ({kind}), which is not supported: merge a LoRA "
                "instead, or give the model without its adapter"
            )
        if getattr(settings, "is_adaption_prompt", False) or kind == "ADAPTION_PROMPT":
            raise LoadError(
                f"{name} wraps a model whose attention has learned rows ({kind}): give its get_base_model()"
            )


def _active(model: nn.Module) -> list[Any]:
    """Settings of the adapters that a PEFT wrapper has switched on.

    Adapters switched on within a model's own layers (reported by Transformers' ``active_adapters()``) do not matter:
    they run with the layers.
    """
    settings = getattr(model, "peft_config", None)
    active = getattr(model, "active_adapter", None) or getattr(model, "_active_adapter", None)
    if not isinstance(settings, Mapping) or active is None or callable(active):
        return []
    return [settings[name] for name in ([active] if isinstance(active, str) else active) if name in settings]
