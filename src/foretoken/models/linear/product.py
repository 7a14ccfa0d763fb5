"""What every product of rows with a weight offers, however the weight is stored."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """``x -> x W^T (+ bias)``: a laid-out weight, one in few bits, or several side by side."""

    @property
    def alone(self) -> bool:
        """Whether a row's bits do not depend on the other rows."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [n, in] -> [n, out] in the dtype of ``x``."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out], in one call where there is one."""
