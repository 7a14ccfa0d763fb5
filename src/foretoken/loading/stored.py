"""Storage of a checkpoint's weights: quantised weights that nothing dequantises are refused, not read as plain numbers.

Transformers skips an unknown ``quantization_config``, reads 8-bit weights as plain numbers, and ignores scales for
which the model has no parameter.  Each gives a model that runs and writes nonsense.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from foretoken.core.io import hub_ids
from foretoken.core.io.checkpoints import LoadError, header_of, shards_of
from foretoken.core.io.hub_ids import expanded

REMEDY = "use the full checkpoint (bfloat16 or float16), a GGUF file of it, or one with a quantization_config"
NARROW = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2", "I8", "U8"}
"""Safetensors' names of types of 8 bits and fewer; ``BOOL`` is for masks."""
SCALES = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_global_scale")
"""Scales of activations and of the KV cache: weights keep their meaning without them."""
TABLES = ("bias", "masked_bias", "inv_freq", "cos_cached", "sin_cached")
"""Masks and tables of older files, which Transformers computes; biases of layers are checked before."""
BESIDE = ("mtp", "vision", "visual", "audio", "image", "multi_modal")
"""Parts of names of drafters and encoders beside a text model."""


def quantisation_of(path: str) -> Mapping[str, Any]:
    """The ``quantization_config`` of a folder or a hub id, or of its text model; else empty."""
    from transformers import PreTrainedConfig

    try:
        config: Any = PreTrainedConfig.get_config_dict(path)[0]
    except Exception:  # loading reports a faulty configuration
        return {}
    inner = config.get("text_config")
    quantisation = config.get("quantization_config") or (
        isinstance(inner, Mapping) and inner.get("quantization_config")
    )
    return quantisation if isinstance(quantisation, Mapping) else {}


def check_method(quantisation: Any, source: str) -> None:
    """Refuse a ``quantization_config`` whose method Transformers ignores."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    settings = (
        quantisation if isinstance(quantisation, Mapping) else vars(quantisation) if quantisation is not None else {}
    )
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method") or ""))
    is_read = settings.get("load_in_8bit") or settings.get("load_in_4bit") or method in AUTO_QUANTIZATION_CONFIG_MAPPING
    if method and not is_read:
        raise LoadError(
            f"{source} is quantised with {method}, which Transformers {transformers.__version__} does not read: "
            "use the full checkpoint, a GGUF file of it, or one that is quantised with another method"
        )


def check_storage(network: Any, path: str, unread: Iterable[str]) -> None:
    """Check the files that a model was loaded from.

    Args:
        unread: names of tensors in the checkpoint that the model lacks.
    """
    folder = expanded(path)
    files = shards_of(folder if folder.is_dir() else Path(hub_ids.cached_folder(path) or folder))
    for file in files:
        _check_narrow(file)
    for name in sorted(name for name in unread if _belongs(network, name)):
        if any(_holds(file, name) for file in files):
            owner, _, leaf = name.rpartition(".")
            remedy = "copy it from the same checkpoint" if leaf == "bias" else REMEDY
            raise LoadError(
                f"{path} has {name}, which {owner} in the model of config.json does not have, and without it the "
                f"output would differ: {remedy}"
            )


def check_unread(network: nn.Module, label: str, unread: Iterable[str]) -> None:
    """Refuse a checkpoint with weights in layers of the model that the model lacks; warn in one line about others of
    the same network, which may be left out on purpose (the last layers).

    Args:
        unread: names of tensors in the checkpoint that the model lacks.
    """
    names = sorted(unread)
    drafters = tuple(f"{name.split('.eh_proj.')[0]}." for name in names if ".eh_proj." in name)
    left_out: dict[str, list[str]] = {"layer": [], "network": []}
    for name in names:
        if name.startswith(drafters) or name.endswith((*SCALES, *TABLES)) or any(part in name for part in BESIDE):
            continue
        place = _place(network, name)
        if place:
            left_out[place if name.endswith(".weight") else "network"].append(name)
    if left_out["layer"]:
        raise LoadError(
            f"{label} has a config.json that does not fit its weights: {len(left_out['layer'])} of them (first: "
            f"{left_out['layer'][0]}) are not in the model, and without them the output would differ; copy both from "
            "the same checkpoint"
        )
    if left_out["network"]:
        logging.getLogger("foretoken").warning(
            "%s has %d weights that the model of config.json does not have (first: %s): they are left out",
            label,
            len(left_out["network"]),
            left_out["network"][0],
        )


def _place(network: Any, name: str) -> str:
    """Where a tensor would be: in a ``layer`` that the network has, elsewhere in its base ``network``, or outside
    (empty).  Names of a checkpoint may omit the base's."""
    for prefix in ("", f"{network.base_model_prefix}."):
        module, depth, in_layer = network, 0, False
        for part in f"{prefix}{name}".split(".")[:-1]:
            child = dict(module.named_children()).get(part)
            if child is None:
                break
            in_layer |= isinstance(module, nn.ModuleList)
            module, depth = child, depth + 1
        if depth > bool(prefix):
            return "layer" if in_layer else "network"
    return ""


def _check_narrow(file: Path) -> None:
    """Refuse a weight of 8 bits or fewer in a checkpoint without a ``quantization_config``."""
    for name, entry in header_of(file).items():
        if entry["dtype"] in NARROW and not name.endswith("bias"):  # masks of older models have this name
            raise LoadError(
                f"{name} in {file} is stored as {entry['dtype']}, and config.json has no quantization_config to decode "
                f"it: {REMEDY}"
            )


def _belongs(network: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a layer that has weights in the model."""
    owner, _, leaf = name.rpartition(".")
    if leaf in SCALES:
        return False
    try:
        module = network.get_submodule(owner)
    except AttributeError:
        return False
    return bool(owner) and getattr(module, "weight", None) is not None


def _holds(file: Path, name: str) -> bool:
    """Whether a file has a tensor of this name, up to a prefix, that is not all zeros like unused biases."""
    with safe_open(file, "pt") as opened:
        stored = next((key for key in opened.keys() if _same(key, name)), None)  # noqa: SIM118 (no mapping)
        return stored is not None and bool(torch.count_nonzero(opened.get_tensor(stored)))


def _same(stored: str, name: str) -> bool:
    """Whether two names are equal up to the prefix that a model of another class has."""
    return stored == name or stored.endswith(f".{name}") or name.endswith(f".{stored}")
