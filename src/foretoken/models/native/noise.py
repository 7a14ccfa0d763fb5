"""Numbers of a request's noise from our library: Philox bits, and logarithms that are equal on all machines."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretoken.core.noise import Source
from foretoken.models.native.library import address, function, why_not


def noise_source() -> Source | None:
    """The fastest source on this machine; ``None``: NumPy's."""
    return NativeSource() if why_not() is None else None


class NativeSource:
    """A :class:`~foretoken.core.noise.Source`; its logarithms may differ from NumPy's in the last bit."""

    def exponentials(self, seed: int, position: int, size: int) -> Tensor:
        numbers = torch.empty(size, dtype=torch.float64)
        counter = np.array([seed, position], dtype=np.uint64)
        function("exponentials", "pnp")(counter.ctypes.data, size, address(numbers))
        return numbers

    def exponentials_of(self, seed: int, position: int, tokens: Tensor) -> Tensor:
        numbers = torch.empty(len(tokens), dtype=torch.float64)
        counter = np.array([seed, position], dtype=np.uint64)
        function("exponentials_of", "ppnp")(counter.ctypes.data, address(tokens), len(tokens), address(numbers))
        return numbers

    def negative_logs(self, numbers: Tensor) -> Tensor:
        function("negative_logs", "pn")(address(numbers), len(numbers))
        return numbers
