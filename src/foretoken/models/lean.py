"""A forward with few Python calls for small Llama-like models, checked against the public one when it is built.

A Transformers layer costs 55-65 tensor calls; this one about 18 (fused projections, one norm call, rotary tables,
writes in place).  For models up to a few hundred million parameters that overhead is most of a decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.attention import exact_attention
from foretoken.models.cache import TreeCache
from foretoken.models.call import Call
from foretoken.models.extra import known_ids, put_in
from foretoken.models.packing import Projection, pays_packed
from foretoken.models.quantised_linear import QuantisedLinear, SideBySide

if TYPE_CHECKING:
    from foretoken.models.huggingface import HuggingFaceModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LINEARS = (torch.nn.Linear, QuantisedLinear)
STATIC_ROPE = ("default", "linear", "llama3")
MAX_PARAMETERS = 400_000_000
"""Above this the fused copies of the weights cost memory and the overhead that they save is small."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Root mean square difference to the public logits that is rounding, in their standard deviations.

In bfloat16 random models of 2 to 12 layers differ by 0.009 to 0.033, the built-in ones by 0.007; a forgotten bias or
another activation in one of three layers makes 0.07 or more.
"""


class _Layer:
    """Fused weights of one decoder layer."""

    def __init__(self, layer: Any, mask: str, blocks: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.mask = mask
        self.norm_in = _Norm(layer.input_layernorm, blocks)
        self.norm_out = _Norm(layer.post_attention_layernorm, blocks)
        self.qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj, blocks=blocks)
        self.out = _fused(attention.o_proj, blocks=blocks)
        self.gate_up = _fused(mlp.gate_proj, mlp.up_proj, blocks=blocks)
        self.down = _fused(mlp.down_proj, blocks=blocks)
        on_heads = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self.q_norm, self.k_norm = (None if norm is None else _Norm(norm, blocks) for norm in on_heads)
        self.scaling: float = attention.scaling


def _fused(*linears: Any, blocks: bool) -> Projection | SideBySide:
    if any(isinstance(linear, QuantisedLinear) for linear in linears):
        return SideBySide([_product(linear, blocks) for linear in linears])
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return Projection(weight, bias, blocks=blocks)


def _product(linear: Any, blocks: bool) -> Any:
    return linear.product if isinstance(linear, QuantisedLinear) else _fused(linear, blocks=blocks)


def _head(linear: Any, owner: HuggingFaceModel) -> tuple[Projection | SideBySide, torch.dtype]:
    """The vocabulary projection and the dtype of its input.

    It is most of a small draft model's weights: in ``"approximate"`` mode a float32 one runs in packed bfloat16
    where the CPU multiplies that.
    """
    if isinstance(linear, QuantisedLinear):
        return _fused(linear, blocks=False), owner.dtype
    half = linear.weight.detach().to(torch.bfloat16)
    if owner.exact == "approximate" and owner.dtype == torch.float32 and pays_packed(half):
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
        return Projection(half, bias), torch.bfloat16
    return _fused(linear, blocks=owner.exact == "bitwise"), owner.dtype


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    PyTorch's own takes eight tensor calls on a CPU, this one four to six: |x| as a vector, and sqrt(|x|^2 + d eps) as
    the hypotenuse of two lengths.  Where bits must not depend on how many rows there are, PyTorch's own stays.
    """

    def __init__(self, module: Any, blocks: bool) -> None:
        self.weight, self.eps = module.weight.detach(), module.variance_epsilon
        self.own = self.weight.device.type == "cpu" and not blocks
        if self.own:
            self.wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
            size = self.weight.shape[-1]
            self.scaled = self.weight.to(self.wide) * size**0.5
            self.floor = torch.tensor((size * self.eps) ** 0.5, dtype=self.wide)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        if not self.own:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(self.wide)
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self.floor)
        return (wide / length).mul_(self.scaled).to(x.dtype)


class LeanForward:
    """Same inputs and outputs as the public run of :class:`HuggingFaceModel`."""

    def __init__(self, owner: HuggingFaceModel, cache: TreeCache | None = None) -> None:
        model, config = owner.model, owner.config
        self.owner = owner
        self.cache = cache if cache is not None else owner.cache
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.embedding = model.model.embed_tokens.weight.detach()
        kinds = getattr(config, "layer_types", None) if not owner._single_mask else None
        blocks = owner.exact == "bitwise"
        self.layers = [_Layer(layer, kinds[i] if kinds else "", blocks) for i, layer in enumerate(model.model.layers)]
        self.final_norm = _Norm(model.model.norm, blocks)
        self.head, self.head_dtype = _head(model.lm_head, owner)
        positions = torch.arange(owner.cache.max_slots, device=owner.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding[:1, None], position_ids=positions)
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == roll(x, half) * (-sin of the first half, sin of the second).
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        self.rotary = torch.stack([cos[0], signed[0]]).to(owner.dtype)

    def run(self, call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Logits [n, V] per feed and taps, in which padding that was left out is zero."""
        (b, width), taps, plan = call.ids.shape, call.taps, call.plan
        places = _Places(b, width, call.counts, call.ids.device)
        x = places.taken(call.ids if call.states is None else call.states)
        if call.states is None:
            x = self._embed(x)
        cos, sin = self.rotary[:, places.taken(call.positions)][:, :, None]
        groups = self.heads // self.kv_heads
        folded = {
            name: mask if mask is None or width == 1 or self.owner.exact == "bitwise" else mask.repeat(1, 1, groups, 1)
            for name, mask in call.masks.items()
        }
        hidden: dict[str, Tensor] = {}
        end = plan.end(len(self.layers))
        for i in range(plan.start, end):
            if taps and f"layer:{i}" in taps:
                hidden[f"layer:{i}"] = places.padded(x)
            layer = self.layers[i]
            if i not in plan.skip_attention:
                x = self._attend(i, layer, x, places, cos, sin, folded[layer.mask])
            if i not in plan.skip_mlp:
                gate, up = layer.gate_up(layer.norm_out(x)).chunk(2, -1)
                x = layer.down.plus(F.silu(gate).mul_(up), x)
        if taps and f"layer:{end}" in taps:
            hidden[f"layer:{end}"] = places.padded(x)
        if "last" in taps:
            x = self.final_norm(x)
            hidden["last"] = places.padded(x)
        x, spans = places.wanted(x, call.wanted)
        if not len(x):
            return [x.new_zeros(0, self.owner.vocab_size) for _ in spans], hidden
        if "last" not in taps:
            x = self.final_norm(x)
        logits = self.head(x.to(self.head_dtype)).to(self.owner.dtype)
        return [logits[start:end] for start, end in spans], hidden

    def _embed(self, ids: Tensor) -> Tensor:
        rows, first = self.owner.extra_rows, self.owner.vocab_size
        if rows is None:
            return F.embedding(ids, self.embedding)
        return put_in(F.embedding(known_ids(ids, first), self.embedding), ids, rows, first)

    def _attend(
        self, index: int, layer: _Layer, x: Tensor, places: _Places, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """One attention with its residual, x [n, D] -> [n, D]; writes this layer's keys and values."""
        qkv = layer.qkv(layer.norm_in(x)).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        qk = qkv[:, : self.heads + self.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = layer.q_norm(qk[:, : self.heads]), layer.k_norm(qk[:, self.heads :])
            qk = torch.cat([query, key], 1)
        qk = places.padded(torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)).transpose(1, 2)
        value = places.padded(qkv[:, self.heads + self.kv_heads :]).transpose(1, 2)
        query = qk[:, : self.heads]
        keys, values = self.cache.update(qk[:, self.heads :], value, index)
        if self.owner.exact == "bitwise":
            out = exact_attention(None, query, keys, values, mask, layer.scaling)[0]  # type: ignore[arg-type]
        else:
            folded = query.reshape(places.b, self.kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scaling)
            out = out.view(places.b, self.heads, places.width, self.head_dim).transpose(1, 2)
        return layer.out.plus(places.taken(out.reshape(places.b, places.width, -1)), x)


class _Places:
    """Where ``n`` flat rows are among [b, width] places: everywhere, or at the first ``counts`` of each row."""

    def __init__(self, b: int, width: int, counts: Sequence[int] | None, device: torch.device) -> None:
        self.b, self.width = b, width
        self.nodes: Tensor | None = None
        if counts is None:
            self.starts: Sequence[int] = range(0, b * width, width)
        else:
            self.starts = [0, *accumulate(counts)]
            nodes = [row * width + column for row, count in enumerate(counts) for column in range(count)]
            self.nodes = torch.tensor(nodes, device=device)

    def taken(self, padded: Tensor) -> Tensor:
        """[b, width, ...] -> [n, ...]."""
        flat = padded.flatten(0, 1)
        return flat if self.nodes is None else flat[self.nodes]

    def padded(self, rows: Tensor) -> Tensor:
        """[n, ...] -> [b, width, ...], zero where nothing is."""
        if self.nodes is not None:
            rows = rows.new_zeros(self.b * self.width, *rows.shape[1:]).index_copy_(0, self.nodes, rows)
        return rows.view(self.b, self.width, *rows.shape[1:])

    def wanted(self, x: Tensor, columns: Sequence[tuple[int, int, int]]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Those of the rows x [n, D] that are wanted, and where each feed's begin and end among them.

        Args:
            x: all rows.
            columns: of each feed, as in :attr:`Call.wanted`.
        """
        spans = [(self.starts[row] + start, self.starts[row] + end) for row, start, end in columns]
        counts = [end - start for start, end in spans]
        if sum(counts) == len(x):
            return x, spans
        rows = torch.tensor([place for span in spans for place in range(*span)], dtype=torch.long, device=x.device)
        ends = list(accumulate(counts))
        return x[rows], [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def build_lean(owner: HuggingFaceModel) -> LeanForward | None:
    """A lean forward for the model, or ``None`` when its architecture is not covered or its numbers differ."""
    config = owner.config
    rope = getattr(config, "rope_parameters", None) or {}
    covered = (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", "") == "silu"
        and rope.get("rope_type", "default") in STATIC_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and hasattr(owner.model, "lm_head")
        and all(type(m) in LINEARS for n, m in owner.model.named_modules() if n.endswith(("_proj", "lm_head")))
        and sum(p.numel() for p in owner.model.parameters()) <= MAX_PARAMETERS
    )
    if not covered:
        return None
    lean = LeanForward(owner)
    return lean if _agrees(owner, lean) else None


@torch.inference_mode()
def _agrees(owner: HuggingFaceModel, lean: LeanForward) -> bool:
    """Compare both forwards on a short branching tree behind a short prefix."""
    from foretoken.models.masks import RowPlan, additive_mask

    width = 6
    parents = (-1, 0, 1, 1, 2, 3)
    depths = (0, 1, 2, 2, 3, 3)
    ids = torch.arange(1, width + 1, device=owner.device)[None] % owner.vocab_size
    positions = torch.tensor([depths], device=owner.device)
    plan = RowPlan(0, parents, depths, width)
    results = []
    for run in (owner._run_public, lean.run):
        owner.cache.plan(0, 1, [0], width, width)
        masks = {
            name: additive_mask([plan], layer, width, width, owner.dtype, owner.device)
            for name, layer in owner.layer_masks.items()
        }
        results.append(run(Call(ids, positions, masks, [(0, 0, width)], ()))[0][0].double())
    public, mine = results
    if not bool(torch.isfinite(public).all()):
        return False
    difference = float((public - mine).square().mean().sqrt())
    coarse = lean.head_dtype == torch.bfloat16 or any(type(m) is QuantisedLinear for m in owner.model.modules())
    rounding = torch.bfloat16 if coarse else owner.dtype
    return difference <= TOLERANCE.get(rounding, 1e-2) * float(public.std())
