"""The multi-token prediction head in a target's own checkpoint, which Transformers skips when it loads the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.core.io.checkpoints import LoadError
from foretoken.core.io.hub_ids import expanded
from foretoken.models.checks.finite import check_finite
from foretoken.models.forward.heads.mtp import modules_of


def read_head(network: Any) -> list[dict[str, Tensor]]:
    """The modules in the checkpoint that a ``PreTrainedModel`` was loaded from (named in its configuration), one
    dictionary with our names each.  Raises ``LoadError`` if there is none or it is damaged."""
    config = network.config.get_text_config()
    source = str(getattr(network.config, "_name_or_path", "") or "")
    num_layers = int(config.num_hidden_layers)
    files = _files(source, num_layers)
    where = {name: file for file, names in files.items() for name in names}
    modules = modules_of(where, num_layers)
    if not modules:
        raise LoadError(_absence(source, declared(source, config) if files else 0))
    return [_read(module, where) for module in modules]


def has_head(network: Any) -> bool:
    """Whether :func:`read_head` would return modules.  The files of a hub model that announces none are not
    requested."""
    config = network.config.get_text_config()
    source = str(getattr(network.config, "_name_or_path", "") or "")
    if not Path(source).is_dir() and not declared(source, config):
        return False
    try:
        num_layers = int(config.num_hidden_layers)
        names = [name for names in _files(source, num_layers).values() for name in names]
        return bool(modules_of(names, num_layers))
    except (LoadError, OSError, ValueError):
        return False


def declared(source: str, config: Any) -> int:
    """Number of modules that ``config.json`` announces.  The file is read because configuration classes have
    defaults."""
    file = Path(source) / "config.json"
    try:
        config_fields: Mapping[str, Any] = (
            json.loads(file.read_text(encoding="utf-8")) if file.exists() else config.to_dict()
        )
    except ValueError:
        return 0
    config_fields = {**config_fields, **(config_fields.get("text_config") or {})}
    # Model families set these keys by default, so the tensors decide.
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
    return max(int(config_fields.get(key) or 0) for key in keys)


def _absence(source: str, announced: int) -> str:
    instead = "give a trained one (mtp:FOLDER, made by `foretoken train mtp`), or use drafter='ngram'"
    name = source or "the target"
    if announced:
        return (
            f"{name} declares {announced} multi-token prediction layer(s) in config.json and has none of their "
            f"tensors (Transformers drops them when saving): use the original files, {instead}"
        )
    return f"{name} has no multi-token prediction head: {instead}"


def _files(source: str, num_layers: int) -> dict[Path, list[str]]:
    """Names of tensors by file; empty for a network made in memory and for a GGUF file, which has no head."""
    folder = expanded(source)
    if source and folder.is_file():
        return {}
    if source and folder.is_dir():
        return {file: _names(file) for file in sorted(folder.glob("*.safetensors"))}
    return _hub_files(source, num_layers) if source else {}


def _hub_files(source: str, num_layers: int) -> dict[Path, list[str]]:
    """The files of a hub model that hold parts of a head; no others are fetched."""
    from transformers.utils.hub import cached_file

    quiet: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    index = cached_file(source, "model.safetensors.index.json", **quiet)
    if index is None:
        single = cached_file(source, "model.safetensors", **quiet)
        return {} if single is None else {Path(single): _names(Path(single))}
    listed: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    of_heads = {name for module in modules_of(listed, num_layers) for name in module.values()}
    files = {}
    for file in sorted({listed[name] for name in of_heads}):
        cached = cached_file(source, file, **quiet)
        if cached is not None:
            files[Path(cached)] = [name for name, place in listed.items() if place == file and name in of_heads]
    return files


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError):
        raise LoadError(f"{file} is damaged or half-written: copy it again") from None


def _read(module: Mapping[str, str], where: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors of one module, from all its files."""
    read: dict[str, Tensor] = {}
    for file in sorted({where[name] for name in module.values()}):
        with safe_open(file, "pt") as opened:
            tensors = {our_name: opened.get_tensor(name) for our_name, name in module.items() if where[name] == file}
        check_finite(((module[our_name], tensor) for our_name, tensor in tensors.items()), file)
        read.update(tensors)
    return read
