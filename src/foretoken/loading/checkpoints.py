"""What is read of checkpoints with the libraries that read them (:mod:`foretoken.core.io.checkpoints` finds them)."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from foretoken.core.io.checkpoints import ADAPTER_CONFIG as ADAPTER_CONFIG
from foretoken.core.io.checkpoints import BUILTIN as BUILTIN
from foretoken.core.io.checkpoints import PICKLES as PICKLES
from foretoken.core.io.checkpoints import ZOO as ZOO
from foretoken.core.io.checkpoints import LoadError as LoadError
from foretoken.core.io.checkpoints import check_folder as check_folder
from foretoken.core.io.checkpoints import check_no_drafter as check_no_drafter
from foretoken.core.io.checkpoints import is_adapter as is_adapter
from foretoken.core.io.checkpoints import is_builtin as is_builtin
from foretoken.core.io.checkpoints import is_gguf as is_gguf
from foretoken.core.io.checkpoints import local_folder as local_folder
from foretoken.core.io.checkpoints import place_of as place_of
from foretoken.core.io.checkpoints import resolve as resolve


def cause_of(error: Exception) -> str:
    """What another library's error says, in one line; a package that is not there is named with how to get it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the package {error.name} (pip install {error.name})"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def file_of(folder: Path, tensor: str) -> Path:
    """The file that holds a tensor; the folder itself where none has one of that name."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as opened:
            if tensor in opened.keys():  # noqa: SIM118 (no mapping)
                return shard
    return folder
