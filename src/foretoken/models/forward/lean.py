"""A forward with few Python calls for Llama-like models, checked against the public one when it is built.

In models up to a few hundred million parameters, call overhead dominates a decoding step, and a Transformers layer
makes three times as many tensor calls as :class:`foretoken.models.forward.lean_layers.LeanLayer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.checks.fast_paths import Checks
from foretoken.models.checks.judging import Run
from foretoken.models.forward.lean_families import Family, family_of, part
from foretoken.models.forward.lean_layers import CacheRows, ForwardPass, Heads, LeanLayer, Rotary, RowLayout, joined
from foretoken.models.forward.lean_parts import Norm, norm_of
from foretoken.models.linear.packing import draft_projection, is_plain, pays_packed, unpack_linears
from foretoken.models.linear.product import Product, QuantisedLinear, has_quantised
from foretoken.models.linear.updated import RowGate
from foretoken.models.network.call import NetworkCall, Outputs
from foretoken.models.network.extra import known_ids, put_in
from foretoken.models.network.own_code import is_changed
from foretoken.models.network.rotary import LeanTurns
from foretoken.models.network.watch import has_hooks

if TYPE_CHECKING:
    from foretoken.models.forward.network import Network

MAX_PARAMETERS = 400_000_000
"""Above this size, fused copies of the weights take much memory and save little overhead."""
SPARED, SPARED_OWN_LAYOUT = 24, 4
"""Number of padding rows from which a lean forward spares itself them: it gathers the rows of tokens and runs only
those.  Gathering costs as much as fewer rows do (``docs/log.md``).  Rows cost more in products with our own layout of
weights, so fewer of them pay there."""
PATH = "lean forward"
COSTS = "a step of a small model takes about twice as long, and near-ties may differ with drafts and in batches"


Change = Callable[[int, Product, tuple[str, ...]], Product]


def _head(linear: Any, owner: Network) -> tuple[Product, torch.dtype]:
    """The vocabulary projection and the dtype of its input.

    The projection holds most of a small draft model's weights: in ``"approximate"`` mode, a float32 one runs in packed
    bfloat16 if the CPU has such products.
    """
    coarse = owner.exact == "approximate" and owner.dtype == torch.float32 and not isinstance(linear, QuantisedLinear)
    if coarse and pays_packed(torch.empty(2, 2, dtype=torch.bfloat16, device=owner.device)):
        return draft_projection(linear.weight, linear.bias), torch.bfloat16
    return owner.packing.projection(linear), owner.packing.activations(owner.dtype)


class LeanForward:
    """Lean forward with the inputs and outputs of :func:`~foretoken.models.forward.public.run_public`.

    Attributes:
        dtype: dtype of hidden states, keys, values and logits.
        gate: rows of a call that the updates of its products change; ``None`` if they have none.
    """

    name = "lean"
    gate: RowGate | None = None

    def __init__(self, owner: Network) -> None:
        config, family = owner.config, family_of(owner.config)
        if family is None:
            raise ValueError(f"the lean forward does not cover {config.model_type}: use the public one")
        decoder: Any = part(owner.model, family.decoder)
        self.owner = owner
        packing = owner.packing
        self.spared = SPARED_OWN_LAYOUT if packing.layout == "native" else SPARED
        self.dtype = packing.activations(owner.dtype)
        self.size = Heads.of(config)
        kinds: Any = getattr(config, "layer_types", None)
        self.rotary = _rotary(decoder.rotary_emb, kinds, self.dtype)
        self.turns = None if owner.rotary is None else LeanTurns(owner.rotary, tuple(self.rotary), self.dtype)
        self.layers = [
            LeanLayer(
                layer,
                family,
                self.size,
                kind="" if owner.single_mask or not kinds else kinds[i],
                rope=kinds[i] if "" not in self.rotary else "",
                packing=packing,
                dtype=None if self.dtype != owner.dtype or owner.device.type != "cpu" else self.dtype,
            )
            for i, layer in enumerate(decoder.layers)
        ]
        final_norm = norm_of(part(decoder, family.final_norm), packing, family.norm_offset)
        self.final_norm: Norm = final_norm or (lambda x: x)
        self.head, self.head_dtype = _head(owner.model.lm_head, owner)
        embedding = part(decoder, family.embedding)
        self.look_up: Callable[[Tensor], Tensor] = getattr(embedding, "rows", None) or partial(
            F.embedding, weight=embedding.weight.detach()
        )
        scale = getattr(embedding, "embed_scale", None)
        self.embedding_scale: Tensor | None = None if scale is None else scale.to(owner.dtype)
        self.input_scale = float(getattr(decoder, "embedding_multiplier", None) or 1.0)
        self.logit_scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def again(self, owner: Network) -> LeanForward:
        """The same forward for another model of the same kind."""
        return LeanForward(owner)

    @property
    def twin(self) -> LeanForward:
        """The forward of this kind that uses tensor calls."""
        return self

    def with_products(self, change: Change, gate: RowGate) -> LeanForward:
        """The same forward, in tensor calls, with other products in its layers; everything else is shared.

        ``change`` also gets a layer's index, see :meth:`LeanLayer.with_products`.  ``gate`` has the rows that its
        updates change.
        """
        clone = copy.copy(self.twin)
        clone.gate = gate
        clone.layers = [layer.with_products(partial(change, i)) for i, layer in enumerate(self.layers)]
        return clone

    @property
    def is_coarse(self) -> bool:
        """Whether it multiplies in bfloat16 or by quantised weights, whatever the model's dtype."""
        return self.head_dtype == torch.bfloat16 or has_quantised(self.owner.model)

    def row_dependent(self) -> str | None:
        """A part whose order of sums depends on the number of rows; ``None`` if there is none."""
        if not all(layer.native for layer in self.layers):
            return "attention"
        return None if all(product.alone for product in self.products) else "a matrix product"

    @property
    def products(self) -> list[Any]:
        """All products with a weight."""
        return [self.head, *(product for layer in self.layers for product in layer.projections)]

    @property
    def skips_masked(self) -> bool:
        return all(layer.native for layer in self.layers)

    def run(self, call: NetworkCall) -> Outputs:
        """Logits [n, V] per feed, and taps, with zeros for removed padding."""
        return self.run_all([call])[0]

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        """Run several calls that differ in their rows only; attention alone distinguishes their caches."""
        taps, plan = calls[0].taps, calls[0].plan
        run, x = self._begin(calls)
        hidden: list[dict[str, Tensor]] = [{} for _ in calls]
        end = plan.end(len(self.layers))
        for i in range(plan.start, end):
            if taps and f"layer:{i}" in taps:
                run.put(f"layer:{i}", x, hidden)
            layer, source = self.layers[i], x
            if i not in plan.skip_attention:
                x = layer.attend(i, x, run)
            if i not in plan.skip_mlp:
                x = layer.feed(source if layer.parallel else x, x)
        if taps and f"layer:{end}" in taps:
            run.put(f"layer:{end}", x, hidden)
        if "last" in taps:
            x = self.final_norm(x)
            run.put("last", x, hidden)
        scored = [
            group.layout.scored(x[group.rows], call.wanted) for group, call in zip(run.groups, calls, strict=True)
        ]
        x = joined([rows for rows, _ in scored])
        if len(x):
            x = self._logits(x if "last" in taps else self.final_norm(x))
        else:
            x = x.new_zeros(0, self.owner.vocab_size)
        outputs: list[Outputs] = []
        for (rows, spans), states in zip(scored, hidden, strict=True):
            logits, x = x[: len(rows)], x[len(rows) :]
            outputs.append(([logits[start:stop] for start, stop in spans], states))
        return outputs

    def _begin(self, calls: Sequence[NetworkCall]) -> tuple[ForwardPass, Tensor]:
        """The common inputs of the layers, and the hidden states [n, D] of all rows."""
        layouts = [RowLayout(len(call.ids), call.ids.shape[1], call.counts, call.ids.device) for call in calls]
        states = [
            layout.flat(call.ids if call.states is None else call.states)
            for layout, call in zip(layouts, calls, strict=True)
        ]
        positions = joined([layout.flat(call.positions) for layout, call in zip(layouts, calls, strict=True)])
        ends = list(accumulate(map(len, states)))
        groups = [
            CacheRows(slice(end - len(rows), end), layout, self._masks(call), call.cache)
            for end, rows, layout, call in zip(ends, states, layouts, calls, strict=True)
        ]
        x = joined(states)
        if calls[0].states is None:
            x = self.embedded(x)
        if self.turns is None:
            return ForwardPass(groups, {kind: rotary(positions) for kind, rotary in self.rotary.items()}), x
        call_lengths = [call.positions + 1 if call.lengths is None else call.lengths for call in calls]
        lengths = joined([layout.flat(row_lengths) for layout, row_lengths in zip(layouts, call_lengths, strict=True)])
        return ForwardPass(groups, self.turns(positions, lengths)), x

    def embedded(self, ids: Tensor) -> Tensor:
        """Input [n, D] of the first layer for ids [n]."""
        rows, first = self.owner.extra_rows, self.owner.vocab_size
        x = self.look_up(ids if rows is None else known_ids(ids, first)).to(self.dtype)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if rows is not None:
            x = put_in(x, ids, rows, first)
        return x if self.input_scale == 1.0 else x * self.input_scale

    def _masks(self, call: NetworkCall) -> Mapping[str, Tensor | None]:
        """Masks for the layers: scaled_dot_product_attention sees the heads of a group as additional rows."""
        groups = self.size.heads // self.size.kv_heads
        first = self.layers[0]
        if groups == 1 or call.ids.shape[1] == 1 or first.native or first.explicit is not None:
            return call.masks
        return {name: None if mask is None else mask.repeat(1, 1, groups, 1) for name, mask in call.masks.items()}

    def _logits(self, x: Tensor) -> Tensor:
        """[n, V] from states [n, D] after the final norm."""
        return self.transform_logits(self.head(x.to(self.head_dtype)).to(self.dtype))

    def transform_logits(self, logits: Tensor) -> Tensor:
        """The family's transformation of the projected logits."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap


def _rotary(embedding: Any, kinds: Any, dtype: torch.dtype) -> dict[str, Rotary]:
    names = {kind: f"{kind}_" for kind in set(kinds or ())} if hasattr(embedding, "layer_types") else {"": ""}
    return {
        kind: Rotary(getattr(embedding, f"{name}inv_freq"), getattr(embedding, f"{name}attention_scaling"), dtype)
        for kind, name in names.items()
    }


def build_lean(owner: Network, checks: Checks | None = None) -> LeanForward | None:
    """Build a lean forward; ``None``, with the reason in ``owner.refused``, if that fails.

    The check runs the public forward first, because packing in place changes the layers.
    """
    checks = Checks(owner, None) if checks is None else checks
    reason = _not_covered(owner)
    if reason is not None:
        owner.refuse(PATH, reason, COSTS)
        return None
    lean: LeanForward | None = None

    def built() -> tuple[Run, torch.dtype, bool] | None:
        nonlocal lean
        try:
            lean = LeanForward(owner)
        except AttributeError:  # a known model type with unexpected modules
            return None
        return lean.run, lean.dtype, lean.is_coarse

    reason = checks.fault(f"{PATH} {owner.way}", built)
    if reason is None:
        return lean or LeanForward(owner)  # not built where the check's result was stored
    if owner.packing.home is not None:
        unpack_linears(owner.model)
    owner.refuse(PATH, reason, COSTS)
    return None


def _not_covered(owner: Network) -> str | None:
    """Reason why a lean forward is not tried."""
    family, kind = family_of(owner.config), owner.config.model_type
    if has_hooks(owner.model):
        return "hooks are attached to the model, which only its own forward calls"
    if family is None:
        return f"it does not support this variant of {kind}"
    if not _has_plain_linears(owner.model, family):
        return f"this {kind} model has linear layers of another kind (adapted, or quantised by another package)"
    changed = _changed_module(owner.model, family)
    if changed is not None:
        return f"{changed} has another forward than its Transformers class, which only the model's own forward calls"
    size = sum(p.numel() for p in owner.model.parameters())
    if owner.packing.home is None and size > MAX_PARAMETERS:
        return (
            f"its layers must stay as they are, and {size / 1e9:.1f}b weights, above {MAX_PARAMETERS / 1e9:.1f}b, are "
            "not copied: ft.load(model, pack=True) packs those of a model object in place"
        )
    return None


def _changed_module(model: Any, family: Family) -> str | None:
    """Name of a module whose code is not its class's; the lean forward calls the experts' own."""
    for name, module in model.named_modules():
        called = family.experts and family.mlp in name.split(".")
        if not called and is_changed(module):
            return f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    return None


def _has_plain_linears(model: Any, family: Family) -> bool:
    """Whether all layers to be fused are plain or quantised by us."""
    mlp = () if family.experts else (*family.gate_up, family.up, family.down)
    names = {*family.qkv, family.out, "lm_head", *mlp}
    return hasattr(model, "lm_head") and all(
        is_plain(module) or isinstance(module, QuantisedLinear)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names
    )
