"""Training state on disk: one safetensors file and one JSON file, always whole, never a pickle."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretoken.core.io.files import replacing

NAMED = {"target": "another model", "student": "another draft model", "text": "other text"}
"""Descriptions of differences whose values are hashes."""
MOST_NAMED = 6
"""Number of differences that a message names."""


def save_checkpoint(
    folder: Path, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], meta: dict[str, Any]
) -> Path:
    """Write ``folder/step-N`` through a temporary name, then drop all older checkpoints but one.

    A kill or a full disk at any moment leaves the previous checkpoint intact.
    """
    final = folder / f"step-{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(final) as draft:
        draft.mkdir()
        tensors = {f"model.{k}": v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}
        for i, optimizer in enumerate(optimizers):
            for j, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"opt.{i}.{j}.{key}"] = torch.as_tensor(value).clone()
        save_file(tensors, draft / "state.safetensors")
        (draft / "meta.json").write_text(json.dumps({**meta, "step": step}))
    killed = folder.glob(".tmp-*")  # while they were written
    for old in (*sorted(folder.glob("step-*"))[:-2], *killed):
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint below ``folder``, or ``None``."""
    checkpoints = sorted(p for p in folder.glob("step-*") if (p / "meta.json").exists())
    return checkpoints[-1] if checkpoints else None


def read_meta(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint (``step`` included).  Raises ``ValueError`` if the checkpoint is damaged."""
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    except ValueError:
        raise _damaged(path) from None
    return meta


def check_same(path: Path, identity: Mapping[str, Any]) -> None:
    """Compare the settings of a checkpoint with the run's.

    A checkpoint of an earlier version may lack some: a warning then names those not compared.  Raises ``ValueError``
    for other settings (names them with both values), another target or other text, and for a damaged checkpoint.
    """
    present, stored = json.loads(json.dumps(identity)), read_meta(path).get("identity", {})
    unknown = [key for key in present if key not in stored]
    others = _differences(stored, {key: value for key, value in present.items() if key in stored})
    if others == [NAMED["text"]]:
        raise ValueError(f"{path} was trained on other text; give the same to resume, or another --out")
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        raise ValueError(
            f"{path} was trained with other settings ({'; '.join(others[:MOST_NAMED])}{more}); give the same ones to "
            "resume, or another --out"
        )
    if unknown:
        missing = ", ".join(unknown)
        warnings.warn(f"{path} is of an earlier version, without these to compare: {missing}", stacklevel=3)


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    earlier, current = dict(_flat(stored)), dict(_flat(present))
    differences = []
    for key in dict.fromkeys((*current, *earlier)):
        if key not in earlier or key not in current or earlier[key] != current[key]:
            values = f"{key}={earlier.get(key, 'nothing')}, now {current.get(key, 'nothing')}"
            differences.append(NAMED.get(key.partition(".")[0], values))
    return list(dict.fromkeys(differences))


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted names, so that equal names in two parts stay distinct."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def load_checkpoint(path: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Restore parameters and optimizer state in place; return the stored metadata (``step`` included).  Raises
    ``ValueError`` if the checkpoint is damaged."""
    try:
        with safe_open(path / "state.safetensors", "pt") as file:
            _restore(file, model, optimizers)
    except (SafetensorError, FileNotFoundError):
        raise _damaged(path) from None
    return read_meta(path)


def _damaged(path: Path) -> ValueError:
    return ValueError(f"the checkpoint {path} is damaged: delete that folder to resume from the one before it")


def _restore(file: Any, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    keys = list(file.keys())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(file.get_tensor(f"model.{name}"))
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Any]] = {}
        for key in keys:
            if key.startswith(f"opt.{i}."):
                _, _, j, name = key.split(".", 3)
                state.setdefault(int(j), {})[name] = file.get_tensor(key)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
