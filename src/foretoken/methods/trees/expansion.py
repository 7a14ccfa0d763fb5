"""Static expansion <k1, .., km>: the same number of children for a whole level (SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from foretoken.methods.trees.base import Shape
from foretoken.methods.trees.shapes import Choice


def parse_widths(text: str) -> tuple[int, ...]:
    """``"3x2x1"`` -> ``(3, 2, 1)``. Raises ``ValueError`` for all but positive integers joined by ``x``."""
    parts = text.lower().split("x")
    # int() would accept more than digits: 1_0, +2.
    widths = tuple(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else ()
    if not widths or min(widths) < 1:
        raise ValueError(f"tree={text!r} must be positive child counts per level, for example 3x2x1")
    return widths


def expansion_choices(widths: Sequence[int]) -> list[Choice]:
    """All nodes of <k1, .., km>, level by level: k1 + k1 k2 + ... of them."""
    levels = range(1, len(widths) + 1)
    return [path for depth in levels for path in itertools.product(*map(range, widths[:depth]))]


class Expansion(Shape):
    """A tree of full levels.

    Args:
        widths: children per node, one number per level, joined by ``x``.
    """

    name = "expansion"

    def __init__(self, widths: str = "3x2x1") -> None:
        self.widths = parse_widths(widths)
        nodes = sum(itertools.accumulate(self.widths, operator.mul))
        if nodes > 1 << 16:  # listing the nodes of 1000x1000x1000 would exhaust memory
            raise ValueError(f"tree={widths!r} has {nodes} nodes: at most {1 << 16} can be listed")

    def choices(self) -> list[Choice]:
        return expansion_choices(self.widths)
