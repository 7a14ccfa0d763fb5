"""A model's own network with low-rank updates of its linear layers for some rows of a forward.

The update is that of Hu et al. 2021 (arXiv 2106.09685), y = W x + scale B A x with A [r, in] and B [out, r]; gating by
row is that of UNO (arXiv 2609.04010).  A row without the update has the same bits as without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.lean_layers import RowLayout
from foretoken.models.forward.native import native_or
from foretoken.models.forward.network import Network
from foretoken.models.linear.packing import PackedLinear, has_bfloat16
from foretoken.models.linear.product import Product, QuantisedLinear
from foretoken.models.linear.updated import RowGate, UpdatedProduct
from foretoken.models.network.alone import alone, only_here
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.taps import decoder_layers
from foretoken.models.network.watch import num_writes
from foretoken.models.variants.own_sequences import OwnSequencesModel

Shape = Sequence[int]
"""[out, in]."""


def linear_shapes(network: nn.Module) -> dict[str, list[int]]:
    """[out, in] of the linear layers common to all decoder layers, by name in the layer, without experts and
    routers."""
    layers = decoder_layers(network)
    layer_shapes = [{name: _shape(m) for name, m in layer.named_modules() if _is_linear(name, m)} for layer in layers]
    shapes = {
        name: shape
        for name, shape in layer_shapes[0].items()
        if all(shapes_of_layer.get(name) == shape for shapes_of_layer in layer_shapes)
    }
    if not shapes:
        kind = type(layers[0]).__name__
        raise CapabilityError(f"the {kind} layers of this target have no nn.Linear in common that could be updated")
    return shapes


def _is_linear(name: str, module: Any) -> bool:
    """Whether a module is a plain, packed or quantised linear layer; experts and routers reorder rows."""
    is_one = isinstance(module, nn.Linear | PackedLinear | QuantisedLinear)
    return is_one and "expert" not in name and name.rpartition(".")[2] not in ("gate", "router")


def _shape(module: Any) -> list[int]:
    return [int(module.out_features), int(module.in_features)]


class LowRankUpdates(nn.Module):
    """Updates of the same linear layers in every decoder layer; B is initially zero.

    Tensor names are those of PEFT's checkpoints, ``layers.0.self_attn.q_proj.lora_A``.

    Args:
        shapes: [out, in] by name in the layer.
        rank: r.
        scale: factor of B A.
    """

    def __init__(self, shapes: Mapping[str, Shape], num_layers: int, rank: int, scale: float) -> None:
        super().__init__()
        self.shapes, self.scale = dict(shapes), scale
        self.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
        for layer in self.layers:
            for name, (out, width) in self.shapes.items():
                holder = layer
                for part in name.split("."):
                    if not hasattr(holder, part):
                        holder.add_module(part, nn.Module())
                    holder = getattr(holder, part)
                holder.lora_A = nn.Parameter(torch.randn(rank, width) / rank**0.5)
                holder.lora_B = nn.Parameter(torch.zeros(out, rank))

    def factors(self, layer: int, name: str) -> tuple[Tensor, Tensor] | None:
        """A [r, in] and B [out, r] of a linear layer; ``None`` if it has no update."""
        if name not in self.shapes:
            return None
        holder: Any = self.layers[layer].get_submodule(name)
        return holder.lora_A, holder.lora_B

    def check(self, network: nn.Module) -> None:
        """Raise ``ValueError`` if the updates do not fit a network."""
        layers = decoder_layers(network)
        if len(layers) != len(self.layers):
            raise ValueError(f"the updates are for {len(self.layers)} layers, and the target has {len(layers)}")
        have = {name: _shape(m) for name, m in layers[0].named_modules() if _is_linear(name, m)}
        for name, shape in self.shapes.items():
            if name not in have:
                raise ValueError(f"the updates are for linear layers {name}, which the target does not have")
            if have[name] != list(shape):
                raise ValueError(f"the update of {name} is {list(shape)}, and the target's layer {have[name]}")


@contextmanager
def updated(network: nn.Module, updates: LowRankUpdates, width: int = 0) -> Iterator[None]:
    """Apply the updates in forwards inside the block, except to the first of every ``width`` tokens (0: to all
    tokens)."""
    handles: list[Any] = []
    try:
        for i, layer in enumerate(decoder_layers(network)):
            for name in updates.shapes:
                module: Any = layer.get_submodule(name)
                a, b = updates.factors(i, name) or (None, None)
                handles.append(module.register_forward_hook(only_here(_after(a, b, updates.scale, width))))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after(a: Any, b: Any, scale: float, width: int) -> Callable[..., Tensor]:
    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        x = args[0]
        if width:
            x = x.reshape(-1, width, x.shape[-1])[:, 1:]
        change = scale * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))
        if not width:
            return output + change
        before = output.reshape(-1, width, output.shape[-1])
        return torch.cat([before[:, :1], before[:, 1:] + change], 1).view(output.shape)

    return after


class _GatedWeights:
    """Runs a network with the updates for every row of a text but the first.

    A network on a lean or native forward gets another one with the same weights, whose products add the updates; on the
    public forward they are added during a call.  Both are rebuilt when the network or the updates change.
    """

    def __init__(self, updates: LowRankUpdates) -> None:
        self.updates = updates
        self._gate = RowGate()
        self._forward: LeanForward | None = None
        self.native_off = ""
        self.fast = None  # only some rows run it
        self._made_of: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.updates.parameters())

    def run(self, network: Network, call: NetworkCall) -> Outputs:
        forward = self.forward_of(network)
        if forward is None:
            with alone(network.model), updated(network.model, self.updates, call.ids.shape[1]):
                return network.run_public(call)
        self._gate.rows = _behind_the_first(call)
        return forward.run_all([call])[0]

    def forward_of(self, network: Network) -> LeanForward | None:
        """The lean or native forward with the updates; ``None`` if the public one runs."""
        if network.fast is None:
            self.native_off = network.native_off
            return None
        made_of = (network.fast, *((w.data_ptr(), num_writes(w)) for w in self.updates.parameters()))
        if made_of != self._made_of:
            self._forward, self._made_of = self._gated(network, network.fast), made_of
        return self._forward

    def _gated(self, network: Network, fast: LeanForward) -> LeanForward | None:
        """The forward with the updates; ``None`` if some belong to layers outside its products."""
        layers, updated = decoder_layers(network.model), set[str]()

        def change(layer: int, product: Product, names: tuple[str, ...]) -> Product:
            updated.update(names)
            modules = [layers[layer].get_submodule(name) for name in names]
            return self._product(layer, product, names, [_shape(m)[0] for m in modules], fast.dtype)

        lean = fast.with_products(change, self._gate)
        if not updated.issuperset(self.updates.shapes):
            self.native_off = "some updates belong to layers that a lean forward does not multiply by itself"
            return None
        if fast is fast.twin:
            self.native_off = network.native_off
            return lean
        gated, self.native_off = native_or(lean)
        return gated

    @torch.no_grad()
    def _product(
        self, layer: int, base: Product, names: tuple[str, ...], outs: Sequence[int], dtype: torch.dtype
    ) -> Product:
        pairs = [self.updates.factors(layer, name) for name in names]
        have = [pair for pair in pairs if pair is not None]
        if not have:
            return base
        first = torch.cat([a for a, _ in have]).to(_product_dtype(dtype, have[0][0].device))
        second = first.new_zeros(sum(outs), len(first))
        row = column = 0
        for out, pair in zip(outs, pairs, strict=True):
            if pair is not None:
                rank = pair[1].shape[1]
                second[row : row + out, column : column + rank] = self.updates.scale * pair[1]
                column += rank
            row += out
        return UpdatedProduct(base, first.t(), second.t(), self._gate)


def _product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of an update's products. A CPU that emulates bfloat16 is several times faster in float32."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16() else dtype


def _behind_the_first(call: NetworkCall) -> Tensor | slice:
    """Flat indices of a call's rows outside the first column."""
    b, width = call.ids.shape
    if b == 1:
        return slice(1, None)
    columns = torch.arange(width, device=call.ids.device).expand(b, -1)
    return RowLayout(b, width, call.counts, call.ids.device).flat(columns).nonzero()[:, 0]


class GatedModel(OwnSequencesModel):
    """A target's network with updates for the drafting rows, over the target's own sequences.

    The first row of every feed has the logits of a forward without updates.
    """

    role = "a draft with updates"

    def __init__(self, target: LanguageModel, updates: LowRankUpdates) -> None:
        name = f"updates {id(updates)}"  # the id is unique while the weights hold the updates
        super().__init__(target, name)
        updates.check(self.target.model)
        self._added = self.target.forwards.add_weights(name, lambda _: _GatedWeights(updates))

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + self.weights.nbytes

    @property
    def forward_name(self) -> str:  # type: ignore[override]
        gated: Any = self.weights
        forward = gated.forward_of(self.target.forwards)
        return "public" if forward is None else forward.name

    @property
    def native_off(self) -> str:
        """Why drafts do not run in our library; empty if they do."""
        gated: Any = self.weights
        gated.forward_of(self.target.forwards)
        return str(gated.native_off)
