"""Files of a model or drafter and their checksums, without loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from foretoken.core.io import named_models
from foretoken.core.io.checkpoints import BUILTIN, is_adapter, is_builtin, resolve
from foretoken.core.io.hub_ids import expanded
from foretoken.core.io.named_models import named_model
from foretoken.loading.adapters import read_adapter
from foretoken.loading.drafters import DEFAULT_GROUP, drafter_folder, has_drafter
from foretoken.registry import Row, parse_spec, rows, split_specs

Checksums = dict[str, str]
"""SHA-256 by file name."""


def model_checksums(source: str, role: str = "target") -> Checksums:
    """Checksums of a model, whose files must be on this machine.  An adapter includes its base model's, under
    ``base/``.  ``builtin`` is the built-in target, or with the role ``draft`` its draft model."""
    path = expanded(resolve(source, role))
    if not path.exists():
        path = _fetched(source)
    checksums = _checksums(path)
    if path.is_dir() and is_adapter(path):
        checksums |= {f"base/{name}": digest for name, digest in model_checksums(read_adapter(path).base).items()}
    return checksums


def drafter_checksums(spec: str, target: str) -> Checksums:
    """Checksums of all files in a spec, including nested specs; empty for a drafter without files of its own.

    A name without a path means the weights that the library ships for the target, as when it is loaded.  Raises
    ``ValueError`` for files that are not on this machine.
    """
    source = _shipped_model(target)
    checksums: Checksums = {}
    for name, path in _specs_in(spec, source):
        own = _own_checksums(name, path, source)
        folder, number = name, 1
        while any(checksums.get(f"{folder}/{file}", digest) != digest for file, digest in own.items()):
            number += 1  # other files of the same drafter, as in router,drafters=(model:A|model:B)
            folder = f"{name}-{number}"
        checksums |= {f"{folder}/{file}": digest for file, digest in own.items()}
    return checksums


def _shipped_model(source: str) -> str:
    """The name of the named model whose file this is, as its drafters are found by its weights; else the source."""
    path = expanded(source)
    size = path.stat().st_size if path.is_file() else -1
    alike = [model for model in named_models.MODELS.values() if model.file.num_bytes == size]
    return next((model.name for model in alike if model.file.sha256 == _sha256(path)), source)


def _own_checksums(name: str, path: str | None, source: str) -> Checksums:
    """Checksums of the files of one drafter, without nested ones."""
    if path is not None and expanded(path).exists():
        return model_checksums(path)
    if has_drafter(name, path or source):
        return _checksums(drafter_folder(name, None, path or source))
    if path is not None:
        return model_checksums(path, "draft")
    row = _drafter_rows().get(name)
    if row is None or row.reads != "model":
        return {}
    if is_builtin(source):
        return model_checksums(BUILTIN, "draft")
    return _checksums(drafter_folder("draft", None, source)) if has_drafter("draft", source) else {}


def _specs_in(spec: str, source: str) -> Iterator[tuple[str, str | None]]:
    """Names and paths of a spec and of specs in its options, written or default."""
    drafters = _drafter_rows()
    spec = _meaning_of_auto(source) if spec == "auto" else spec
    whole = parse_spec(spec)
    yield whole.name, whole.path
    is_group = whole.name in drafters and any(option.name == "drafters" for option in drafters[whole.name].options())
    if is_group and "drafters" not in whole.options and _has_draft(source):
        yield "model", None  # the only default member with files of its own
    for key, value in whole.options.items():
        if expanded(value).is_file():
            yield key, value
            continue
        try:
            parts = [part for part in split_specs(value) if parse_spec(part).name in drafters]
        except ValueError:  # a value that is not a spec
            continue
        for part in parts:
            yield from _specs_in(part, source)


def _drafter_rows() -> dict[str, Row]:
    return {row.name: row for row in rows("drafter")}


def _meaning_of_auto(source: str) -> str:
    """The drafter that ``auto`` means, as far as it has files of its own."""
    entry = named_model(source)
    if entry is not None and entry.drafter != "auto":
        return entry.drafter
    return DEFAULT_GROUP if _has_draft(source) else "ngram"


def _has_draft(source: str) -> bool:
    """Whether ``auto`` and groups use the built-in draft model: for the built-in target and its adapters only."""
    return is_builtin(source) and (source == BUILTIN or is_adapter(Path(resolve(source))))


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
