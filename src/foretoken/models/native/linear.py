"""A weight in the kernels' format, field by field as in ``linear.h``, and products by it."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_long, c_void_p

import torch
from torch import Tensor

from foretoken.models.native.library import address, function

BFLOAT16, EIGHT, FOUR, BYTES = range(4)
"""Kinds of weights; 8-bit and 4-bit ones multiply 15-bit activations, the last kind multiplies 8-bit ones."""
PER_ROW, PAIRS, HALVES, STEPS = range(4)
"""Forms of the scales of :data:`BYTES`, see ``linear.h``."""
ALIASED_BYTES, ALIASED_ROWS, SHIFT = 1024, 6, 32
"""If more than ``ALIASED_ROWS`` rows are a multiple of ``ALIASED_BYTES`` bytes apart, they share few sets of the
nearest cache: they are copied with ``SHIFT`` more numbers per row."""


class Linear(Structure):
    """A weight: kind, shape, group, numbers, scales and bias; for :data:`BYTES` also their arrangement."""

    _fields_ = (
        *((name, c_long) for name in ("kind", "inner", "out", "group")),
        *((name, c_void_p) for name in ("weight", "scales", "bias", "steps")),
        *((name, c_long) for name in ("bits", "form", "zeros")),
        ("middle", c_double),
    )


def product(x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias) (+ residual)`` [n, out] of x [n, in], summed in float32 and rounded once.

    All are bfloat16; the bias is float32.

    Raises:
        MemoryError: the intermediate results do not fit.
    """
    rows, inner = x.shape
    if linear.kind == BFLOAT16 and rows > ALIASED_ROWS and 2 * inner % ALIASED_BYTES == 0:
        x = torch.cat((x, x.new_empty(rows, SHIFT)), 1)
    elif x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    result, failed = x.new_empty(rows, linear.out), c_long(0)
    places = address(residual), address(result), ctypes.addressof(failed)
    function("linear_product", "ppnnppp")(ctypes.addressof(linear), address(x), rows, x.stride(0), *places)
    if failed.value:
        raise MemoryError(f"too little memory for a product of {rows} rows: feed fewer tokens at once")
    return result


def bytes_linear(
    shape: tuple[int, int],
    bits: int,
    group: int,
    packed: Tensor,
    scales: Tensor,
    *,
    form: int,
    steps: Tensor | None = None,
    zeros: bool = False,
    middle: float,
) -> Linear:
    """A weight for 8-bit activations.

    Args:
        shape: [out, in].
        bits: bits of its values, 8 or 4.
        group: inputs per scale.
        packed: values from :func:`foretoken.models.native.integers.laid_out8` or ``laid_out4``.
        scales, form, steps, zeros: scales and their arrangement, their steps in the form :data:`STEPS`, and whether
            there are zeros.
        middle: offset subtracted from a value.
    """
    out, inner = shape
    addresses = address(packed), address(scales), None, address(steps)
    return Linear(BYTES, inner, out, group, *addresses, bits, form, int(zeros), middle)
