"""A forward with few Python calls for Llama-like models, checked against the public one when it is built.

Most of a decoding step of models up to a few hundred million parameters is the overhead of tensor calls, of which a
Transformers layer takes three times as many as :class:`foretoken.models.lean_layers.LeanLayer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.call import Call
from foretoken.models.extra import known_ids, put_in
from foretoken.models.lean_families import Family, family_of, part
from foretoken.models.lean_layers import Group, Heads, LeanLayer, Pass, Places, Rotary, joined
from foretoken.models.lean_parts import Norm, norm_of
from foretoken.models.masks import LayerMask, RowPlan, additive_mask
from foretoken.models.packing import Projection, is_plain, pays_packed, unpack_linears
from foretoken.models.rotary import LeanTurns

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel

MAX_PARAMETERS = 400_000_000
"""Above this the fused copies of the weights cost memory and the overhead that they save is small."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Root mean square difference to the public logits that is rounding, in their standard deviations.

In bfloat16 random models of 2 to 12 layers differ by 0.009 to 0.033, the built-in ones by 0.007; a forgotten bias or
another activation in one of three layers makes 0.07 or more.
"""


Found = tuple[list[Tensor], dict[str, Tensor]]
"""Logits [n, V] per feed, and taps [b, width, D]."""
Run = Callable[[Call], Found]
"""A forward, public or lean."""


def _head(linear: Any, owner: HuggingFaceModel) -> tuple[Projection, torch.dtype]:
    """The vocabulary projection and the dtype of its input.

    It is most of a small draft model's weights: in ``"approximate"`` mode a float32 one runs in packed bfloat16
    where the CPU multiplies that.
    """
    if owner.exact != "approximate" or owner.dtype != torch.float32 or hasattr(linear, "joined"):
        return owner.packing.projection(linear), owner.packing.activations(owner.dtype)
    half = linear.weight.detach().to(torch.bfloat16)
    if pays_packed(half):
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
        return Projection(half, bias), torch.bfloat16
    return owner.packing.projection(linear), owner.packing.activations(owner.dtype)


class LeanForward:
    """Same inputs and outputs as the public run of :class:`HuggingFaceModel`.

    Attributes:
        layers: the decoder layers.
        dtype: of hidden states, keys, values and logits.

    Raises:
        ValueError: a model of a family that is not covered.
    """

    def __init__(self, owner: HuggingFaceModel) -> None:
        config, family = owner.config, family_of(owner.config)
        if family is None:
            raise ValueError(f"the lean forward does not cover {config.model_type}: use the public one")
        decoder: Any = part(owner.model, family.decoder)
        self.owner = owner
        packing = owner.packing
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
                kind="" if owner._single_mask or not kinds else kinds[i],
                rope=kinds[i] if "" not in self.rotary else "",
                packing=packing,
                dtype=None if self.dtype != owner.dtype or owner.device.type != "cpu" else self.dtype,
            )
            for i, layer in enumerate(decoder.layers)
        ]
        self.final_norm: Norm = norm_of(part(decoder, family.final_norm), packing, family.norm_offset) or _same
        self.head, self.head_dtype = _head(owner.model.lm_head, owner)
        embedding = part(decoder, family.embedding)
        self.embedding = embedding.weight.detach()
        scale = getattr(embedding, "embed_scale", None)
        self.embedding_scale: Tensor | None = None if scale is None else scale.to(owner.dtype)
        self.input_scale = float(getattr(decoder, "embedding_multiplier", None) or 1.0)
        self.logit_scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def run(self, call: Call) -> Found:
        """Logits [n, V] per feed and taps, in which padding that was left out is zero."""
        return self.run_all([call])[0]

    def run_all(self, calls: Sequence[Call]) -> list[Found]:
        """Several calls at once, alike but for their rows: only attention tells the caches apart."""
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
        kept = [group.places.wanted(x[group.rows], call.wanted) for group, call in zip(run.groups, calls, strict=True)]
        x = joined([rows for rows, _ in kept])
        if len(x):
            x = self._logits(x if "last" in taps else self.final_norm(x))
        else:
            x = x.new_zeros(0, self.owner.vocab_size)
        found: list[Found] = []
        for (rows, spans), states in zip(kept, hidden, strict=True):
            logits, x = x[: len(rows)], x[len(rows) :]
            found.append(([logits[start:stop] for start, stop in spans], states))
        return found

    def _begin(self, calls: Sequence[Call]) -> tuple[Pass, Tensor]:
        """What the layers read besides the hidden states [n, D] of all rows, and those."""
        places = [Places(len(call.ids), call.ids.shape[1], call.counts, call.ids.device) for call in calls]
        states = [
            place.taken(call.ids if call.states is None else call.states)
            for place, call in zip(places, calls, strict=True)
        ]
        positions = joined([place.taken(call.positions) for place, call in zip(places, calls, strict=True)])
        ends = list(accumulate(map(len, states)))
        groups = [
            Group(slice(end - len(rows), end), place, self._masks(call), call.cache)
            for end, rows, place, call in zip(ends, states, places, calls, strict=True)
        ]
        x = joined(states)
        if calls[0].states is None:
            x = self._embed(x)
        if self.turns is None:
            return Pass(groups, {kind: rotary(positions) for kind, rotary in self.rotary.items()}), x
        told = [call.positions + 1 if call.lengths is None else call.lengths for call in calls]
        lengths = joined([place.taken(each) for place, each in zip(places, told, strict=True)])
        return Pass(groups, self.turns(positions, lengths)), x

    def _embed(self, ids: Tensor) -> Tensor:
        """What the first layer reads [n, D] of ids [n]."""
        rows, first = self.owner.extra_rows, self.owner.vocab_size
        x = F.embedding(ids if rows is None else known_ids(ids, first), self.embedding).to(self.dtype)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if rows is not None:
            x = put_in(x, ids, rows, first)
        return x if self.input_scale == 1.0 else x * self.input_scale

    def _masks(self, call: Call) -> Mapping[str, Tensor | None]:
        """Masks as the layers read them: scaled_dot_product_attention sees the heads of a group as more rows."""
        groups = self.size.heads // self.size.kv_heads
        first = self.layers[0]
        if groups == 1 or call.ids.shape[1] == 1 or first.native or first.explicit is not None:
            return call.masks
        return {name: None if mask is None else mask.repeat(1, 1, groups, 1) for name, mask in call.masks.items()}

    def _logits(self, x: Tensor) -> Tensor:
        """[n, V] of states [n, D] behind the final norm."""
        logits = self.head(x.to(self.head_dtype)).to(self.dtype)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap


def _same(x: Tensor) -> Tensor:
    return x


def _rotary(embedding: Any, kinds: Any, dtype: torch.dtype) -> dict[str, Rotary]:
    """The model's rotary embeddings by layer type, under ``""`` where there is one for all."""
    names = {kind: f"{kind}_" for kind in set(kinds or ())} if hasattr(embedding, "layer_types") else {"": ""}
    return {
        kind: Rotary(getattr(embedding, f"{name}inv_freq"), getattr(embedding, f"{name}attention_scaling"), dtype)
        for kind, name in names.items()
    }


def build_lean(owner: HuggingFaceModel) -> LeanForward | None:
    """A lean forward for the model, or ``None`` when its architecture is not covered or its numbers differ.

    The check runs the public forward first: where the model is packed in place, its layers are others afterwards.
    """
    family, in_place = family_of(owner.config), owner.packing.home is not None
    if family is None or not _has_plain_linears(owner.model, family):
        return None
    if not in_place and sum(p.numel() for p in owner.model.parameters()) > MAX_PARAMETERS:
        return None
    public = _tree_logits(owner, owner._run_public, owner.dtype)
    if public is None:
        return None
    try:
        lean = LeanForward(owner)
    except AttributeError:  # a model of a known type with modules of its own
        return None
    if agrees(owner, lean, public):
        return lean
    if in_place:
        unpack_linears(owner.model)
    return None


def _has_plain_linears(model: Any, family: Family) -> bool:
    """Whether everything that is to be fused is a plain linear layer, or one that we have quantised."""
    mlp = () if family.experts else (*family.gate_up, family.up, family.down)
    names = {*family.qkv, family.out, "lm_head", *mlp}
    return hasattr(model, "lm_head") and all(
        is_plain(module) or hasattr(module, "joined")
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names
    )


@torch.inference_mode()
def _tree_logits(owner: HuggingFaceModel, run: Run, dtype: torch.dtype) -> Tensor | None:
    """Float64 logits [6, V] of a short branching tree, under windows that are shorter still; ``None`` where the model
    cannot be run or they are not finite."""
    width = 6
    parents = (-1, 0, 1, 1, 2, 3)
    depths = (0, 1, 2, 2, 3, 3)
    ids = torch.arange(1, width + 1, device=owner.device)[None] % owner.vocab_size
    positions = torch.tensor([depths], device=owner.device)
    plan = RowPlan(0, parents, depths, width)
    masks = {
        name: additive_mask([plan], _narrowed(layer), width, width, dtype, owner.device)
        for name, layer in owner.layer_masks.items()
    }
    owner.cache.plan(0, 1, [0], width, width)
    try:
        logits = run(Call(owner.cache, ids, positions, masks, [(0, 0, width)], ()))[0][0].double()
    except RuntimeError:  # experts in a dtype that their kernel lacks: who uses the model will be told
        return None
    finally:
        owner.cache.clear()  # the other forward may keep keys and values in another dtype
    return logits if bool(torch.isfinite(logits).all()) else None


def agrees(owner: HuggingFaceModel, lean: LeanForward, public: Tensor | None = None) -> bool:
    """Whether both forwards differ by rounding alone; ``public`` are the logits of the public one, where it has run."""
    public = _tree_logits(owner, owner._run_public, owner.dtype) if public is None else public
    mine = _tree_logits(owner, lean.run, lean.dtype)
    if public is None or mine is None:
        return False
    difference = float((public - mine).square().mean().sqrt())
    coarse = lean.head_dtype == torch.bfloat16 or any(hasattr(m, "joined") for m in owner.model.modules())
    rounding = torch.bfloat16 if coarse else owner.dtype
    return difference <= TOLERANCE.get(rounding, 1e-2) * float(public.std())


def _narrowed(mask: LayerMask) -> LayerMask:
    """A window of two tokens instead of thousands, so that layers of different types read different masks."""
    return mask if mask.kind == "full" else replace(mask, size=2)
