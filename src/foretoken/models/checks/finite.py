"""Weights that are not finite numbers: which one it is, so that nobody has to guess why logits are NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core import NON_FINITE
from foretoken.models.linear.packing import PackedLinear

REMEDY = "copy the file again, or take another one"


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or inf; ``None`` where all numbers are finite."""
    return next((name for name, tensor in tensors if not _is_finite(tensor)), None)


def check_finite(tensors: Iterable[tuple[str, Tensor]], place: object) -> None:
    """Refuse weights with NaN or inf: a drafter with them would draft nonsense without a word."""
    name = first_not_finite(tensors)
    if name is not None:
        raise ValueError(f"{name} in {place} holds NaN or inf: {REMEDY}")


def check_stored(tensors: Iterable[tuple[str, Tensor]], place: object) -> None:
    """Refuse weights in 8 bits, whose scales a drafter has no place for; 64-bit numbers and flags are tables."""
    for name, tensor in tensors:
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} in {place} is stored as {kind}, and only full weights are read: take such a file")


def why_not_finite(model: Any) -> str:
    """Why a language model's logits are not finite, with the first of its weights that is not."""
    network = getattr(model, "model", None)
    name = first_not_finite(weights_of(network)) if isinstance(network, nn.Module) else None
    if name is None:
        return NON_FINITE
    place = getattr(getattr(network, "config", None), "_name_or_path", "") or "the model"
    return f"the model's logits are NaN or all -inf, because {name} in {place} holds NaN or inf: {REMEDY}"


def weights_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A network's weights by name, packed ones included."""
    yield from network.named_parameters()
    for name, module in network.named_modules():
        # An embedding without a parameter looks its rows up in a file.
        if (isinstance(module, PackedLinear) and not module.tied) or (
            isinstance(module, nn.Embedding) and "weight" not in module._parameters
        ):
            yield f"{name}.weight", module.weight


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # 8-bit floats have no such operation
    return bool(torch.isfinite(wide).all())
