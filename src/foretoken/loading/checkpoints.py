"""Where checkpoints are, and whether a folder holds a whole one: found before Transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foretoken.io import hub_ids

BUILTIN = "builtin"
ZOO = Path(__file__).parent.parent / "zoo"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class LoadError(ValueError):
    """A model or tokenizer could not be loaded; the message says what to do."""


def cause_of(error: Exception) -> str:
    """What another library's error says, in one line; a package that is not there is named with how to get it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the package {error.name} (pip install {error.name})"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def place_of(path: str) -> str:
    """Where Transformers reads a folder or a hub id from (:func:`foretoken.io.hub_ids.place_of`).

    Raises:
        LoadError: neither is there, and the hub does not answer.
    """
    try:
        return hub_ids.place_of(path)
    except hub_ids.UnreachableError as error:
        raise LoadError(str(error)) from None


def resolve(name: str | Path, role: str = "target") -> str:
    """``builtin`` -> the zoo's folder, a local folder -> itself, anything else -> a hub id, unchanged.

    ``builtin:NAME`` is a low-rank update of the built-in target, or another whole model with its tokenizer.

    Raises:
        LoadError: an unknown NAME; lists the valid ones.
    """
    if str(name) == BUILTIN:
        return str(ZOO / role)
    if not is_builtin(name):
        return str(name)
    others = {f"{BUILTIN}:{folder.name}": folder for folder in sorted(ZOO.glob("*")) if _is_other(folder)}
    if str(name) not in others:
        raise LoadError(f"unknown built-in model {str(name)!r}: choose one of {', '.join([BUILTIN, *others])}")
    return str(others[str(name)])


def _is_other(folder: Path) -> bool:
    """Whether a folder of the zoo is a model beside the built-in target and its draft model."""
    whole = (folder / "config.json").exists() and folder.name not in ("target", "draft")
    return whole or is_adapter(folder)


def is_builtin(source: object) -> bool:
    """Whether a source is the built-in target, an update of it or a model beside it: all have the same tokenizer."""
    return str(source).split(":")[0] == BUILTIN


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an update of a model and no whole one."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def check_folder(folder: Path) -> None:
    """Look at a local checkpoint before Transformers does.

    Raises:
        LoadError: no config, only pickled weights, missing or half-written safetensors files.
    """
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder with a model (config.json and *.safetensors)")
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} has no config.json: point to a Hugging Face model folder")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLES]
        if pickles:
            raise LoadError(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code when loaded: "
                "convert them with save_pretrained(safe_serialization=True)"
            )
        raise LoadError(f"{folder} holds no *.safetensors weights: the checkpoint is incomplete")
    missing = _indexed_shards(folder / "model.safetensors.index.json") - {p.name for p in shards}
    if missing:
        raise LoadError(f"{folder} lacks {sorted(missing)[0]}: copy the missing shards and try again")
    for shard in shards:
        _check_shard(shard)


def file_of(folder: Path, tensor: str) -> Path:
    """The file that holds a tensor; the folder itself where none has one of that name."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as opened:
            if tensor in opened.keys():  # noqa: SIM118 (no mapping)
                return shard
    return folder


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files that a folder's weights are read from: those of the index, the one file, else all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(_indexed_shards(index))]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def header_of(shard: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors (``dtype``, ``shape``, ``data_offsets``), by their names."""
    with shard.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _indexed_shards(index: Path) -> set[str]:
    """File names that a shard index lists; none when there is no index."""
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{index} is damaged or half-written: copy it again") from None


def _check_shard(shard: Path) -> None:
    """A safetensors file says in its header how long it must be."""
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
        end = 8 + header_size + max(entry["data_offsets"][1] for entry in header_of(shard).values())
    except (ValueError, KeyError, TypeError, MemoryError, OverflowError):
        raise LoadError(f"{shard} is no safetensors file: it is damaged or half-written, copy it again") from None
    if size < end:
        raise LoadError(f"{shard} has {size} of {end} bytes: it was half-written, copy it again")
