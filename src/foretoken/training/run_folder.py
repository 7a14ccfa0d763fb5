"""The folder of a training run: one run at a time, and only files of that run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretoken.core.io.locks import lock


@contextmanager
def run_folder(out: Path) -> Iterator[None]:
    """Lock ``out`` for this process while the block runs; the folder is created if missing.

    Partial files of a killed run are removed, and so is a new folder that stays empty.  Raises ``ValueError`` for a
    file, for a folder in use by another run, and for one with results but no checkpoint.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out names a folder")
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY) if os.name == "posix" else None  # other systems cannot open folders
    try:
        if descriptor is not None:
            lock(descriptor, out, "folder")
        _check_own(out)
        for draft in (*out.glob(".tmp-[0-9]*-*"), *out.glob(".tmp-model")):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
        yield
    finally:
        if is_new:
            with suppress(OSError):  # not empty
                out.rmdir()
        if descriptor is not None:
            os.close(descriptor)


def _check_own(out: Path) -> None:
    """Raise ``ValueError`` if the run would overwrite results that are not its own."""
    # Files of a finished run; only a checkpoint shows that they belong to it.
    results = ("README.md", "config.json", "drafter.json", "model.safetensors", "adapter_config.json", "target")
    others = [name for name in results if (out / name).exists()]
    if others and not (out / "checkpoints").is_dir():
        raise ValueError(
            f"{out} holds {', '.join(others)} and no checkpoint to resume from: give --out a new folder, or move "
            "its files"
        )
