"""Device and mode of models supplied by callers."""

from __future__ import annotations

from typing import Any

import torch


def decoding(model: Any) -> None:
    """Switch dropout off if someone called ``train()`` after the model was wrapped."""
    if model.training:
        model.eval()


def device_of(model: Any) -> torch.device:
    """Device of a model's inputs: that of its weights, or accelerate's execution device for offloaded ones."""
    device: torch.device = model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules()) if device.type == "meta" else ()
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((hooked for hooked in devices if hooked is not None), device))


def is_offloaded(model: Any) -> bool:
    """Whether some weights are not in memory: accelerate loads them when their layer runs, and drops them again."""
    return any(weight.device.type == "meta" for weight in model.parameters())


def is_split(model: Any) -> bool:
    """Whether its layers run on several devices, or accelerate moves weights and inputs (``device_map``)."""
    devices = {weight.device for weight in model.parameters()}
    return len(devices) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules())


def has_no_weights(model: Any) -> bool:
    """Whether a model was created without weights, and nothing will load them when it runs."""
    return is_offloaded(model) and not any(hasattr(module, "_hf_hook") for module in model.modules())
