"""A weight in the kernels' format, field by field as in ``linear.h``."""

from __future__ import annotations

from ctypes import Structure, c_double, c_long, c_void_p

from torch import Tensor

from foretoken.models.native.library import address

BFLOAT16, EIGHT, FOUR, BYTES = range(4)
"""Kinds of weights; 8-bit and 4-bit ones multiply 15-bit activations, the last kind multiplies 8-bit ones."""
PER_ROW, PAIRS, HALVES, STEPS = range(4)
"""Forms of the scales of :data:`BYTES`, see ``linear.h``."""


class Linear(Structure):
    """A weight: kind, shape, group, numbers, scales and bias; for :data:`BYTES` also their arrangement."""

    _fields_ = (
        *((name, c_long) for name in ("kind", "inner", "out", "group")),
        *((name, c_void_p) for name in ("weight", "scales", "bias", "steps")),
        *((name, c_long) for name in ("bits", "form", "zeros")),
        ("middle", c_double),
    )


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
