"""A Transformers network for a runner: the inputs of its forward, and the fastest way to run it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from foretoken.models.base import CapabilityError
from foretoken.models.cache.masks import LayerMask
from foretoken.models.checks.fast_paths import Checks, Probe, probe_ids
from foretoken.models.forward.attention import attention_for
from foretoken.models.forward.lean import LeanForward, build_lean
from foretoken.models.forward.native import NativeForward, fastest_of
from foretoken.models.forward.public import lay_out, run_public
from foretoken.models.linear.packing import Packing, unpack_linears
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.capabilities import detect
from foretoken.models.network.extra import ExtraRows, check_rows
from foretoken.models.network.layers import LayerPlan, check_sublayers
from foretoken.models.network.placement import device_of
from foretoken.models.network.rotary import ChangingRotary, context_of
from foretoken.models.network.taps import decoder_layers
from foretoken.models.network.traits import attention_configs, cache_argument, context_length_of, eos_ids, layer_masks
from foretoken.models.network.watch import has_hooks
from foretoken.models.refusals import Refusal, check_exact, refusal


class SecondWeights(Protocol):
    """Other weights for a network of the same shape."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def fast(self) -> LeanForward | None:
        """The lean or native forward with these weights; ``None``: the public one."""

    def run(self, network: Network, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed, and taps; keys and values go to the call's cache."""


class AddedWeights:
    """How second weights are made; a network has them for as long as a user holds this."""

    def __init__(self, make: Callable[[Network], SecondWeights]) -> None:
        self.make = make


class Network:
    """Runs the calls of a :class:`~foretoken.models.runner.TreeRunner` through a ``PreTrainedModel``.

    The model object stays unchanged: its attention function is switched only during a forward.

    Args:
        model, exact, lean, in_place, probe: see :class:`~foretoken.models.huggingface.HuggingFaceModel`.

    Attributes:
        depth: number of layers with keys and values; ``num_layers`` is the runner's count.
        fast: the lean or native forward; ``None``: the public one.
        packing: conversion of its linear layers to projections.
        native_off: reason why its forwards are not native (:mod:`foretoken.models.forward.native`); empty if they are.
        refused: faster paths that were tried and rejected.
        rotary: its rotary embeddings that depend on the text length, if any.

    Raises:
        ValueError: an unknown ``exact``.
        CapabilityError: the model cannot take trees (use :func:`foretoken.models.wrap`, which falls back).
    """

    fast: LeanForward | None = None
    native_off: str = "not tried"
    refused: tuple[Refusal, ...] = ()
    packing: Packing

    def __init__(self, model: Any, exact: str, *, lean: bool, in_place: bool, probe: Probe | None) -> None:
        check_exact(exact)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.capabilities = detect(model)
        if not self.capabilities.tree_mask:
            raise CapabilityError(f"this model cannot take trees: {self.capabilities.missing['tree_mask']}")
        self.exact, self.wants_lean, self.in_place, self.probe = exact, lean, in_place, probe
        self.vocab_size = int(self.config.vocab_size)
        self.rotary = ChangingRotary.of(model)
        self.context_length, self.context_why = context_of(model, context_length_of(self.config), self.rotary)
        self.eos_token_ids = eos_ids(model)
        self.device, self.dtype = device_of(model), model.dtype
        self.layer_masks: Mapping[str, LayerMask] = layer_masks(model)
        self.single_mask = set(self.layer_masks) == {""}
        self.attention, self.configs = attention_for(exact, self.device), attention_configs(model)
        self.cache_argument = cache_argument(model)
        self.depth = self.num_layers = len(decoder_layers(model))
        self._added: WeakValueDictionary[str, AddedWeights] = WeakValueDictionary()
        self._second: WeakKeyDictionary[AddedWeights, SecondWeights] = WeakKeyDictionary()
        self.extra: list[ExtraRows] = []
        self.embedding: Any = model  # ids after the vocabulary have the width of its token embedding

    # -- how it is run -----------------------------------------------------------------------------------------------

    def choose(self) -> Checks:
        """Pack the linear layers and build the lean forward, if possible; it calls no hooks."""
        blocks = self.exact == "bitwise"
        self.packing = Packing.of(self.model, self.dtype, self.device, blocks, self.in_place)
        checks = Checks(self, self.probe)
        self.refused, self.fast = (), None
        if self.wants_lean:
            self.native_off = "no lean forward"
            self.fast = build_lean(self, checks)
        if self.fast is None:
            lay_out(self, checks)
        else:
            self.fast = fastest_of(self.fast, checks)
        return checks

    def renew(self) -> None:
        """Inspect the network again after a change."""
        self.device, self.dtype, self._second = device_of(self.model), self.model.dtype, WeakKeyDictionary()
        if self.in_place and not has_hooks(self.model):  # packed layers would not call the hooks
            unpack_linears(self.model)
        self.configs = attention_configs(self.model)

    def unpack(self) -> None:
        """Restore the model's plain linear layers; all forwards are public from now on."""
        unpack_linears(self.model)
        self._second, self.native_off = WeakKeyDictionary(), "the model was unpacked"
        self.wants_lean = self.in_place = False

    def public(self, dtype: torch.dtype | None = None) -> Network:
        """The same network with its public forward, in ``dtype`` if the caller has widened it."""
        clone = copy.copy(self)
        clone.fast, clone.dtype = None, self.dtype if dtype is None else dtype
        return clone

    def over(self, model: Any) -> Network:
        """The same forward for another model of this shape."""
        clone = copy.copy(self)
        clone.model, clone.configs, clone.rotary = model, attention_configs(model), ChangingRotary.of(model)
        clone._second = WeakKeyDictionary()
        if self.fast is not None:
            clone.fast = self.fast.again(clone)
        return clone

    def take_weights(self, source: nn.Module) -> None:
        """Copy the weights of ``source``, a network of the same shape, over the present ones."""
        with torch.no_grad():
            for weight, new in zip(self.model.parameters(), source.parameters(), strict=True):
                weight.copy_(new)
        self._second = WeakKeyDictionary()
        if self.fast is not None:
            self.fast = self.fast.again(self)  # its fused weights are copies

    def refuse(self, path: str, why: str, costs: str) -> None:
        """Record and log that a fast path was rejected."""
        self.refused = (*self.refused, refusal(path, why, costs))

    @property
    def name(self) -> str:
        """Name of the forward: ``"public"``, ``"lean"`` or ``"native"``."""
        return "public" if self.fast is None else self.fast.name

    @property
    def way(self) -> str:
        """Key that distinguishes the different forwards of one network."""
        return f"{self.name} {self.packing.way} {self.exact}"

    @property
    def run_dtype(self) -> torch.dtype:
        """Dtype of hidden states, keys and values: the model's own, except float32 on a lean forward that multiplies
        16-bit weights by float32 activations."""
        dtype: torch.dtype = self.dtype if self.fast is None else self.fast.dtype
        return dtype

    @property
    def spared(self) -> int | None:
        """Number of padding rows from which they are removed; ``None``: never."""
        return None if self.fast is None else self.fast.spared

    @property
    def skips_masked(self) -> bool:
        """Whether attention takes no time for masked slots."""
        return self.fast is not None and self.fast.skips_masked

    @property
    def text(self) -> list[int]:
        """Token ids of a short ordinary text."""
        return probe_ids(self.probe, self.vocab_size)

    # -- tokens behind the vocabulary, weights beside its own --------------------------------------------------------

    def add_rows(self, rows: Tensor, user: object = None) -> int:
        """Add rows [k, D] after the vocabulary and all earlier rows, at least until ``user`` is gone (``None``: for
        ever); return the first id."""
        check_rows(self.embedding, rows)
        self.drop_unused_rows()
        first = self.vocab_size
        for extra in self.extra:
            if extra.rows.data_ptr() == rows.data_ptr() and extra.rows.shape == rows.shape:
                extra.add(user)
                return first
            first += len(extra.rows)
        self.extra.append(ExtraRows(rows))
        self.extra[-1].add(user)
        return first

    def drop_unused_rows(self) -> None:
        """Drop the last rows if they have no user; earlier ones stay, as they determine the ids of later ones."""
        while self.extra and not self.extra[-1].is_used:
            del self.extra[-1]

    @property
    def extra_rows(self) -> Tensor | None:
        """[K, D] embeddings of the ids from ``vocab_size`` on; ``None`` if there are none."""
        self.drop_unused_rows()
        return torch.cat([extra.rows for extra in self.extra]) if self.extra else None

    def add_weights(self, name: str, make: Callable[[Network], SecondWeights]) -> AddedWeights:
        """Add a named second set of weights for plans, unless there is one.  It is dropped with the last holder of the
        result."""
        added = self._added.get(name)
        if added is None:
            added = AddedWeights(make)
            self._keep(added, make(self))
            self._added = WeakValueDictionary({**self._added, name: added})
        return added

    def second(self, name: str) -> SecondWeights:
        """The second weights of this name, made again after the network's own changed."""
        added = self._added_as(name)
        if added not in self._second:
            self._keep(added, added.make(self))
        return self._second[added]

    def _added_as(self, name: str) -> AddedWeights:
        added = self._added.get(name)
        if added is None:
            raise ValueError(f"this model has no second weights {name!r}: add them first")
        return added

    def _keep(self, added: AddedWeights, weights: SecondWeights) -> None:
        self._second = WeakKeyDictionary(self._second)  # a new one: siblings share the old one
        self._second[added] = weights

    # -- calls -------------------------------------------------------------------------------------------------------

    def check(self, plan: LayerPlan) -> None:
        """Raise an error if a plan does not fit."""
        if plan.weights:
            self._added_as(plan.weights)
        plan.check(self.num_layers)
        check_sublayers(self.model, plan)

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        """Logits [n, V] per feed, and taps, for calls that differ in their rows only."""
        weights = calls[0].plan.weights
        if weights:
            return [self.second(weights).run(self, call) for call in calls]
        return [self.run_public(call) for call in calls] if self.fast is None else self.fast.run_all(calls)

    def native(self, plan: LayerPlan) -> NativeForward | None:
        """The native forward, if it runs the plan in one call, logits included; else ``None``."""
        fast = self.second(plan.weights).fast if plan.weights else self.fast
        is_native = isinstance(fast, NativeForward) and fast.model.head.count and plan.is_whole
        return fast if is_native else None  # type: ignore[return-value]

    def run_public(self, call: NetworkCall) -> Outputs:
        """The same for one call, through the model's own forward."""
        return run_public(self, call)
