"""Memory layouts of linear weights on the CPU.

``plain``
    The weight as it is, multiplied by ``torch.nn.functional.linear``.
``onednn``
    oneDNN's blocked layout, made once.  A plain bfloat16 layer hands oneDNN its weight in row order, which repacks it
    at every call; float32 products of two rows and more gain as well, where MKL's kernels are made for many rows.
``native``
    Blocks of 32 outputs for a kernel of our own (:mod:`foretoken.models.native`): bfloat16 on x86-64 CPUs from AVX2 on.
``half``
    Float16 weights for FBGEMM's kernels, which widen them in registers and multiply float32 activations: half the bytes
    of float32 and the same arithmetic.  A bfloat16 number has 8 significant bits and a float16 number has 11, so that,
    times a power of two per weight, float16 holds the very same numbers.  The only ones that it rounds are less than
    2^-32 of the largest, by less than 2^-40 of it, where the sum of the products is rounded at 2^-24
    (:func:`halved`); a weight with more significant bits is not laid out so.  On a CPU without bfloat16 products a
    round of six rows then costs little more than one of one row.

The choice between them is measured (:mod:`foretoken.models.linear.product_costs`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models import native
from foretoken.models.native import bfloat16, linear
from foretoken.models.native.library import address
from foretoken.models.native.linear import Linear

NARROW = (torch.bfloat16, torch.float16)


class WeightLayout(ABC):
    """A weight [out, in] and its matrix product.

    Attributes:
        name: ``plain``, ``onednn``, ``native`` or ``half``.
        block: rows per product if a row's bits must not depend on the number of rows (see
            :data:`foretoken.models.linear.packing.BLOCK`); 0 if they never do.
        activations: dtype of its activations.
    """

    name: ClassVar[str]
    block: ClassVar[int] = 32
    activations: torch.dtype

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T (+ bias)`` [n, out] for x [n, in] in ``activations``."""

    def plus(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """``residual + x W^T (+ bias)`` [n, out]; the residual is not modified."""
        return self(x, bias).add_(residual)

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The original weight [out, in]; a copy, unless the layout is plain."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the weight."""


class PlainLayout(WeightLayout):
    """The weight in row order."""

    name = "plain"

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._transposed, self.activations = weight, weight.t(), weight.dtype

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def plus(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if bias is not None:
            return residual + F.linear(x, self._weight, bias)
        return torch.addmm(residual, x, self._transposed)

    @property
    def weight(self) -> Tensor:
        return self._weight

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes


class OneDnnLayout(WeightLayout):
    """oneDNN's blocked layout, bfloat16 or float32."""

    name = "onednn"

    def __init__(self, weight: Tensor) -> None:
        # The layout is optimised for 16 rows, a usual speculation.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        self.activations = weight.dtype
        self._bytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    def plus(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, bias, "add")

    @property
    def weight(self) -> Tensor:
        return self.packed.to_dense()

    @property
    def num_bytes(self) -> int:
        """Bytes in row order (without the padding of blocks)."""
        return self._bytes


class NativeLayout(WeightLayout):
    """Blocks of 32 outputs for our bfloat16 kernel, which sums every row in the same order."""

    name = "native"
    block = 0

    def __init__(self, weight: Tensor) -> None:
        self.packed, self._out, self.activations = bfloat16.laid_out(weight), len(weight), weight.dtype

    def linear(self) -> Linear:
        """The weight in the kernels' format, without its bias."""
        return Linear(linear.BFLOAT16, 2 * self.packed.shape[1], self._out, 0, address(self.packed))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, bias)

    def plus(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return self._product(x, bias, residual)

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        described, offset = self.linear(), None if bias is None else bias.float()
        described.bias = address(offset)
        return linear.product(x, described, residual)

    @property
    def weight(self) -> Tensor:
        return bfloat16.in_rows(self.packed, self._out)

    @property
    def num_bytes(self) -> int:
        """Bytes in row order (without the padding of the last block)."""
        return 2 * self._out * 2 * self.packed.shape[1]


@dataclass(frozen=True)
class Halved:
    """A weight in float16.

    Attributes:
        scaled: [out, in] float32, the weight times ``scale``.
        scale: a power of two.
        rounded: flat indices of the few tiny numbers rounded by float16.
    """

    scaled: Tensor
    scale: float
    rounded: Tensor


class HalfLayout(WeightLayout):
    """Float16 weights and float32 activations (FBGEMM)."""

    name = "half"
    block = 6  # row block of FBGEMM's AVX2 kernels: more only costs time

    def __init__(self, weight: Tensor) -> None:
        half = halved(weight)
        if half is None:
            raise ValueError("float16 does not hold this weight")
        self.activations = torch.float32
        self._dtype, self._inverse, self._bytes = weight.dtype, 1.0 / half.scale, 2 * weight.numel()
        self._rounded, self._originals = half.rounded, weight.flatten()[half.rounded]
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(half.scaled, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The activations absorb the power of two, without rounding."""
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x * self._inverse, self._packed)
        return out if bias is None else out.add_(bias)

    @property
    def weight(self) -> Tensor:
        stored = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        dense = (stored.float() * self._inverse).to(self._dtype)
        dense.view(-1)[self._rounded] = self._originals
        return dense

    @property
    def num_bytes(self) -> int:
        return self._bytes


LayOut = Callable[[Tensor], WeightLayout]
"""Constructor of a layout from a weight [out, in]."""
LAYOUTS: dict[str, LayOut] = {cls.name: cls for cls in (PlainLayout, OneDnnLayout, NativeLayout, HalfLayout)}


def halved(weight: Tensor) -> Halved | None:
    """``weight`` in float16; ``None`` if it has more significant bits or too wide a range."""
    scaled = weight.to(torch.float32, copy=True)
    low, high = (float(end) for end in torch.aminmax(scaled)) if weight.numel() else (0.0, 0.0)
    top = max(-low, high)
    if not math.isfinite(top):
        return None
    exponent = 15 - math.frexp(top)[1] if top else 0  # the largest number is then between 2^14 and 2^15
    if abs(exponent) > 60:  # a larger scale could make activations underflow
        return None
    scaled *= 2.0**exponent
    rounded = (scaled.half().float() != scaled).flatten().nonzero()[:, 0]
    # About 1e-9 of random weights are small enough to be rounded by float16.
    if len(rounded) > 1e-3 * weight.numel() or bool((scaled.flatten()[rounded].abs() >= 2.0**-14).any()):
        return None
    return Halved(scaled, 2.0**exponent, rounded)


def usable_layouts(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Layouts that this machine supports for weights of a dtype and device, ``plain`` first."""
    on_cpu = torch.device(device).type == "cpu"
    return tuple(name for name in LAYOUTS if name == "plain" or (on_cpu and has_layout(name, dtype)))


@cache
def has_layout(name: str, dtype: torch.dtype) -> bool:
    """Whether this machine and PyTorch build have a layout's operators for a dtype, and they multiply correctly."""
    cls = LAYOUTS[name]
    if cls is OneDnnLayout:
        able = torch.backends.mkldnn.is_available() and dtype in (torch.bfloat16, torch.float32)
        able = able and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    elif cls is NativeLayout:
        able = dtype == torch.bfloat16 and native.why_not() is None
    else:
        able = torch.backends.quantized.engine in ("fbgemm", "x86") and dtype in (torch.float32, *NARROW)
    if not able:
        return False
    try:
        layout = cls(torch.eye(16, dtype=dtype))
        x = torch.arange(16, dtype=layout.activations).expand(2, 16).contiguous()
        return torch.equal(layout(x, None), x) and torch.equal(layout.weight, torch.eye(16, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
