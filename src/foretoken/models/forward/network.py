"""A Transformers network as a runner sees it: what its forward depends on, and the fastest way there is to run it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.models.base import CapabilityError
from foretoken.models.cache.masks import LayerMask
from foretoken.models.checks.fast_paths import Checks, Probe
from foretoken.models.forward.attention import attention_for
from foretoken.models.forward.lean import LeanForward, build_lean
from foretoken.models.forward.native import NativeForward, fastest_of
from foretoken.models.forward.public import lay_out, run_public
from foretoken.models.linear.packing import Packing, unpack_linears
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.capabilities import detect
from foretoken.models.network.extra import check_rows
from foretoken.models.network.layers import LayerPlan, check_sublayers
from foretoken.models.network.placement import device_of
from foretoken.models.network.rotary import ChangingRotary, context_of
from foretoken.models.network.taps import decoder_layers
from foretoken.models.network.traits import attention_configs, cache_argument, context_length_of, eos_ids, layer_masks
from foretoken.models.network.watch import has_hooks
from foretoken.models.refusals import Refusal, refusal

EXACT = ("distribution", "bitwise", "approximate")


class SecondWeights(Protocol):
    """A network of the same shape whose weights are others."""

    @property
    def nbytes(self) -> int:
        """Memory that they take."""

    @property
    def fast(self) -> LeanForward | None:
        """The lean or native forward over them; ``None``: the public one."""

    def run(self, network: Network, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed and taps, with the keys and values in the cache of the call."""


class Network:
    """Runs the calls of a :class:`~foretoken.models.runner.TreeRunner` through a ``PreTrainedModel``.

    The model object is left as it was found: the attention function is switched for the duration of a forward only.

    Args:
        model, exact, lean, in_place, probe: as for :class:`~foretoken.models.huggingface.HuggingFaceModel`.

    Attributes:
        depth: how many of its layers keep keys and values; ``num_layers`` is what a runner counts.
        fast: the lean or native forward; ``None``: the public one.
        packing: how its linear layers become projections.
        native_off: why its forwards are not native ones (:mod:`foretoken.models.forward.native`); empty where they are.
        refused: faster paths that were tried and not taken.
        rotary: its rotary embeddings that change with the length of the text, if any do.
        second: other weights by name, for plans that ask for them.

    Raises:
        ValueError: an unknown ``exact``.
        CapabilityError: the model cannot take trees (use :func:`foretoken.models.wrap`, which falls back).
    """

    fast: LeanForward | None = None
    native_off: str = "not tried"
    refused: tuple[Refusal, ...] = ()
    packing: Packing

    def __init__(self, model: Any, exact: str, *, lean: bool, in_place: bool, probe: Probe | None) -> None:
        if exact not in EXACT:
            raise ValueError(f"exact must be 'distribution', 'bitwise' or 'approximate', not {exact!r}")
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
        self.second: dict[str, SecondWeights] = {}
        self.extra: list[Tensor] = []
        self.embedding: Any = model  # whose token embedding ids behind the vocabulary are as wide as

    # -- how it is run -----------------------------------------------------------------------------------------------

    def choose(self) -> Checks:
        """Lay the linear layers out and build the lean forward, where that can be: it calls no hooks."""
        blocks = self.exact == "bitwise"
        self.packing = Packing.of(self.model, self.dtype, self.device, blocks, self.in_place)
        checks = Checks(self, self.probe)
        self.refused, self.fast, self.native_off = (), None, "no lean forward"
        if self.wants_lean:
            self.fast = build_lean(self, checks)
        if self.fast is None:
            lay_out(self, checks)
        else:
            self.fast = fastest_of(self.fast, checks)
        return checks

    def renew(self) -> None:
        """The network was changed: look at it again."""
        self.device, self.dtype = device_of(self.model), self.model.dtype
        if self.in_place and not has_hooks(self.model):  # hooks are called where packed layers have taken the place
            unpack_linears(self.model)
        self.configs = attention_configs(self.model)

    def unpack(self) -> None:
        """Give the model its plain linear layers back; forwards are the public ones from now on."""
        unpack_linears(self.model)
        self.fast, self.second, self.native_off = None, {}, "the model was unpacked"
        self.wants_lean = self.in_place = False

    def public(self, dtype: torch.dtype | None = None) -> Network:
        """The same network on its public forward, which computes in ``dtype`` where the caller has widened it."""
        clone = copy.copy(self)
        clone.fast, clone.dtype = None, self.dtype if dtype is None else dtype
        return clone

    def over(self, model: Any) -> Network:
        """The same forward over another model of this shape."""
        clone = copy.copy(self)
        clone.model, clone.configs, clone.rotary = model, attention_configs(model), ChangingRotary.of(model)
        if self.fast is not None:
            clone.fast = self.fast.again(clone)
        return clone

    def take_weights(self, source: nn.Module) -> None:
        """Copy the weights of ``source``, a network of the same shape, over the present ones."""
        with torch.no_grad():
            for weight, new in zip(self.model.parameters(), source.parameters(), strict=True):
                weight.copy_(new)
        if self.fast is not None:
            self.fast = self.fast.again(self)  # its fused weights are copies

    def refuse(self, path: str, why: str, costs: str) -> None:
        """Note, and say once, that a fast path is not taken."""
        self.refused = (*self.refused, refusal(path, why, costs))

    @property
    def name(self) -> str:
        """What computes its forwards: ``"public"``, ``"lean"`` or ``"native"``."""
        return "public" if self.fast is None else self.fast.name

    @property
    def way(self) -> str:
        """What makes the forwards of one network different ones."""
        return f"{self.name} {self.packing.way} {self.exact}"

    @property
    def run_dtype(self) -> torch.dtype:
        """What hidden states, keys and values are computed in: the dtype of the model, but float32 on a lean forward
        whose 16-bit weights are multiplied with float32 activations."""
        dtype: torch.dtype = self.dtype if self.fast is None else self.fast.dtype
        return dtype

    @property
    def spared(self) -> int | None:
        """Rows of padding from which on they are left out; ``None``: never."""
        return None if self.fast is None else self.fast.spared

    @property
    def skips_masked(self) -> bool:
        """Whether attention spends no time on slots that a mask hides."""
        return self.fast is not None and self.fast.skips_masked

    # -- tokens behind the vocabulary, weights beside its own --------------------------------------------------------

    def add_rows(self, rows: Tensor) -> int:
        """Add rows [k, D] behind the vocabulary, those of every owner behind the others'; returns the first id."""
        check_rows(self.embedding, rows)
        first = self.vocab_size
        for extra_rows in self.extra:
            if extra_rows.data_ptr() == rows.data_ptr() and extra_rows.shape == rows.shape:
                return first
            first += len(extra_rows)
        self.extra.append(rows)
        return first

    @property
    def extra_rows(self) -> Tensor | None:
        """[K, D] what ids from ``vocab_size`` on are embedded as; ``None`` as long as there are none."""
        return torch.cat(self.extra) if self.extra else None

    def add_weights(self, name: str, make: Callable[[Network], SecondWeights]) -> SecondWeights:
        """A second set of weights that plans can name; made where it is not there yet."""
        if name not in self.second:
            self.second = {**self.second, name: make(self)}
        return self.second[name]

    # -- calls -------------------------------------------------------------------------------------------------------

    def check(self, plan: LayerPlan) -> None:
        """Refuse a plan that does not fit."""
        if plan.weights and plan.weights not in self.second:
            raise ValueError(f"this model has no second weights {plan.weights!r}: add them first")
        plan.check(self.num_layers)
        check_sublayers(self.model, plan)

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        """Logits [n, V] per feed, and taps, of calls that are alike but for their rows."""
        weights = calls[0].plan.weights
        if weights:
            return [self.second[weights].run(self, call) for call in calls]
        return [self.run_public(call) for call in calls] if self.fast is None else self.fast.run_all(calls)

    def native(self, plan: LayerPlan) -> NativeForward | None:
        """What runs a whole forward in one call of the library, logits included; ``None``: nothing does."""
        fast = self.second[plan.weights].fast if plan.weights else self.fast
        is_native = isinstance(fast, NativeForward) and fast.model.head.count and plan.is_whole
        return fast if is_native else None  # type: ignore[return-value]

    def run_public(self, call: NetworkCall) -> Outputs:
        """The same of one call through the model's own forward."""
        return run_public(self, call)
