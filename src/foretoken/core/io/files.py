"""Checksums, and files and folders that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretoken.core.io import cache_folder as cache_folder
from foretoken.core.io.quiet import NO_BARS
from foretoken.core.io.streams import is_stream

FRESH_S = 60
"""Age below which a temporary file may still be written."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Path of a temporary file or folder that replaces ``path`` if the block succeeds; otherwise it is removed.

    If two processes write the same path, the later one wins. A device, pipe or open file is written to instead. Raises
    ``OSError`` if it cannot be written.
    """
    path = Path(path)
    streamed = is_stream(path)
    folder = Path(tempfile.mkdtemp()) if streamed else path.parent
    draft = folder / f".tmp-{os.getpid()}-{path.name}"
    _remove(draft)
    try:
        yield draft
        if streamed:
            with draft.open("rb") as whole, path.open("ab") as stream:
                shutil.copyfileobj(whole, stream)
        else:
            _put(draft, path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    except OSError as error:
        if error.errno and error.filename is None:  # a write to a full disk reports no file name
            error.filename = str(path)
        raise
    finally:
        _remove(folder if streamed else draft)


def remove_abandoned(*folders: Path) -> None:
    """Remove the temporary files that :func:`replacing` could not, because its process was killed.

    Numbers of processes mean nothing on another machine, which may write to a shared folder, so files that were written
    within the last minute stay.
    """
    for draft in (draft for folder in folders for draft in folder.glob(".tmp-*")):
        number = re.match(r"\.tmp-(\d+)-", draft.name)
        try:
            if number and not _runs(int(number[1])) and time.time() - draft.stat().st_mtime > FRESH_S:
                _remove(draft)
        except OSError:  # another run removed it, or may
            continue


def _runs(process: int) -> bool:
    """Whether a process of this number exists; on Windows, where asking would end it, yes."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _put(draft: Path, path: Path) -> None:
    """Rename. An old folder, which cannot be replaced, is moved aside first and restored on failure."""
    aside = draft.with_name(f"{draft.name}-old")
    if draft.is_dir() and path.exists():
        path.rename(aside)
    try:
        draft.replace(path)
    except BaseException:
        if aside.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a file, whole or not at all. Raises ``OSError`` as :func:`replacing` does."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: str | Path, content: Any) -> Path:
    """Write indented JSON, whole or not at all; creates the parent folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return write_text(path, json.dumps(content, indent=1) + "\n")


def save_model(network: Any, tokenizer: Any | None, folder: Path) -> None:
    """Write a network and its tokenizer in Hugging Face's layout; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / ".tmp-model"
    _remove(draft)
    try:
        with NO_BARS.changed():  # of one file, among ours
            network.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        for file in sorted(draft.iterdir()):
            _put(file, folder / file.name)  # several chat templates are a folder
    finally:
        _remove(draft)


def save_described(folder: Path, weights: tuple[str, dict[str, Any]], described: tuple[str, Any]) -> None:
    """Write tensors and a JSON file, each under its name; both appear whole or not at all."""
    from safetensors.torch import save_file

    (name, tensors), (card, content) = weights, described
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / card) as text, replacing(folder / name) as draft:  # renamed first
        save_file(tensors, draft, {"format": "pt"})
        text.write_text(json.dumps(content, indent=1), encoding="utf-8")
        shutil.copymode(text, draft)  # safetensors makes files readable for the owner only


def files_checksum(files: Iterable[Path]) -> str:
    """Checksum of the contents of files, in this order."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


def checksum(data: bytes | str, size: int = 8) -> str:
    """Checksum of data: ``size`` bytes as hexadecimal digits."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=size).hexdigest()
