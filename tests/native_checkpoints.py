"""Tiny random checkpoints that hold a multi-token prediction head, as their makers publish them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.models.forward.heads.mtp import NEXTN, QWEN, TargetLayerModule

VOCAB, SIZE = 61, 32
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": RECURRENT,
    "qwen3_next": {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "glm4_moe": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def save_target(folder: Path, family: str = "glm4_moe", **changes: Any) -> Any:
    """A random target; returns the network that was saved."""
    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    )
    network.save_pretrained(folder)
    return network.eval()


def random_module(network: Any, seed: int = 0, scale: float = 0.3) -> TargetLayerModule:
    """A module with random weights."""
    module = TargetLayerModule(network, experts=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return module.eval()


def published(family: str, number: int, num_layers: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors by the names of its checkpoint, experts one by one."""
    qwen = family.startswith("qwen")
    names = {module_name: published_name for published_name, module_name in (QWEN if qwen else NEXTN).items()}
    prefix = "" if qwen else f"model.layers.{num_layers + number}."
    named = {}
    for name, tensor in single_experts(tensors).items():
        if name in names:
            named[prefix + names[name]] = tensor
        else:
            place = f"mtp.layers.{number}" if qwen else prefix.removesuffix(".")
            named[f"{place}.{name.removeprefix('layer.')}"] = tensor
    return named


def single_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts taken apart."""
    singles: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                singles |= {f"{place}.{number}.gate_proj.weight": gate, f"{place}.{number}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            singles |= {f"{place}.{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            singles[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in singles.items()}


def add_tensors(folder: Path, tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> None:
    """Put tensors beside those of the target, or into a file of their own."""
    place = folder / file
    save_file({**(load_file(place) if place.exists() else {}), **tensors}, place, {"format": "pt"})


def save_family(folder: Path, family: str, count: int = 1, **changes: Any) -> tuple[Any, list[TargetLayerModule]]:
    """A target on disk with ``count`` modules in its file; the network, and the modules."""
    network = save_target(folder, family, **changes)
    modules = [random_module(network, seed) for seed in range(count)]
    layers = network.config.num_hidden_layers
    for number, module in enumerate(modules):
        if number and family.startswith("qwen"):  # what Qwen's modules share
            shared = {name: tensor for name, tensor in modules[0].state_dict().items() if "layer." not in name}
            module.load_state_dict(shared, strict=False)
        add_tensors(folder, published(family, number, layers, module.state_dict()))
    return network, modules


def drop(folder: Path, names: Sequence[str], config: Mapping[str, Any] | None = None) -> None:
    """Take tensors that start with one of ``names`` out of a checkpoint, and change its configuration."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(tuple(names))}
    save_file(kept, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **(config or {})}))
