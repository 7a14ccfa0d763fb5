"""Files and folders that appear whole or not at all, and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A draft beside ``path`` that takes its place when the block ends well, and is removed otherwise.

    The block writes a file or a folder there.  Two processes may write the same path: the later one wins.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield draft
        if draft.is_dir() and path.exists():
            shutil.rmtree(path)  # a folder is not replaced by another one
        draft.replace(path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    finally:
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: str | Path, content: Any) -> Path:
    """Write indented JSON, whole or not at all.

    Raises:
        OSError: as :func:`write_text`.
    """
    return write_text(path, json.dumps(content, indent=1) + "\n")


def save_model(network: Any, tokenizer: Any | None, folder: Path) -> None:
    """Write a network and its tokenizer in Hugging Face's layout; every file appears whole or not at all.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()  # of one file, in the middle of ours
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / ".tmp-model"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        network.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        for file in sorted(draft.iterdir()):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def checksum(data: bytes | str, size: int = 8) -> str:
    """Tells data from other data: ``size`` bytes as hexadecimal digits."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=size).hexdigest()
