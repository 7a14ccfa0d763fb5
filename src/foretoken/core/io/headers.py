"""What safetensors files say of their tensors, read without any of the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def header_of(shard: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors (``dtype``, ``shape``, ``data_offsets``), by their names."""
    with shard.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in a folder's safetensors files; those of a damaged file are left out."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            names.update(header_of(file))
        except (OSError, ValueError, AttributeError, MemoryError, OverflowError):
            continue  # who reads the file says what is wrong with it
    return frozenset(names)
