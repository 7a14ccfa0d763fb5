"""Quantised copies of published drafters: simple ones are read, others refused by the name of their method.

compressed-tensors, the format of vllm-project, stores a matrix of int8 or float8 as ``weight`` and its scales as
``weight_scale``: one, one per row, or one per row and group of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALE, ZERO, INPUT = ".weight_scale", ".weight_zero_point", ".input_scale"
PACKED = (".weight_packed", ".qweight", ".weight_shape", ".weight_scale_inv", ".absmax", ".bitmask", ".scales")
"""Endings of tensors that only a library of their method can read."""

FLAGS = "t2d"
"""Name of the tensor that says which tokens a draft vocabulary has; some projects store its flags in bytes."""


def dequantised(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The tensors in bfloat16, and the method that their copy was quantised with; empty if it is not quantised.

    Raises:
        ValueError: they are quantised in a layout other than that of whole bytes with scales.
    """
    method = method_of(config)
    eighths = {name for name, value in tensors.items() if value.dtype.itemsize == 1 and value.dtype != torch.bool}
    flags = {name for name in eighths if name.rpartition(".")[2] == FLAGS}
    tensors = {**tensors, **{name: tensors[name].bool() for name in flags}}
    eighths -= flags
    packed = next((name for name in tensors if name.endswith(PACKED)), None)
    if not method and not eighths and packed is None:
        return dict(tensors), ""
    readable = {name for name in eighths if f"{name.removesuffix('.weight')}{SCALE}" in tensors}
    zeros = {name for name in eighths if name.endswith(ZERO)}
    if packed is not None or eighths - readable - zeros or (method and not readable):
        kind = method or _kind(packed, eighths)
        raise ValueError(f"the checkpoint is quantised with {kind}: take the unquantised checkpoint")
    whole = {name: _whole(name, value, tensors) if name in readable else value for name, value in tensors.items()}
    dropped = tuple(f"{name.removesuffix('.weight')}{end}" for name in readable for end in (SCALE, ZERO, INPUT))
    return {name: value for name, value in whole.items() if name not in dropped}, method or "8 bits"


def unpacked_name(name: str) -> str:
    """Name of a matrix by that of its packed copy; other names as they are."""
    for end in (".weight_packed", ".qweight"):
        if name.endswith(end):
            return f"{name.removesuffix(end)}.weight"
    return name


def method_of(config: Mapping[str, Any]) -> str:
    """Name of the quantisation in ``config.json``; empty without one."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return ""
    fields = stated if isinstance(stated, Mapping) else {}
    name = str(fields.get("quant_method") or "an unnamed method")
    return f"{name} ({fields['format']})" if fields.get("format") else name


def _kind(packed: str | None, eighths: set[str]) -> str:
    return "packed weights" if packed is not None else f"8-bit weights without scales ({sorted(eighths)[0]})"


def _whole(name: str, value: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """[out, in] of a stored matrix."""
    prefix = name.removesuffix(".weight")
    scale, zero = tensors[f"{prefix}{SCALE}"].float(), tensors.get(f"{prefix}{ZERO}")
    rows = 1 if scale.numel() == 1 else len(value)
    groups = scale.numel() // max(1, rows)
    by_rows = scale.numel() == 1 or len(scale) == rows  # the number of scales of blocks may agree by chance
    fits = value.dim() == 2 and by_rows and groups > 0 and value.shape[1] % groups == 0
    if not fits or (zero is not None and zero.numel() != scale.numel()):
        raise ValueError(f"{prefix}{SCALE} is {list(scale.shape)}, which does not fit {name} of {list(value.shape)}")
    blocks = value.float().unflatten(1, (groups, -1))
    offsets = 0.0 if zero is None else zero.float().view(rows, groups, 1)
    return ((blocks - offsets) * scale.view(rows, groups, 1)).flatten(1).to(torch.bfloat16)
