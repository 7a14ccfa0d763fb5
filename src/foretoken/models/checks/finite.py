"""Checks for weights that are not finite, so that NaN logits can be traced to a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core import NON_FINITE
from foretoken.models.linear.packing import PackedLinear

REMEDY = "copy the file again, or use another one"


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor with NaN or inf; ``None`` if all values are finite."""
    return next((name for name, tensor in tensors if not _is_finite(tensor)), None)


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: object) -> None:
    """Raise ``ValueError`` for weights with NaN or inf, with which a drafter would silently draft nonsense."""
    name = first_not_finite(tensors)
    if name is not None:
        raise ValueError(f"{name} in {source} holds NaN or inf: {REMEDY}")


def check_stored(tensors: Iterable[tuple[str, Tensor]], source: object) -> None:
    """Raise ``ValueError`` for 8-bit weights, whose scales a drafter cannot store; 64-bit numbers and flags are
    tables."""
    for name, tensor in tensors:
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} in {source} is stored as {kind}, and only unquantised weights are supported: use a file of "
                "those"
            )


def why_not_finite(model: Any) -> str:
    """Reason why a language model's logits are not finite, with the first such weight."""
    network = getattr(model, "model", None)
    name = first_not_finite(weights_of(network)) if isinstance(network, nn.Module) else None
    if name is None:
        return NON_FINITE
    source = getattr(getattr(network, "config", None), "_name_or_path", "") or "the model"
    return f"the model's logits are NaN or all -inf, because {name} in {source} holds NaN or inf: {REMEDY}"


def weights_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a network by name, packed ones included."""
    yield from network.named_parameters()
    for name, module in network.named_modules():
        # An embedding without a parameter reads its rows from a file.
        if (isinstance(module, PackedLinear) and not module.tied) or (
            isinstance(module, nn.Embedding) and "weight" not in module._parameters
        ):
            yield f"{name}.weight", module.weight


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # 8-bit floats do not support isfinite
    return bool(torch.isfinite(wide).all())
