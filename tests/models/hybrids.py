"""Tiny random models with recurrent layers, and a float64 in which their fixed float32 parts run too."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from checkpoints import new_model

GDN = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHORT = {**GDN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 2}

# model_type: config values on top of checkpoints.COMMON
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": GDN,
    "qwen3_next": {**SHORT, **MOE},
    "qwen3_5_moe_text": {**SHORT, **MOE},
    "olmo_hybrid": {**SHORT, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 4, "bos_token_id": None},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "falcon_mamba": {"state_size": 8, "num_hidden_layers": 2},
    "mamba2": {
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "num_hidden_layers": 2,
    },
    "bamba": {**MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 96, "head_dim": 12},
    "granitemoehybrid": {
        **MAMBA2,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 12,
    },
    "zamba2": {
        "num_hidden_layers": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_ngroups": 2,
        "n_mamba_heads": 6,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
    },
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "expert_layer_period": 99,
        "expert_layer_offset": 5,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


def hybrid(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random Transformers model whose experts run one by one (their grouped product knows no float64)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = new_model(name, seed, **{**HYBRIDS[name], **changes}).to(dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def unclamped(model: Any) -> Any:
    """The same model without bounds of its time step, which its rule for single tokens forgets (nemotron_h, zamba2)."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


class _Double:
    """The ``torch`` of a modeling file, with float64 under the name of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_IN_FLOAT64: list[ModuleType] = []
"""Modeling files that run in float64 now, one for each block of :func:`whole_float64`."""


@contextmanager
def whole_float64(model: Any) -> Iterator[None]:
    """Recurrences are written in float32, whatever the model's dtype: let them run in float64 for a while.

    Blocks may end in any order, as fixtures of several scopes do: the last one puts everything back.
    """
    module = sys.modules[type(model).__module__]
    _IN_FLOAT64.append(module)
    module.torch = _Double()  # type: ignore[attr-defined]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        _IN_FLOAT64.remove(module)
        if module not in _IN_FLOAT64:
            module.torch = torch  # type: ignore[attr-defined]
        if not _IN_FLOAT64:
            del torch.Tensor.float  # the inherited method
