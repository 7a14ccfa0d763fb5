"""Files of a model or drafter and their checksums, without loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from foretoken.core.io.checkpoints import ZOO, is_adapter, is_builtin, resolve
from foretoken.loading.adapters import read_adapter
from foretoken.registry import parse_spec, rows, split_specs

BUILT_IN = dict.fromkeys(("model", "ahead", "online", "shared_vocab", "retokenize", "cascade", "staged"), "draft")
"""Drafters that default to the built-in draft model."""
Checksums = dict[str, str]
"""SHA-256 by file name."""


def model_checksums(source: str) -> Checksums:
    """Checksums of a target, whose files must be on this machine.  An adapter includes its base model's, under
    ``base/``."""
    path = Path(resolve(source)).expanduser()
    if not path.exists():
        path = _fetched(source)
    checksums = _checksums(path)
    if path.is_dir() and is_adapter(path):
        checksums |= {f"base/{name}": digest for name, digest in model_checksums(read_adapter(path).base).items()}
    return checksums


def drafter_checksums(spec: str, target: str) -> Checksums:
    """Checksums of all files in a spec, including nested specs; empty for a drafter without files.

    A name without a path means the built-in weights of that name if the target is built in.  Raises ``ValueError`` for
    files that are not on this machine.
    """
    checksums: Checksums = {}
    for name, path in _specs_in(spec):
        if path is not None:
            checksums |= {f"{name}/{file}": digest for file, digest in model_checksums(path).items()}
        elif is_builtin(target) and (ZOO / BUILT_IN.get(name, name)).is_dir():
            checksums |= {
                f"{name}/{file}": digest for file, digest in _checksums(ZOO / BUILT_IN.get(name, name)).items()
            }
    return checksums


def _specs_in(spec: str) -> Iterator[tuple[str, str | None]]:
    """Names and paths of a spec and of specs in its options."""
    drafters = {row.name for row in rows("drafter")}
    whole = parse_spec(spec)
    yield whole.name, whole.path
    for key, value in whole.options.items():
        if Path(value).expanduser().is_file():
            yield key, value
            continue
        try:
            parts = [part for part in split_specs(value) if parse_spec(part).name in drafters]
        except ValueError:  # a value that is not a spec
            continue
        for part in parts:
            yield from _specs_in(part)


def _checksums(path: Path) -> Checksums:
    """Checksums of a file, or of a folder's files that determine its results (all files if there are no weights)."""
    if path.is_file():
        return {path.name: _sha256(path)}
    patterns = ("*.safetensors", "*.gguf", "config.json", "adapter_config.json", "drafter.json")
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    return {file.name: _sha256(file) for file in files or sorted(path.iterdir()) if file.is_file()}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fetched(name: str) -> Path:
    """The cached folder of a hub model.  Raises ``ValueError`` if it is not cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        raise ValueError(
            f"the files of {name} are not on this machine, so their checksums are unknown: fetch it or give its folder"
        ) from None
