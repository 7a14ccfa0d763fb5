"""Network parts as structures for our library, with everything that these point to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.forward.lean_parts import LeanRmsNorm
from foretoken.models.linear.layouts import NativeLayout
from foretoken.models.linear.packing import Projection
from foretoken.models.linear.product import SideBySide
from foretoken.models.linear.quantised_products import NativeProduct
from foretoken.models.linear.updated import UpdatedProduct
from foretoken.models.native import forward as native_forward
from foretoken.models.native.library import NotCoveredError, address
from foretoken.models.native.linear import Linear
from foretoken.models.network.watch import Watch, has_hooks


def watched(network: nn.Module) -> Watch:
    """Detects changes of a drafter's network whose weights the library uses.  Raises ``NotCoveredError`` for hooks."""
    if has_hooks(network):
        raise NotCoveredError("hooks are attached to the network, which only its own forward calls")
    return Watch(network)


class Description:
    """Structures and the objects that they point to, which live as long as this object."""

    def __init__(self) -> None:
        self._owners: list[Any] = []

    def keep(self, thing: Any) -> Any:
        """Keep a reference to ``thing`` and return it."""
        self._owners.append(thing)
        return thing

    def norm(self, norm: Any) -> native_forward.NormStruct:
        """An RMS norm of the lean forward or of a head's network, or none.  Raises ``NotCoveredError`` for others."""
        if norm is None:
            return native_forward.NormStruct(None, 0.0)
        if not isinstance(norm, LeanRmsNorm | nn.RMSNorm):
            raise NotCoveredError("its norms are not RMS norms")
        eps = torch.finfo(torch.float32).eps if norm.eps is None else float(norm.eps)
        return native_forward.NormStruct(self.keep(norm.weight.detach().float().contiguous()).data_ptr(), eps)

    def product(self, *projections: Any) -> native_forward.ProductStruct:
        """Linear layers with a common input.  Raises ``NotCoveredError`` for an unsupported weight."""
        if len(projections) == 1 and isinstance(projections[0], UpdatedProduct):
            return self._updated(projections[0])
        parts = [
            part
            for projection in projections
            for part in (projection.products if isinstance(projection, SideBySide) else [projection])
        ]
        linears = self.keep(native_forward.array(Linear, [self._linear(part) for part in parts]))
        return native_forward.ProductStruct(ctypes.addressof(linears), len(parts))

    def _updated(self, updated: UpdatedProduct) -> native_forward.ProductStruct:
        product = self.product(updated.base)
        odd = len(updated.second) % 2  # kernels read pairs of inputs
        factors = F.pad(updated.first, (0, odd)), F.pad(updated.second, (0, 0, 0, odd))
        linears = [self.keep(self._native(NativeLayout(factor.t().to(torch.bfloat16)))) for factor in factors]
        products = [native_forward.ProductStruct(ctypes.addressof(linear), 1) for linear in linears]
        product.update = ctypes.addressof(self.keep(native_forward.UpdateStruct(*products)))
        return product

    def products(self, projections: Sequence[Any]) -> int:
        """Address of an array of products with separate inputs."""
        described = [self.product(projection) for projection in projections]
        return ctypes.addressof(self.keep(native_forward.array(native_forward.ProductStruct, described)))

    def _linear(self, product: Any) -> Linear:
        owner = product.layout if isinstance(product, Projection) and not product.block else product
        if not isinstance(owner, NativeLayout | NativeProduct):
            raise NotCoveredError("its weights are laid out for PyTorch's matrix products")
        wide = None if product.bias is None else product.bias.float().contiguous()
        described = self._native(owner)
        described.bias = address(self.keep(wide))
        return described

    def _native(self, owner: NativeLayout | NativeProduct) -> Linear:
        return self.keep(owner).linear()


class BestTokens:
    """The likeliest ``count`` tokens of each row, filled in by the library through ``struct``."""

    def __init__(self, rows: int, count: int, scale: float) -> None:
        self.count = count
        self._values, self._places = (ctypes.c_float * (rows * count))(), (ctypes.c_int32 * (rows * count))()
        addresses = ctypes.addressof(self._values), ctypes.addressof(self._places)
        self.struct = native_forward.BestStruct(count, scale, *addresses)

    def values(self) -> list[list[float]]:
        """Log-probabilities per row, largest first."""
        return [self._values[i : i + self.count] for i in range(0, len(self._values), self.count)]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """[rows, count] log-probabilities, largest first, and their indices in the logits."""
        values = torch.frombuffer(self._values, dtype=torch.float32)
        indices = torch.frombuffer(self._places, dtype=torch.int32).long()
        return values.view(-1, self.count), indices.view(-1, self.count)

    def tokens(self, ids: Sequence[int] | None) -> list[list[int]]:
        """The target's ids per row; ``ids`` maps a draft vocabulary, if there is one."""
        rows = [self._places[i : i + self.count] for i in range(0, len(self._places), self.count)]
        return rows if ids is None else [[ids[index] for index in row] for row in rows]
