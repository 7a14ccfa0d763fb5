"""Output folders that appear whole or not at all, and the contents of folders from other projects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.io.checkpoints import indexed_shards, is_adapter
from foretoken.core.io.drafter_folders import OURS, drafter_kind
from foretoken.core.io.files import replacing
from foretoken.core.io.hub_ids import expanded
from foretoken.loading import PICKLES
from foretoken.models.checks.finite import check_finite
from foretoken.training.formats.quantised import unpacked_name
from foretoken.training.formats.values import merged

NOTE = "foretoken.json"
"""File beside an export with its target and measurements, for which public layouts have no place."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "*.safetensors",
    "tokenizer*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
)
"""Files of a model."""
MARKS = (NOTE, OURS, "early_exit.json", "layer_skip.json")
"""Files of which a drafter's folder has one, and a whole model's none."""
DRAFTER_FILES = (*MARKS, *MODEL_FILES, "adapter_config.json", "README.md", "training.json", "losses.*")
"""Files of a drafter's folder: those of exports and imports, and a training's report."""


@contextmanager
def new_folder(out: Path, force: bool = False, inputs: Sequence[Path] = ()) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its place if the block succeeds, and is removed otherwise.  ``out``
    may be new or empty, or with ``force`` hold a drafter.  ``inputs`` are read, so they are never replaced.  Raises
    ``ValueError`` for any other ``out``."""
    out = expanded(out).resolve()
    _check_free(out, force, [expanded(path).resolve() for path in inputs])
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as draft:
        draft.mkdir()
        yield draft
        for path in (draft, *draft.rglob("*")):  # servers often run as another user
            path.chmod(0o755 if path.is_dir() else 0o644)


def _check_free(out: Path, force: bool, inputs: Sequence[Path]) -> None:
    if any(out == path or out in path.parents for path in inputs):
        raise ValueError(f"{out} is the source: --out must be another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out names a folder")
    entries = sorted(out.iterdir()) if out.is_dir() else []
    if entries and not force:
        raise ValueError(f"{out} is not empty: give another --out, or --force to replace it")
    names = [path.name for path in entries]
    is_drafter = bool(set(MARKS) & set(names)) or drafter_kind(out) is not None
    if entries and (any(path.is_dir() for path in entries) or not is_drafter):
        raise ValueError(f"{out} does not contain a drafter, and --force replaces drafters only")
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in DRAFTER_FILES)]
    if others:
        raise ValueError(f"{out} contains {others[0]}, which is not a drafter's, and --force replaces drafters only")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, with keys in their order."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in Transformers' form, shared memory as copies.  Raises ``SafetensorError`` if they cannot be
    written."""
    save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, file, {"format": "pt"}
    )


class Found:
    """A folder, or a single JSON file, to import, read on demand.  Raises ``ValueError`` if it does not exist, or is a
    drafter that needs no import."""

    def __init__(self, path: Path) -> None:
        self.path = expanded(path)
        if not self.path.exists():
            raise ValueError(f"no such folder: {path}")
        if self.path.suffix == ".gguf":
            raise ValueError(f"{path} is a GGUF file, which holds a model: use it with --drafter model:{path}")
        if self.path.is_file() and self.path.suffix != ".json":
            raise ValueError(f"{path} is a file: give its folder, {self.path.parent}")
        if (self.path / OURS).exists():
            method = self.json(OURS).get("method", "METHOD")
            raise ValueError(f"{path} is a drafter already: use it with --drafter {method}:{path}")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside the weights, or the object of a single file; empty if there is none.  Raises
        ``ValueError`` for a damaged one."""
        file = self.path / name if self.path.is_dir() else self.path
        if not file.exists():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{file} is damaged or half-written: copy it again") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file} must hold a JSON object")
        return content

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json``; a wrapped configuration (``{"model": {...}}``) is flattened."""
        config = self.json("config.json") if self.path.is_dir() else {}
        inner = config.get("model")
        outer = {key: value for key, value in config.items() if key != "model"}
        return merged(inner, outer) if isinstance(inner, dict) else config

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors, of packed matrices those of whole ones.  Raises ``ValueError`` for a damaged file, or
        if there are only pickled weights."""
        names: set[str] = set()
        for file in self._files:
            try:
                with safe_open(file, "pt") as opened:
                    names.update(opened.keys())
            except (SafetensorError, OSError):
                raise ValueError(f"{file} is damaged or half-written: copy it again") from None
        return frozenset(unpacked_name(name) for name in names)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their stored names.  Raises ``ValueError`` for a damaged file, and for numbers that are not
        finite, and two of one name that differ."""
        tensors: dict[str, Tensor] = {}
        for file in self._files:
            try:
                loaded = load_file(file)
            except (SafetensorError, OSError):
                raise ValueError(f"{file} is damaged or half-written: copy it again") from None
            check_finite(loaded.items(), file)
            differs = next((n for n, value in loaded.items() if n in tensors and not _equal(value, tensors[n])), None)
            if differs is not None:
                raise ValueError(f"{self.path} holds two tensors {differs}, one in {file.name}: remove the wrong file")
            tensors.update(loaded)
        return tensors

    @property
    def inside(self) -> Path | None:
        """The first subfolder with a drafter or an adapter."""
        folders = sorted(path for path in self.path.iterdir() if path.is_dir()) if self.path.is_dir() else []
        return next((path for path in folders if drafter_kind(path) or is_adapter(path)), None)

    def check_whole(self, config_file: str = "config.json") -> None:
        """Raise ``ValueError`` for a folder without configuration or weights, or with pickled or damaged ones."""
        if not (self.path / config_file).exists():
            raise ValueError(f"{self.path} has no {config_file}: copy it from the source of the weights")
        if not self.names:
            raise ValueError(f"{self.path} holds no *.safetensors weights: the checkpoint is incomplete")

    @property
    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        files = indexed_shards(self.path) or sorted(self.path.glob("*.safetensors"))
        pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLES)
        if pickles and not files:
            raise ValueError(
                f"{self.path} holds pickled weights only ({pickles[0]}), which can run code when loaded: convert them, "
                "for example with safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
            )
        return files


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)
