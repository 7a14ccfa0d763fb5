"""A weight as the kernels read it, field by field as in ``linear.h``."""

from __future__ import annotations

from ctypes import Structure, c_double, c_long, c_void_p

from torch import Tensor

from foretoken.models.native.library import address

BFLOAT16, EIGHT, FOUR, BYTES = range(4)
"""Kinds of weights: those in 8 and 4 bits multiply activations of 15 bits, the last one activations of 8."""
PER_ROW, PAIRS, HALVES, STEPS = range(4)
"""Forms of the scales of :data:`BYTES`, see ``linear.h``."""


class Linear(Structure):
    """A weight: its kind, shape, group, numbers, scales and bias; of :data:`BYTES` how they lie, too."""

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
    """A weight for activations of 8 bits.

    Args:
        shape: [out, in].
        bits: of its values, 8 or 4.
        group: inputs that share a scale.
        packed: values as :func:`foretoken.models.native.integers.laid_out8` or ``laid_out4`` lay them out.
        scales, form, steps, zeros: scales, how they lie, steps of those of the form :data:`STEPS`, whether there are
            zeros.
        middle: what is subtracted from a value.
    """
    out, inner = shape
    places = address(packed), address(scales), None, address(steps)
    return Linear(BYTES, inner, out, group, *places, bits, form, int(zeros), middle)
