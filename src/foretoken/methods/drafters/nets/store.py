"""A trained drafter on disk: one folder with ``drafter.json``, ``model.safetensors`` and a card; never a pickle."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from foretoken.core.io.drafter_folders import IMPORTED, OURS, is_whole_model
from foretoken.core.io.files import save_described
from foretoken.methods.drafters.base import BuildContext
from foretoken.methods.drafters.nets.eight_bits import check_bits, packed, unpacked
from foretoken.models.checks.finite import check_finite, check_stored
from foretoken.models.forward.parts import Fingerprint, QuantisedTargetWarning, TargetParts

CONFIG = OURS
WEIGHTS = "model.safetensors"
VERSION = 1


def save_drafter(
    folder: Path,
    method: str,
    config: Mapping[str, Any],
    net: nn.Module,
    target: Fingerprint,
    measured: Mapping[str, Any] | None = None,
    bits: int = 16,
) -> None:
    """Write a drafter's weights and description; every file appears complete or not at all.

    Args:
        folder: created if missing.
        measured: measurements of training that the drafter starts from (acceptance tables).
        bits: of a weight, 16 (bfloat16) or 8 (:mod:`~foretoken.methods.drafters.nets.eight_bits`).

    Raises:
        ValueError: other ``bits``.
        OSError: the folder cannot be written, or the disk is full.
    """
    check_bits(bits)
    tensors = {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous().cpu()
        for name, value in net.state_dict().items()
    }
    description = {
        "format": VERSION,
        "method": method,
        "config": dict(config),
        "target": asdict(target),
        "measured": dict(measured or {}),
    }
    save_described(folder, (WEIGHTS, packed(tensors) if bits == 8 else tensors), (CONFIG, description))


def load_net(
    context: BuildContext, name: str, path: str | None, config: type[Any], make: Callable[[Any], nn.Module]
) -> tuple[Any, TargetParts, dict[str, Any]]:
    """The trained network of a spec ``NAME[:FOLDER]``, the target's modules that it borrows, and training's
    measurements.

    Raises:
        ValueError: no folder, one trained for another target, or damaged files.
    """
    parts, folder = TargetParts(context.target), context.folder(name, path)
    description = read_description(folder, name, parts.fingerprint())
    return build_net(folder, make, config, description).to(parts.device), parts, description["measured"]


def read_description(folder: Path, method: str, target: Fingerprint) -> dict[str, Any]:
    """The stored description, checked against the method and the target.

    Raises:
        ValueError: no drafter in the folder, another method, another target, or a damaged file.

    Warns:
        QuantisedTargetWarning: the target's weights are quantised differently than in training.
    """
    description, for_target = read_stored(folder, method)
    difference = for_target.difference(target)
    if difference:
        raise ValueError(f"{folder} was trained for another target: {difference}")
    if doubt := for_target.doubt(target):
        text = f"was trained for this model, but {doubt}: its output is unchanged, fewer drafts may be accepted"
        warnings.warn(f"{folder} {text}", QuantisedTargetWarning, stacklevel=3)
    return description


def read_stored(folder: Path, method: str, kind: str = "drafter") -> tuple[dict[str, Any], Fingerprint]:
    """The stored description, and the fingerprint of the network that it was trained for.

    Raises:
        ValueError: nothing in the folder, another method, or a damaged file.
    """
    file = folder / CONFIG
    if not file.exists():
        if folder.is_dir() and is_whole_model(folder):
            raise ValueError(
                f"{folder} is a whole model, not a drafter of the method {method}: give it as MODEL, or with --drafter "
                f"model:{folder} to draft with it"
            )
        public = (".json", ".safetensors", ".bin", ".pt")
        if method in IMPORTED and folder.is_dir() and any(file.suffix in public for file in folder.iterdir()):
            raise ValueError(
                f"{folder} is in another project's layout (it has no {CONFIG}): import it first, "
                f"`foretoken import MODEL {folder} --out OUT`, and use {method}:OUT"
            )
        raise ValueError(f"{folder} holds no trained {kind} ({CONFIG}): give the --out of `foretoken train {method}`")
    try:
        description: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version, stored, for_target = description["format"], description["method"], Fingerprint(**description["target"])
        description["measured"] = dict(description["measured"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged: copy the folder again") from None
    if version != VERSION:
        raise ValueError(f"{file} has format {version}, and this version reads {VERSION}: train it again")
    if stored != method:
        raise ValueError(f"{folder} was trained as {stored!r}: use it as {stored}:{folder}")
    return description, for_target


def build_net(
    folder: Path,
    make: Callable[[Any], nn.Module],
    config: type[Any],
    description: Mapping[str, Any],
    what: str = "drafter",
) -> Any:
    """The described network with the stored weights; PyTorch's random generator is unchanged.

    Args:
        make: constructs the network from a configuration.
        description: result of :func:`read_description`.

    Raises:
        ValueError: the description is damaged, or :func:`load_weights` refuses the weights.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # a new network draws random weights, which the stored ones replace
            net = make(config(**description["config"]))
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{folder / CONFIG} does not describe a valid {what}, copy it again: {' '.join(reason)}"
        ) from None
    load_weights(folder, net)
    return net


def load_weights(folder: Path, net: nn.Module) -> None:
    """Fill ``net`` with the stored weights.

    Raises:
        ValueError: a damaged file, or missing, superfluous, misshapen or non-finite tensors.
    """
    file = folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, FileNotFoundError):
        raise ValueError(f"{file} is missing, damaged or half-written: copy the folder again") from None
    stored, expected = unpacked(stored, file), net.state_dict()
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            raise ValueError(f"{file} lacks the tensor {name}: the checkpoint is incomplete")
        if name not in expected:
            raise ValueError(f"{file} holds a tensor {name} that this drafter does not have")
        if expected[name].shape != stored[name].shape:
            raise ValueError(f"{name} in {file} is {list(stored[name].shape)} and must be {list(expected[name].shape)}")
    check_finite(stored.items(), file)
    check_stored(stored.items(), file)
    net.load_state_dict({name: value.to(expected[name].dtype) for name, value in stored.items()})
