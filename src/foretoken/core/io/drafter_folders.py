"""The kind of a folder, by its structure: a drafter, or a whole model.

A drafter may declare ``model_type: "qwen3"`` and lack embedding and output projection, so loading it as a model fails
with the name of a tensor. Its tensor names identify it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

OURS = "drafter.json"
IMPORTED = ("eagle", "eagle3", "peagle", "medusa", "mtp", "dflash", "dflash2", "dspark", "uno")
"""Methods whose drafters other projects train, in layouts that ``foretoken import`` reads."""
MEDUSA = re.compile(r"(?:medusa_head\.)?\d+\.\d+\.linear\.weight|(?:medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight")


def header_of(shard: Path) -> dict[str, Any]:
    """Tensor entries of a safetensors header (``dtype``, ``shape``, ``data_offsets``), by name."""
    with shard.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in a folder's safetensors files; damaged files are skipped."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            names.update(header_of(file))
        except (OSError, ValueError, AttributeError, MemoryError, OverflowError):
            continue  # reading the file reports its damage
    return frozenset(names)


def our_name(name: str) -> str:
    """A tensor's name without other projects' prefixes."""
    name = name.removeprefix("model.")
    ours = {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "midlayer.": "layers.0."}
    for theirs, prefix in ours.items():
        if name.startswith(theirs):
            return prefix + name.removeprefix(theirs)
    return name


def block_kind(names: Collection[str]) -> str | None:
    """Kind of block drafter with these tensors: ``dflash``, ``dflash2`` or ``dspark``; ``None`` for others."""
    keys = {our_name(name) for name in names}
    if not {"fc.weight", "hidden_norm.weight"} <= keys:
        return None
    parts = {name.split(".")[0] for name in keys}
    if "candidate_selector" in parts or any(".attention_conv." in name for name in keys):
        return "dflash2"
    return "dspark" if parts & {"markov_head", "confidence_head"} else "dflash"


def drafter_kind(folder: Path) -> str | None:
    """Kind of the drafter in a folder, ours or another project's; ``None`` without one."""
    if (folder / OURS).is_file():
        return str(_object(folder / OURS).get("method") or "unknown")
    config, names = _object(folder / "config.json"), tensor_names(folder)
    kind = config.get("speculators_model_type")
    return str(kind) if kind else _kind(config, names)


def is_whole_model(folder: Path) -> bool:
    """Whether a folder holds a model with its own embedding and no drafter."""
    embeds = any("embed" in name or "wte" in name for name in tensor_names(folder))
    return (folder / "config.json").is_file() and embeds and drafter_kind(folder) is None


def not_a_model(folder: Path) -> str | None:
    """Why a drafter folder is not a model, with its correct use, in one line; ``None`` for other folders."""
    kind = drafter_kind(folder)
    if kind is None:
        return None
    message = f"{folder} is a drafter ({kind}){_target_of(folder)}, not a model: "
    if (folder / OURS).is_file():
        if kind == "unknown":
            return f"{folder} is a drafter with a damaged {OURS}, not a model: copy the folder again"
        return f"{message}give it with --drafter {kind}:{folder}"
    if kind in IMPORTED:
        return f"{message}import it, `foretoken import MODEL {folder} --out OUT`, and give it with --drafter {kind}:OUT"
    return f"{message}drafters of this kind cannot be imported (those that can: {', '.join(IMPORTED)})"


def _kind(config: Mapping[str, Any], names: frozenset[str]) -> str | None:
    block = block_kind(names)
    if block is not None:
        return block
    if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
        return "peagle" if "mask_hidden" in names else "eagle3"
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names:
        return "eagle"
    if any(MEDUSA.fullmatch(name) for name in names):
        return "medusa"
    if any(name.startswith("mtp_layers.") for name in names):
        return "mtp"
    return None if names else _named_kind(config)


def _named_kind(config: Mapping[str, Any]) -> str | None:
    """The kind by ``config.json`` alone, for pickled or missing weights."""
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    architectures = config.get("architectures")
    name = str(architectures[0]).lower() if isinstance(architectures, list) and architectures else ""
    by_name = next((kind for kind in ("dflash2", "dflash", "dspark", "peagle", "eagle3") if kind in name), None)
    return by_name or ("dflash" if "dflash_config" in config else None)


def _target_of(folder: Path) -> str:
    """The target of a drafter, as words that follow its kind; empty if its files do not name it."""
    target, config = _object(folder / OURS).get("target"), _object(folder / "config.json")
    if isinstance(target, Mapping):
        layers, size = target.get("num_layers"), target.get("hidden_size")
    else:
        speculators = config.get("speculators_config")
        verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        name = name or config.get("base_model_name_or_path")
        if name:
            return f" for {name}"
        layers, size = config.get("num_target_layers"), config.get("target_hidden_size") or config.get("hidden_size")
    facts = [f"{layers} layers"] if layers else []
    facts += [f"hidden size {size}"] if size else []
    return f" for a model of {' and '.join(facts)}" if facts else ""


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
