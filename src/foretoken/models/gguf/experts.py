"""Stacked experts of a file.  No kernel multiplies by quantised ones, so they are widened to the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.models.gguf.architectures import EXPERTS
from foretoken.models.gguf.file import GgufFile, GgufTensor, UncoveredError
from foretoken.models.gguf.grouped import dequantised, numbers_of
from foretoken.models.gguf.types import KINDS, PLAIN

GIB = 2**30


def quantised_expert_bytes(file: GgufFile, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of all quantised experts in the file, and in ``dtype``."""
    parts = {part for parts in EXPERTS.values() for part in parts}
    quantised = [t for t in file.tensors.values() if t.kind in KINDS and t.name.split(".")[-2] in parts]
    widened = sum(torch.Size(tensor.shape).numel() for tensor in quantised) * dtype.itemsize
    return sum(tensor.data.nbytes for tensor in quantised), widened


def check_memory(file: GgufFile, dtype: torch.dtype, free: int | None) -> None:
    """Raise ``UncoveredError`` if the widened experts exceed the ``free`` bytes of memory (``None``: unknown)."""
    _, widened = quantised_expert_bytes(file, dtype)
    if free is not None and widened > free:
        name = str(dtype).removeprefix("torch.")
        raise UncoveredError(
            f"the experts of {file.path} take {widened / GIB:.1f} GiB in {name}, and {free / GIB:.1f} GiB of memory "
            "are free"
        )


def joined(tensors: Sequence[GgufTensor], dtype: torch.dtype, check: Callable[[str, bool], None]) -> Tensor:
    """Numbers [E, out, in] of tensors that are joined along axis 1, read one expert at a time so that wider copies stay
    small; ``check`` receives a name and whether its numbers are finite."""
    first = tensors[0]
    if len(tensors) == 1 and PLAIN.get(first.kind) == dtype:  # a view of the file
        whole = numbers_of(first)
        check(first.name, all(bool(expert.isfinite().all()) for expert in whole))
        return whole
    count, _, width = first.shape
    whole = torch.empty(count, sum(tensor.shape[1] for tensor in tensors), width, dtype=dtype)
    start = 0
    for tensor in tensors:
        part = whole[:, start : start + tensor.shape[1]]
        for expert, stored in zip(part, tensor.data, strict=True):
            numbers = dequantised(stored, tensor.kind)
            check(tensor.name, bool(numbers.isfinite().all()))
            expert.copy_(numbers)
        start += tensor.shape[1]
    return whole
