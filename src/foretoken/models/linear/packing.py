"""Linear layers on CPU whose weights are packed once for the machine (:mod:`foretoken.models.linear.layouts`)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from foretoken.models.linear.layouts import LAYOUTS, NARROW, PlainLayout, WeightLayout, usable_layouts
from foretoken.models.linear.product import Product, QuantisedLinear
from foretoken.models.linear.product_costs import fastest_layout, least_rows
from foretoken.models.network.watch import is_hooked

BLOCK = 32
"""Rows per matrix product if bits must not depend on the number of rows (layouts have their own count).

oneDNN chooses a kernel, and with it the order of its sums, by the number of rows: for bfloat16 weights [out, in] on a
CPU with AMX, one row differs from several if ``in`` is at most 64, and 32 rows from more if it is at least 512.  With a
constant number of rows, a row has the same bits at every index.  For a large model, 32 rows cost as much as one.
"""


def pays_packed(weight: Tensor) -> bool:
    """Whether this bfloat16 weight is faster in oneDNN's layout than in float32, for models that may use either."""
    return "onednn" in usable_layouts(weight.dtype, weight.device) and has_bfloat16()


@cache
def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX512-BF16 or AMX).  With emulation, products of eight rows take
    twice as long as in float32, of twenty-four four times (``docs/log.md``).  Only x86 was measured; elsewhere oneDNN
    decides."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


def draft_projection(weight: Tensor, bias: Tensor | None) -> Projection:
    """Projection with a weight [out, in] that need not be exact: in bfloat16 if that is faster."""
    half = weight.detach().to(torch.bfloat16)
    return Projection(half if pays_packed(half) else weight.detach(), None if bias is None else bias.detach())


class Projection:
    """``x -> x W^T (+ bias)`` for 2-D ``x`` [n, in], in the fastest layout on this machine.

    Args:
        layout: ``"auto"`` (by measurement) or a name from :mod:`foretoken.models.linear.layouts`; the weight stays
            plain if ``half`` cannot hold it or this machine lacks the layout.
        blocks: multiply a constant number of rows at a time, so that a row's bits do not depend on the others.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, layout: str = "auto", blocks: bool = False) -> None:
        self.out_features, self.in_features = (int(side) for side in weight.shape)
        self.dtype = weight.dtype
        self.layout = laid_out(weight, layout)
        self.activations = self.layout.activations
        self.bias = None if bias is None else bias.to(self.activations)
        self.block = self.layout.block if blocks else 0
        fixed = blocks or self.layout.name in ("plain", "native")
        self.least = 1 if fixed else least_rows(self.layout.name, weight.dtype, self.out_features, self.in_features)
        self._filler = weight.new_zeros(self.least - 1, self.in_features, dtype=self.activations)

    @property
    def weight(self) -> Tensor:
        return self.layout.weight

    @property
    def alone(self) -> bool:
        return self.block > 0 or self.layout.block == 0

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad and self.layout.name != "plain":  # packed products have no gradient
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        out = self._apply(x.to(self.activations))
        return out.to(x.dtype)

    def _apply(self, x: Tensor) -> Tensor:
        if self.block:
            return _in_blocks(self._product, x, self.block)
        if len(x) < self.least:
            return self._product(torch.cat((x, self._filler[len(x) - 1 :])))[: len(x)]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return self.layout(x, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.block or len(x) < self.least or x.dtype != self.activations or residual.dtype != self.activations:
            return residual + self(x)
        return self.layout.plus(x, self.bias, residual)


def laid_out(weight: Tensor, layout: str) -> WeightLayout:
    """The weight in the given layout, or in its fastest one; plain if that is impossible."""
    usable = usable_layouts(weight.dtype, weight.device)
    if layout != "auto":
        return _in_layout(weight, layout if layout in usable else "plain") or PlainLayout(weight)
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    fastest = _in_layout(weight, fastest_layout(weight.dtype, [shape], usable))
    unconditional = [name for name in usable if name != "half"]  # half depends on the weight's numbers
    return fastest or _in_layout(weight, fastest_layout(weight.dtype, [shape], unconditional)) or PlainLayout(weight)


def _in_layout(weight: Tensor, layout: str) -> WeightLayout | None:
    try:
        return LAYOUTS[layout](weight)
    except ValueError:
        return None


class Home:
    """A model whose linear layers are replaced by projections.

    Locations of its layers are cached until someone else changes them: walking a model of hundreds of layers for each
    of them would take longer than packing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places: dict[int, tuple[nn.Module, str]] = {}
        self._tied: set[int] = set()

    def take_place(self, linears: Sequence[nn.Linear], projection: Projection) -> None:
        """Replace ``linears`` by their concatenated projection, so that their weights exist only once."""
        start = 0
        for linear in linears:
            stop = start + linear.out_features
            if projection.layout.name == "plain" and len(linears) > 1:
                linear.weight = nn.Parameter(projection.weight[start:stop], requires_grad=False)
            elif projection.layout.name != "plain":
                parent, name = self._slot_of(linear)
                packed = PackedLinear(projection, start, stop, id(linear.weight) in self._tied)
                setattr(parent, name, packed)
                self._places[id(packed)] = (parent, name)
            start = stop

    def _slot_of(self, linear: nn.Module) -> tuple[nn.Module, str]:
        slot = self._places.get(id(linear))
        if slot is None or getattr(slot[0], slot[1], None) is not linear:
            self._places = {id(child): (parent, name) for parent, name, child in children_of(self.model)}
            self._tied = embedded_in(self.model)
        return self._places[id(linear)]


@dataclass(frozen=True)
class Packing:
    """Conversion of a model's linear layers to projections.

    Attributes:
        layout: layout of their weights, ``"auto"`` or a name from :mod:`foretoken.models.linear.layouts`.
        blocks: whether a row's bits must not depend on the number of rows.
        home: the model whose layers the projections replace; ``None``: they are copies beside the model.
    """

    layout: str = "auto"
    blocks: bool = False
    home: Home | None = None

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, device: torch.device, blocks: bool, in_place: bool) -> Packing:
        """The packing of a whole model: all 16-bit weights get one layout, so that activations have one dtype
        throughout."""
        shapes = [tuple(m.weight.shape) for m in _plain_linears(model)]
        narrow = dtype in NARROW and shapes
        layout = fastest_layout(dtype, shapes, usable_layouts(dtype, device)) if narrow else "auto"
        return cls(layout, blocks, Home(model) if in_place else None)

    @property
    def way(self) -> str:
        """The layout, and whether it replaces the model's layers."""
        return self.layout if self.home is None else f"{self.layout} in place"

    def activations(self, dtype: torch.dtype) -> torch.dtype:
        """Best dtype of activations for projections of ``dtype`` weights."""
        return torch.float32 if self.layout == "half" else dtype

    def projection(self, *linears: Any) -> Product:
        """One projection with the concatenated outputs of all layers."""
        quantised = next((linear for linear in linears if isinstance(linear, QuantisedLinear)), None)
        if quantised is not None:  # quantised layers stay as they are
            return quantised.joined(linears)
        alone = len(linears) == 1
        weight = linears[0].weight.detach() if alone else torch.cat([linear.weight.detach() for linear in linears])
        projection = Projection(weight, joined_bias(linears), self.layout, self.blocks)
        if self.home is not None:
            self.home.take_place(linears, projection)
        return projection


def _in_blocks(product: Callable[[Tensor], Tensor], x: Tensor, block: int = BLOCK) -> Tensor:
    """``product(x)`` for x [n, in], ``block`` rows at a time (the last block is zero-padded)."""
    n = len(x)
    x = F.pad(x, (0, 0, 0, -n % block))
    return torch.cat([product(part) for part in x.split(block)])[:n]


class BlockedProducts(TorchFunctionMode):
    """Context in which every linear layer of a model multiplies ``BLOCK`` rows at a time; nothing is modified."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept ``linear``, and ``addmm`` (GPT-2's layers)."""
        kwargs = kwargs or {}
        if func is F.linear:
            x, *rest = args
            rows = _in_blocks(lambda part: F.linear(part, *rest, **kwargs), x.reshape(-1, x.shape[-1]))
            return rows.view(*x.shape[:-1], -1)
        if func is torch.addmm and args[0].dim() == 1:
            bias, x, weight = args
            return _in_blocks(lambda part: torch.addmm(bias, part, weight, **kwargs), x)
        return func(*args, **kwargs)


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear`` whose weight went into a projection, alone or with others.

    Args:
        start, stop: range of the layer's outputs; by default all.
        tied: whether an embedding also holds the weight.
    """

    def __init__(self, projection: Projection, start: int = 0, stop: int | None = None, tied: bool = False) -> None:
        super().__init__()
        self.projection, self.start, self.tied = projection, start, tied
        self.stop = projection.out_features if stop is None else stop
        self.in_features, self.out_features = projection.in_features, self.stop - start

    @property
    def is_whole(self) -> bool:
        """Whether no other layer shares the projection."""
        return self.out_features == self.projection.out_features

    @property
    def weight(self) -> Tensor:
        """The original weight [out, in]; a copy, computed on every access, whose changes have no effect."""
        return self.projection.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """[out], or ``None``."""
        bias = self.projection.bias
        return None if bias is None else bias[self.start : self.stop].to(self.projection.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same as ``nn.Linear``: [..., in] -> [..., out]."""
        out = self.projection(x.reshape(-1, self.in_features))
        return out[:, self.start : self.stop].view(*x.shape[:-1], self.out_features)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state:  # which load_state_dict(strict=False) would drop without a word
            raise ValueError(f"{prefix}weight is packed: call llm.target.unpack() first, or ft.load(..., pack=False)")


def is_plain(module: nn.Module) -> bool:
    """Whether a module is an unmodified ``nn.Linear`` that uses only its own weight, without hooks.

    Packages for quantised checkpoints keep the class, but replace the weights and ``forward`` of its objects.
    """
    its_own = type(module) is nn.Linear and "weight" in module._parameters and "forward" not in vars(module)
    return its_own and not is_hooked(module)


def _plain_linears(model: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in model.modules() if isinstance(module, nn.Linear) and is_plain(module))


def dtype_of(linear: Any) -> torch.dtype:
    """Weight dtype of a linear layer (packed, quantised or plain), without unpacking it."""
    if isinstance(linear, PackedLinear):
        return linear.projection.dtype
    return linear.dtype if isinstance(linear, QuantisedLinear) else linear.weight.dtype


def joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """The concatenated biases of linear layers, zeros for a layer without one; ``None`` if none has one."""
    biases: list[Tensor | None] = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    return torch.cat([
        like.new_zeros(linear.out_features) if bias is None else bias
        for linear, bias in zip(linears, biases, strict=True)
    ])  # fmt: skip


def joined_weight(linears: Sequence[Any]) -> Tensor:
    """Concatenated weights of linear layers [sum of outs, in]; a shared projection is unpacked once."""
    projections = {id(getattr(linear, "projection", linear)): linear for linear in linears}
    first, last = linears[0], linears[-1]
    if len(projections) == 1 and isinstance(first, PackedLinear):
        size = sum(linear.out_features for linear in linears)
        if last.stop - first.start == size:
            return first.projection.weight[first.start : last.stop]
    weights = [linear.weight.detach() for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def pack_linears(model: nn.Module, packing: Packing = Packing()) -> int:
    """Replace every ``nn.Linear`` below ``model`` by a packed layer if that is faster; return the number replaced.

    Weights shared with an embedding stay plain, as the embedding requires.  Layers are packed one by one, so that no
    second copy of all weights exists.
    """
    count, tied = 0, embedded_in(model)
    for parent, name, linear in list(children_of(model)):
        if not isinstance(linear, nn.Linear) or not is_plain(linear) or id(linear.weight) in tied:
            continue
        bias = None if linear.bias is None else linear.bias.detach()
        projection = Projection(linear.weight.detach(), bias, packing.layout, packing.blocks)
        if projection.layout.name != "plain":
            setattr(parent, name, PackedLinear(projection))
            count += 1
    return count


def unpack_linears(model: nn.Module) -> int:
    """Restore the plain ``nn.Linear`` of every packed layer below ``model``, with the same values; return their
    number."""
    count = 0
    for parent, name, packed in list(children_of(model)):
        if isinstance(packed, PackedLinear):
            setattr(parent, name, plain_linear(packed))
            count += 1
    tie: Any = getattr(model, "tie_weights", None)
    if count and tie is not None:
        tie()  # restores a head that shares the embedding's weight
    return count


def plain_linear(packed: PackedLinear) -> nn.Linear:
    """The ``nn.Linear`` that a packed layer replaced."""
    bias = packed.bias
    plain = nn.Linear(packed.in_features, packed.out_features, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(packed.weight.clone(), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain.train(packed.training)


def check_packable(model: Any) -> None:
    """Raise ``ValueError`` if none of the model's weights can be packed."""
    kinds = {(m.weight.device, m.weight.dtype) for m in _plain_linears(model)}
    if not kinds:
        raise ValueError(f"pack=True: {type(model).__name__} has no torch.nn.Linear layers that could be packed")
    if all(usable_layouts(dtype, device) == ("plain",) for device, dtype in kinds):
        device, dtype = min(kinds, key=str)
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"pack=True: {name} weights on {device} cannot be packed on this machine: leave out pack")


def weight_bytes(model: nn.Module, products: Sequence[Any] = ()) -> int:
    """Bytes of a model's weights, including packed ones and those of ``products``, each counted once."""
    parts = [part for product in products for part in getattr(product, "products", [product])]
    packed = [m.projection for m in model.modules() if isinstance(m, PackedLinear)]
    projections = {id(p): p for p in (*packed, *parts) if isinstance(p, Projection)}.values()
    plain = [p.weight for p in projections if p.layout.name == "plain"]
    tensors = [*model.parameters(), *plain, *(p.bias for p in projections if p.bias is not None)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    distinct = {storage._cdata: storage.nbytes() for storage in storages}  # not every device has data pointers
    quantised = sum(getattr(m, "packed_bytes", 0) for m in model.modules())
    return sum(distinct.values()) + sum(p.layout.num_bytes for p in projections if p.layout.name != "plain") + quantised


def shapes_of(model: nn.Module) -> set[tuple[int, int]]:
    """Shapes [out, in] of a model's matrices; fused ones count as one."""
    packed = {
        (m.projection.out_features, m.projection.in_features) for m in model.modules() if isinstance(m, PackedLinear)
    }
    return packed | {(m.out_features, m.in_features) for m in model.modules() if isinstance(m, nn.Linear)}


def num_parameters(model: nn.Module) -> int:
    """Number of a model's parameters, packed ones included."""
    packed: list[Any] = [m for m in model.modules() if isinstance(m, PackedLinear | QuantisedLinear)]
    packed = [m for m in packed if isinstance(m, QuantisedLinear) or not m.tied]
    num_packed = sum(m.out_features * (m.in_features + (m.bias is not None)) for m in packed)
    return sum(p.numel() for p in model.parameters()) + num_packed


def children_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def embedded_in(model: nn.Module) -> set[int]:
    """Ids of embedding weights."""
    return {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, nn.Embedding)}
