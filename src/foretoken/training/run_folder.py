"""The folder of a training run: one run at a time, and nothing in it that is not the run's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretoken.core.io.locks import lock

RESULTS = ("README.md", "config.json", "drafter.json", "model.safetensors", "adapter_config.json", "target")
"""What a finished run writes; only a checkpoint tells that they are its own."""


@contextmanager
def run_folder(out: Path) -> Iterator[None]:
    """Inside the block this process alone trains into ``out``, which is made where it is missing.

    What a killed run left half written is removed, and so is a folder that was made and that nothing was written to.
    Raises ``ValueError`` for a file, for a folder that another run writes to, and for one that holds what no run with a
    checkpoint there has written.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out names a folder")
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY) if os.name == "posix" else None  # of no other system can folders be opened
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
    """Find that a run would write over what is no earlier part of it."""
    others = [name for name in RESULTS if (out / name).exists()]
    if others and not (out / "checkpoints").is_dir():
        raise ValueError(
            f"{out} holds {', '.join(others)} and no checkpoint to go on from: give --out a new folder, or move "
            "what is there"
        )
