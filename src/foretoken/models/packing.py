"""Linear layers on CPU: bfloat16 weights packed once instead of at every call.

A plain bfloat16 ``Linear`` hands oneDNN its weight in row order and the kernel repacks it every time; packing once is
about twice as fast for the small matrices of small models and 15 % for large ones (``docs/log.md``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ROWS_HINT = 16
"""The number of rows that the packed layout is chosen for: the size of a usual speculation."""

BLOCK = 32
"""Rows per matrix product where bits must not depend on how many rows there are.

oneDNN chooses a kernel, and with it the order of its sums, by the number of rows: for bfloat16 weights [out, in] on a
CPU with AMX one row differs from several when ``in`` is at most 64, and 32 rows from more when it is at least 512.
With one constant number of rows a row has the same bits at every place.  32 rows cost a large model as much as one.
"""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed path serves this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pays_packed(weight: Tensor) -> bool:
    """Whether this weight is multiplied faster packed than in float32, where a model may have it either way."""
    return can_pack(weight) and has_bfloat16()


@cache
def has_bfloat16() -> bool:
    """Whether the CPU itself multiplies bfloat16 (AVX512-BF16 or AMX).  Others take it apart: there products of eight
    rows take twice as long as in float32, of twenty-four four times (``docs/log.md``).  Only x86 was measured:
    elsewhere oneDNN's word is taken for it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(ask() for ask in asked if ask is not None)


class Projection:
    """``x -> x W^T (+ bias)`` for 2-D ``x`` [n, in], by whichever way is right for the weight.

    Args:
        weight: [out, in].
        bias: [out] or ``None``.
        pack: allow the packed layout (the plain twin is ``pack=False``).
        blocks: always multiply ``BLOCK`` rows at once, so that a row's bits do not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool = True, blocks: bool = False) -> None:
        self.bias = bias
        self.blocks = blocks
        self.packed: Tensor | None = None
        self.weight = weight
        if pack and can_pack(weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
            del self.weight
        else:
            self.transposed = weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out]."""
        return in_blocks(self._apply, x) if self.blocks else self._apply(x)

    @property
    def dense(self) -> Tensor:
        """The weight [out, in] in the plain layout; of a packed one a copy."""
        return self.weight if self.packed is None else self.packed.to_dense()

    def _apply(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            if x.requires_grad:  # the packed product has no derivative
                return F.linear(x, self.packed.to_dense(), self.bias)
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out] in one call."""
        if self.blocks:
            return residual + in_blocks(self._apply, x)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
        if self.bias is not None:
            return residual + F.linear(x, self.weight, self.bias)
        return torch.addmm(residual, x, self.transposed)


def in_blocks(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``product(x)`` for x [n, in], computed on ``BLOCK`` rows at a time (the last block is filled up with zeros)."""
    n = len(x)
    x = F.pad(x, (0, 0, 0, -n % BLOCK))
    return torch.cat([product(part) for part in x.split(BLOCK)])[:n]


class BlockedProducts(TorchFunctionMode):
    """Inside this context every linear layer of a model multiplies ``BLOCK`` rows at a time; nothing is modified."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept ``linear``, and ``addmm`` (GPT-2's layers)."""
        kwargs = kwargs or {}
        if func is F.linear:
            x, *rest = args
            rows = in_blocks(lambda part: F.linear(part, *rest, **kwargs), x.reshape(-1, x.shape[-1]))
            return rows.view(*x.shape[:-1], -1)
        if func is torch.addmm and args[0].dim() == 1:
            bias, x, weight = args
            return in_blocks(lambda part: torch.addmm(bias, part, weight, **kwargs), x)
        return func(*args, **kwargs)


class PackedLinear(nn.Module):
    """Drop-in for a bfloat16 ``nn.Linear`` on CPU, for models that the library loaded itself."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.projection = Projection(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    @property
    def weight(self) -> Tensor:
        """[out, in] in the plain layout: a copy, made every time that it is asked for."""
        return self.projection.dense

    @property
    def bias(self) -> Tensor | None:
        """[out], or ``None``."""
        return self.projection.bias

    def forward(self, x: Tensor) -> Tensor:
        """Same as ``nn.Linear``: [..., in] -> [..., out]."""
        return self.projection(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: Any) -> int:
    """Replace every bfloat16 ``nn.Linear`` below ``model`` by its packed twin; returns how many.

    Weights that are shared with an embedding stay as they are (the embedding needs the plain layout).
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight) and id(child.weight) not in embeddings:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
