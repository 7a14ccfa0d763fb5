"""LoRA adapters on disk, in the layout of the PEFT library: two files that name a base model.

``adapter_config.json`` holds r, lora_alpha, target_modules and the base; ``adapter_model.safetensors`` holds
``base_model.model.<layer>.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r] for every updated layer.  Loading
merges the update: W + lora_alpha / r * B A.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.core.io.checkpoints import ADAPTER_CONFIG, LoadError, is_adapter, resolve
from foretoken.core.io.files import save_described
from foretoken.core.io.hub_ids import expanded
from foretoken.models.checks.finite import check_finite
from foretoken.models.linear.packing import is_plain
from foretoken.models.network.low_rank import merged

WEIGHTS = "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
VARIANTS = (
    "use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication",
    "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Settings of PEFT that change what the tensors mean; all of them are off in a plain LoRA."""


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of ``adapter_config.json`` that are used.

    Attributes:
        base: the model to update: ``builtin``, a folder or a hub id.
        rank: rows of every A.
        scale: factor of B A.
        modules: endings of the names of the updated layers; empty when the file does not list them.
    """

    base: str
    rank: int
    scale: float
    modules: tuple[str, ...]


def read_adapter(folder: Path) -> AdapterConfig:
    """The settings of an adapter.  Raises ``LoadError`` if they are damaged or do not describe a plain LoRA of a whole
    model."""
    file = folder / ADAPTER_CONFIG
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
        if kind == "LORA":
            rank, alpha = float(settings["r"]), float(settings["lora_alpha"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise LoadError(f"{file} is damaged or half-written: copy it again") from None
    if kind in ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT"):
        raise LoadError(
            f"{file} is an adapter of the type {kind!r}, which adds learned rows to every sequence and cannot be "
            f"merged: load its base model, {base or 'which it does not name'}, or one with a LORA"
        )
    if kind != "LORA":
        raise LoadError(f"{file} is an adapter of the type {kind!r}, and only LORA can be merged: merge it with PEFT")
    if not (rank >= 1 and rank.is_integer() and math.isfinite(alpha)):
        raise LoadError(
            f"{file} has r = {rank:g} and lora_alpha = {alpha:g}: r is a whole number from 1, both are finite"
        )
    if variants := variants_of(settings):
        raise LoadError(f"{file} uses {variants}, and only a plain LORA can be merged: merge it with PEFT")
    if not base:
        raise LoadError(f"{file} names no base model: write its folder or hub id to base_model_name_or_path")
    if is_adapter(expanded(resolve(base))):
        raise LoadError(f"the base model {base} of {folder} is an adapter itself: merge that one first")
    listed = settings.get("target_modules")
    chosen = settings.get("layers_to_transform") is not None or bool(settings.get("exclude_modules"))
    modules = tuple(map(str, listed)) if isinstance(listed, list) and not chosen else ()
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return AdapterConfig(str(base), int(rank), scale, modules)


def variants_of(settings: Mapping[str, Any]) -> str:
    """The settings of an adapter that a plain LoRA does not have, joined by commas."""
    # Other initialisations ("pissa", "olora") change the base model too.
    plain_values = {
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian", "orthogonal"),
        "use_rslora": (False, True),
    }
    variants = [name for name in VARIANTS if settings.get(name)]
    variants += [name for name, plain in plain_values.items() if settings.get(name) not in (None, *plain)]
    return ", ".join(variants)


@torch.no_grad()
def merge_adapter(network: Any, folder: Path, config: AdapterConfig) -> None:
    """Merge a stored adapter into the weights of its base model.  Raises ``LoadError`` if it does not fit."""
    factors = _read_factors(folder / WEIGHTS)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    embedding = network.get_input_embeddings().weight
    for name, pair in sorted(factors.items()):
        if name not in layers:
            raise LoadError(f"{folder} updates {name}, which {config.base} does not have: it is for another model")
        if not is_plain(layers[name]):
            raise LoadError(f"{folder} updates {config.base}, whose weights are quantised: use the full model as base")
        weight = layers[name].weight
        if weight is embedding:
            raise LoadError(
                f"{folder} updates {name}, whose weight is also the input embedding of {config.base}: that would "
                "change too; as base, save that model with tie_word_embeddings=false and a weight for each"
            )
        a, b = pair["A"].to(weight.device), pair["B"].to(weight.device)
        if a.ndim == 2 and len(a) != config.rank:
            raise LoadError(
                f"{folder} updates {name} with {len(a)} rows of lora_A, and {ADAPTER_CONFIG} says r = {config.rank}: "
                "copy both files from the same adapter"
            )
        if a.ndim != 2 or b.shape != (len(weight), len(a)) or a.shape[1] != weight.shape[1]:
            raise LoadError(
                f"{folder} updates {name} with {list(b.shape)} times {list(a.shape)}, and that layer of {config.base} "
                f"is {list(weight.shape)}: it is for another model"
            )
        weight.copy_(merged(weight, a, b, config.scale))
    for name in sorted(layers.keys() - factors.keys()):
        if name.endswith(tuple(f".{ending}" for ending in config.modules)):
            raise LoadError(f"{folder / WEIGHTS} lacks the update of {name}: the adapter is incomplete")


def _read_factors(file: Path) -> dict[str, dict[str, Tensor]]:
    """A and B by layer name."""
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        raise LoadError(f"{file} is missing: the adapter is incomplete, copy its folder again") from None
    except SafetensorError:
        raise LoadError(f"{file} is not a safetensors file: it is damaged or half-written, copy it again") from None
    check_finite(tensors.items(), file)
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            raise LoadError(f"{file} holds {key}, which is not part of a plain LORA: merge it with PEFT")
        factors.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in factors.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise LoadError(f"{file} lacks base_model.model.{name}.lora_{missing}.weight: the adapter is incomplete")
    if not factors:
        raise LoadError(f"{file} holds no tensors: the adapter is incomplete")
    return factors


def save_adapter(folder: Path, factors: Mapping[str, tuple[Tensor, Tensor]], base: str, dtype: torch.dtype) -> None:
    """Write an adapter; every file appears whole or not at all.

    Args:
        factors: A [r, in] and B [out, r] by layer name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, pair in factors.items():
        for letter, factor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor.to(dtype).contiguous().cpu()
    rank = len(next(iter(factors.values()))[0])
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in factors}),
        "task_type": "CAUSAL_LM",
    }
    save_described(folder, (WEIGHTS, tensors), (ADAPTER_CONFIG, config))
