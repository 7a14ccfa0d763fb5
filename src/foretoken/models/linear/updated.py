"""Products with a low-rank update for some of their rows, y = W x + B A x."""

from __future__ import annotations

from threading import local

from torch import Tensor

from foretoken.models.linear.product import Product


class RowGate(local):
    """The rows [m] of this thread's forward that get the updates."""

    rows: Tensor | slice = slice(0, 0)

    def flags(self, count: int) -> bytes:
        """A byte per row of a forward of ``count`` rows: 1 for those with updates."""
        rows = range(count)[self.rows] if isinstance(self.rows, slice) else self.rows.tolist()
        flags = bytearray(count)
        for row in rows:
            flags[row] = 1
        return bytes(flags)


class UpdatedProduct:
    """A product with the update of some rows.

    Args:
        first: [in, R] transposed factors A of its linear layers, concatenated.
        second: [R, out] their transposed factors B at their outputs, scaled.
    """

    def __init__(self, base: Product, first: Tensor, second: Tensor, gate: RowGate) -> None:
        self.base, self.gate = base, gate
        self.first, self.second = first.contiguous(), second.contiguous()

    @property
    def alone(self) -> bool:
        return self.base.alone

    def __call__(self, x: Tensor) -> Tensor:
        return self._updated(self.base(x), x)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._updated(self.base.plus(x, residual), x)

    def _updated(self, out: Tensor, x: Tensor) -> Tensor:
        rows = self.gate.rows
        change = ((x[rows].to(self.first.dtype) @ self.first) @ self.second).to(out.dtype)
        if isinstance(rows, slice):
            out[rows] += change
        else:
            out.index_add_(0, rows, change)
        return out
