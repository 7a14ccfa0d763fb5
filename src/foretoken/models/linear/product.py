"""What every product of rows with a weight offers, however the weight is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Product(Protocol):
    """``x -> x W^T (+ bias)``: a laid-out weight, one in few bits, or several side by side."""

    @property
    def alone(self) -> bool:
        """Whether a row's bits do not depend on the other rows."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [n, in] -> [n, out] in the dtype of ``x``."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out], in one call where there is one."""


class QuantisedLayer(nn.Module, ABC):
    """A linear layer whose weights are quantised for good: everybody leaves them as they are."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the model."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Memory of the weight."""

    @staticmethod
    @abstractmethod
    def joined(linears: Sequence[Any]) -> Product:
        """The products of several layers of one input, some of which may be plain ones."""


def has_quantised(model: nn.Module) -> bool:
    """Whether any layer below ``model`` is one of these."""
    return any(isinstance(module, QuantisedLayer) for module in model.modules())
