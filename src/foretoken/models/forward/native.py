"""A whole forward in one call of our library, for Llama-like models in bfloat16 or with our quantised weights.

Its twin is the lean forward (:mod:`foretoken.models.forward.lean`): it shares families, parts and packed weights, and
copies nothing.  Instead of eighteen tensor calls per layer, it describes the model to ``native/forward.cpp`` once and
makes one call per forward.  Numbers are float32 within a stage and are rounded to bfloat16 at its end, so it rounds in
fewer places than its twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import activations

from foretoken.models.checks.fast_paths import Checks
from foretoken.models.forward.lean import LeanForward
from foretoken.models.forward.lean_layers import CacheRows, ForwardPass, LeanLayer
from foretoken.models.forward.lean_parts import GatedMlp
from foretoken.models.forward.native_parts import Description
from foretoken.models.native import forward as native_forward
from foretoken.models.native import why_not
from foretoken.models.native.library import NotCoveredError
from foretoken.models.native.linear import Linear
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.rotary import LeanTurns

PATH = "native forward"
GELUS_TANH = tuple(
    getattr(activations, name)
    for name in ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation")
    if hasattr(activations, name)
)
"""Classes of gelu's tanh form."""


class NativeForward(LeanForward):
    """The native forward, with the inputs, outputs and weights of its lean twin.

    Raises:
        NotCoveredError: the library lacks a part of the model.
    """

    name = "native"

    def __init__(self, twin: LeanForward) -> None:
        vars(self).update(vars(twin))
        self._twin = twin
        if self.owner.packing.blocks:
            raise NotCoveredError("products are made in blocks of a constant number of rows")
        reason = why_not()
        if reason is not None:
            raise NotCoveredError(reason)
        if self.dtype != torch.bfloat16:
            raise NotCoveredError(f"its states are {str(self.dtype).removeprefix('torch.')}, not bfloat16")
        self.rotary = {kind: rotary.to(torch.float32) for kind, rotary in twin.rotary.items()}
        if self.owner.rotary is not None:
            self.turns = LeanTurns(self.owner.rotary, tuple(self.rotary), torch.float32)
        self.like = torch.empty(self.size.kv_heads, 1, self.size.dim, dtype=self.dtype)
        self._parts = Description()
        self._kinds = tuple(dict.fromkeys(layer.mask for layer in self.layers))
        self.num_kinds = len(self._kinds)
        self.ropes = tuple(dict.fromkeys(layer.rope for layer in self.layers))
        self.model = self._described()
        self._nothing = bytes(len(self.layers))
        self.spared = 1  # it runs no padding

    @property
    def twin(self) -> LeanForward:
        return self._twin

    def again(self, owner: Any) -> LeanForward:
        """The same for other weights; the lean forward if the library does not support them."""
        return native_or(super().again(owner))[0]

    def row_dependent(self) -> str | None:
        """Always ``None``: every kernel works row by row."""
        return None

    # -- the model as data -------------------------------------------------------------------------------------------

    def _described(self) -> native_forward.ModelStruct:
        size, width = self.size, int(self.owner.config.hidden_size)
        if self.layers[0].interleaved or any(layer.parallel for layer in self.layers):
            raise NotCoveredError("its layers combine attention and MLP in an unsupported way")
        layers = self._layers = self._parts.keep(
            native_forward.array(native_forward.LayerStruct, [self._layer(layer) for layer in self.layers])
        )
        sizes = len(self.layers), width, size.heads, size.kv_heads, size.dim
        try:
            head = self._parts.product(self.head)
        except NotCoveredError:  # the only product outside the call
            head = native_forward.ProductStruct(None, 0)
        parts = [Linear.from_address(head.parts + i * ctypes.sizeof(Linear)) for i in range(head.count)]
        self.num_outputs = sum(part.out for part in parts) or width
        return native_forward.ModelStruct(ctypes.addressof(layers), *sizes, self._parts.norm(self.final_norm), head)

    def _layer(self, layer: LeanLayer) -> native_forward.LayerStruct:
        mlp = layer.mlp
        if not layer.native:
            raise NotCoveredError(f"attention with head dimension {layer.size.dim}, or a soft cap, is not supported")
        if not isinstance(mlp, GatedMlp):
            raise NotCoveredError("its MLPs are not gated")
        if layer.out.joined.scale != mlp.output.joined.scale:
            raise NotCoveredError("its sublayers are added with different scales")
        out, down = layer.out, mlp.output
        norms = (layer.norm_attention, out.joined.after, layer.norm_mlp, down.joined.after, layer.q_norm, layer.k_norm)
        products = layer.qkv, out.projection, mlp.gate_up, down.projection
        return native_forward.LayerStruct(
            *map(self._parts.norm, norms),
            *map(self._parts.product, products),
            *(layer.scaling, out.joined.scale),
            *(self._kinds.index(layer.mask), self.ropes.index(layer.rope)),
            *(int(not layer.norms_heads), _activation(mlp.activation)),
        )

    # -- a call ------------------------------------------------------------------------------------------------------

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        taps, plan = calls[0].taps, calls[0].plan
        run, x = self._begin(calls)
        n, count = len(x), len(self.layers)
        states = {name: x.new_empty(x.shape) for name in dict.fromkeys(taps)}
        end = plan.end(count)
        tapped = native_forward.pointers(states.get(f"layer:{i}") for i in range(count + 1))
        want = [
            group.rows.start + group.layout.starts[row] + column
            for group, call in zip(run.groups, calls, strict=True)
            for row, start, stop in call.wanted
            for column in range(start, stop)
        ]
        whole = bool(self.model.head.count)
        output = x.new_empty(len(want), self.num_outputs)
        groups, pointed_to = self._groups(run, calls)
        turns = [run.turns[rope] for rope in self.ropes]
        cos, sin = (native_forward.pointers(tensors) for tensors in zip(*turns, strict=True))
        rows = native_forward.numbers(want)
        x = x.contiguous()
        last = states.get("last")
        call = native_forward.CallStruct(
            *(n, len(run.groups), ctypes.addressof(groups), x.data_ptr(), plan.start, end),
            *(self._skipped(plan.skip_attention), self._skipped(plan.skip_mlp), self.num_kinds, turns[0][0].shape[-1]),
            *(ctypes.addressof(pointers) for pointers in (cos, sin, tapped)),
            *(None if last is None else last.data_ptr(), len(want), ctypes.addressof(rows)),
            *((None, output.data_ptr()) if whole else (output.data_ptr(), None)),
            updated=None if self.gate is None else self.gate.flags(n),
        )
        native_forward.run(self.model, call, torch.get_num_threads())
        del pointed_to
        logits = self.transform_logits(output) if whole else self._logits(output)
        return self._handed_out(run, calls, logits, states)

    def _skipped(self, layers: frozenset[int]) -> bytes:
        return bytes(i in layers for i in range(len(self.layers))) if layers else self._nothing

    def _groups(self, run: ForwardPass, calls: Sequence[NetworkCall]) -> tuple[Any, list[Any]]:
        """The library's groups, and the objects that these point to."""
        pointed_to: list[Any] = []
        groups = [self._group(group, call, pointed_to) for group, call in zip(run.groups, calls, strict=True)]
        return native_forward.array(native_forward.GroupStruct, groups), pointed_to

    def _group(self, group: CacheRows, call: NetworkCall, pointed_to: list[Any]) -> native_forward.GroupStruct:
        cache, layout = group.cache, group.layout
        keys, values = cache.buffers(self.like)
        masks = [None if (mask := group.masks[kind]) is None else mask.contiguous() for kind in self._kinds]
        widths = [layout.width] * layout.b if call.counts is None else list(call.counts)
        arrays = [native_forward.pointers(keys), native_forward.pointers(values)]
        arrays += [native_forward.numbers(cache.starts), native_forward.numbers(widths), native_forward.pointers(masks)]
        pointed_to += [masks, arrays]
        first, second, *others = map(ctypes.addressof, arrays)
        sizes = cache.num_slots, cache.used, cache.low, layout.b, layout.width
        return native_forward.GroupStruct(first, second, *sizes, *others)

    def _handed_out(
        self, run: ForwardPass, calls: Sequence[NetworkCall], logits: Tensor, states: Mapping[str, Tensor]
    ) -> list[Outputs]:
        """Logits per feed, and taps, for every call."""
        outputs: list[Outputs] = []
        for group, call in zip(run.groups, calls, strict=True):
            counts = [stop - start for _, start, stop in call.wanted]
            rows, logits = logits[: sum(counts)], logits[sum(counts) :]
            hidden = {name: group.layout.padded(x[group.rows]) for name, x in states.items()}
            outputs.append((list(rows.split(counts)), hidden))
        return outputs


def _activation(activation: Any) -> int:
    if activation is F.silu:
        return native_forward.SILU
    if isinstance(activation, GELUS_TANH) or (isinstance(activation, nn.GELU) and activation.approximate == "tanh"):
        return native_forward.GELU_TANH
    raise NotCoveredError(f"its activation is {type(activation).__name__}")


def native_or(lean: LeanForward) -> tuple[LeanForward, str]:
    """The native forward and "" if it covers the model, else ``lean`` and the reason."""
    try:
        return NativeForward(lean), ""
    except NotCoveredError as error:
        return lean, str(error)


def fastest_of(lean: LeanForward, checks: Checks) -> LeanForward:
    """The native forward if it covers the model and passes the check, else ``lean``.

    Sets ``owner.native_off`` to the reason if there is none, and records a refusal if it covers the model but fails the
    check.
    """
    owner = lean.owner
    fast, owner.native_off = native_or(lean)
    if fast is lean:
        return lean
    reason = checks.fault(f"{PATH} {owner.way}", lambda: (fast.run, fast.dtype, fast.is_coarse))
    if reason is None:
        owner.native_off = ""
        return fast
    owner.native_off = reason
    owner.refuse(PATH, reason, "a step of a small model takes two to three times as long")
    return lean
