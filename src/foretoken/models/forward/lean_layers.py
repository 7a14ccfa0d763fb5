"""One decoder layer in few tensor calls: fused projections, one call per norm, rotary tables, writes in place.

A Transformers layer makes 55-65 tensor calls, this one about 18.  Differences between model families are resolved when
the layer is built (:mod:`foretoken.models.forward.lean_families`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.attention import exact_attention, folded_attention
from foretoken.models.forward.lean_families import Family, part
from foretoken.models.forward.lean_parts import (
    Change,
    Joined,
    OutputProjection,
    linear_names,
    mlp_of,
    norm_of,
    with_products,
)
from foretoken.models.linear.packing import Packing
from foretoken.models.native import attention as native_attention


@dataclass(frozen=True)
class Heads:
    """Attention shape: query heads, key-value heads and head dimension."""

    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(heads, kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads))


@dataclass(frozen=True)
class ForwardPass:
    """Common inputs of all layers in one forward.

    Attributes:
        groups: its rows, by cache.
        turns: cosine and signed sine [n, 1, r] of the rows, by rotary embedding.
    """

    groups: Sequence[CacheRows]
    turns: Mapping[str, tuple[Tensor, Tensor]]

    def put(self, name: str, x: Tensor, hidden: Sequence[dict[str, Tensor]]) -> None:
        """Store the states x [n, D] as a tap, padded, in each group's own dictionary."""
        for group, taps in zip(self.groups, hidden, strict=True):
            taps[name] = group.layout.padded(x[group.rows])


@dataclass(frozen=True)
class CacheRows:
    """Rows of a forward that share a cache.

    Attributes:
        rows: slice of the flat rows.
        layout: their locations in the padded batch of the cache.
        masks: additive masks by layer type; repeated per query group unless the layers compute scores themselves.
        cache: their KV cache.
    """

    rows: slice
    layout: RowLayout
    masks: Mapping[str, Tensor | None]
    cache: TreeCache


class LeanLayer:
    """Fused weights of one decoder layer.

    Args:
        kind: layer type, the key of its mask in :attr:`ForwardPass.masks`.
        rope: the key of its rotary embedding in :attr:`ForwardPass.turns`.
        packing: conversion of linear layers to projections; with products in blocks, attention sums in float64.
        dtype: dtype of queries, keys and values; ``None``: never bfloat16.
    """

    def __init__(
        self,
        layer: Any,
        family: Family,
        size: Heads,
        kind: str,
        rope: str,
        packing: Packing,
        dtype: torch.dtype | None = None,
    ) -> None:
        attention = part(layer, family.attention)
        self.family = family
        self.size, self.mask, self.rope, self.interleaved = size, kind, rope, family.interleaved
        norms = (family.norm_attention, family.after_attention, family.norm_mlp, family.after_mlp)
        before, after, self.norm_mlp, after_mlp = (
            norm_of(part(layer, name), packing, family.norm_offset) for name in norms
        )
        self.norm_attention = before
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        self.qkv = packing.projection(*(part(attention, name) for name in family.qkv))
        self.out = OutputProjection(packing.projection(part(attention, family.out)), Joined(after, scale))
        self.q_norm, self.k_norm = (
            norm_of(getattr(attention, name, None), packing, family.norm_offset) for name in ("q_norm", "k_norm")
        )
        self.norms_heads = self.q_norm is None or attention.q_norm.weight.shape[-1] == size.dim
        self.scaling = float(getattr(attention, "scaling", size.dim**-0.5))
        self.soft_cap: float | None = part(attention, family.soft_cap)
        # The native attention takes one mask for all heads.
        self.native = self.soft_cap is None and native_attention.fits(dtype, size.dim)
        # Either takes a mask per query head; scaled_dot_product_attention has no soft cap.
        self.explicit = exact_attention if packing.blocks else folded_attention if self.soft_cap is not None else None
        self.parallel = bool(part(layer, family.parallel))
        self.mlp = mlp_of(part(layer, family.mlp), family, Joined(after_mlp, scale), packing)

    @property
    def projections(self) -> list[Any]:
        """All products with a weight."""
        mlp: Any = self.mlp
        return [self.qkv, self.out.projection, *getattr(mlp, "projections", ())]

    def with_products(self, change: Change) -> LeanLayer:
        """The same layer with other products (:data:`Change`); an MLP that is the model's module stays."""
        clone, family = copy.copy(self), self.family
        inside = partial(linear_names, family.attention)
        clone.qkv = change(self.qkv, inside(*family.qkv))
        clone.out = OutputProjection(change(self.out.projection, inside(family.out)), self.out.joined)
        clone.mlp = with_products(self.mlp, family, change)
        return clone

    def attend(self, index: int, x: Tensor, run: ForwardPass) -> Tensor:
        """Attention of layer ``index`` with its residual, x [n, D] -> [n, D]; stores keys and values."""
        return self.mixed(index, x if self.norm_attention is None else self.norm_attention(x), x, run)

    def feed(self, source: Tensor, x: Tensor) -> Tensor:
        """The MLP of ``source`` added to the residual stream x, all [n, D]."""
        return self.mlp(source if self.norm_mlp is None else self.norm_mlp(source), x)

    def mixed(self, index: int, inputs: Tensor, residual: Tensor | None, run: ForwardPass) -> Tensor:
        """:meth:`attend` for normalised inputs [n, in]; the attention alone if there is no residual."""
        qkv = self._heads_of(self.qkv(inputs))
        qk = turned(self._normed(qkv), *run.turns[self.rope])
        value = qkv[:, self.size.heads + self.size.kv_heads :]
        attended = [self._looked_up(index, qk[group.rows], value[group.rows], group) for group in run.groups]
        return self.out(joined(attended), residual)

    def _looked_up(self, index: int, qk: Tensor, value: Tensor, group: CacheRows) -> Tensor:
        """Store the keys and values of one group's rows; return their attention [n, H d]."""
        size, layout = self.size, group.layout
        padded = layout.padded(qk).transpose(1, 2)
        query, mask = padded[:, : size.heads], group.masks[self.mask]
        keys, values = group.cache.update(padded[:, size.heads :], layout.padded(value).transpose(1, 2), index)
        if self.native:
            out = native_attention.attention(query, keys, values, mask, self.scaling)
        elif self.explicit is not None:
            out = self.explicit(None, query, keys, values, mask, self.scaling, softcap=self.soft_cap)[0]  # type: ignore[arg-type]
        else:
            folded = query.reshape(layout.b, size.kv_heads, -1, size.dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self.scaling)
            out = out.view(layout.b, size.heads, layout.width, size.dim).transpose(1, 2)
        return layout.flat(out.reshape(layout.b, layout.width, -1))

    def _heads_of(self, qkv: Tensor) -> Tensor:
        """[n, H + 2 H', d]: query heads, then key heads, then value heads."""
        size = self.size
        if self.interleaved:
            return qkv.view(-1, size.heads, 3, size.dim).transpose(1, 2).reshape(-1, 3 * size.heads, size.dim)
        return qkv.view(-1, size.heads + 2 * size.kv_heads, size.dim)

    def _normed(self, qkv: Tensor) -> Tensor:
        """Query and key heads [n, H + H', d], normalised per head or over all heads."""
        heads, end = self.size.heads, self.size.heads + self.size.kv_heads
        if self.q_norm is None or self.k_norm is None:
            return qkv[:, :end]
        query, key = qkv[:, :heads], qkv[:, heads:end]
        if self.norms_heads:
            return torch.cat([self.q_norm(query), self.k_norm(key)], 1)
        normed = torch.cat([self.q_norm(query.flatten(1)), self.k_norm(key.flatten(1))], 1)
        return normed.view(-1, end, self.size.dim)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts [n, ...] concatenated."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r dimensions of x [n, H, d] by cosine and signed sine [n, 1, r]."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([turned(x[..., :size], cos, sin), x[..., size:]], -1)
    return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)


class Rotary:
    """Cosines and sines of positions, times ``scale``, for ``frequencies`` [r / 2] in radians per position.

    Computed on demand: a table would be as long as the context.
    """

    def __init__(self, frequencies: Tensor, scale: float, dtype: torch.dtype) -> None:
        self.frequencies = frequencies
        half = frequencies.to(torch.float32)
        # rotate_half(x) * sin(a) == roll(x, half) * sin(-a of the first half, a of the second), and cos(-a) == cos(a).
        self.signed = torch.cat([-half, half])
        self.scale, self.dtype = scale, dtype

    def to(self, dtype: torch.dtype) -> Rotary:
        return Rotary(self.frequencies, self.scale, dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine [n, 1, r] of positions [n]."""
        angles = positions[:, None, None] * self.signed
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(self.dtype), sin.to(self.dtype)


class RowLayout:
    """Mapping of ``n`` flat rows to a [b, width] batch: all of it, or the first ``counts`` of each row."""

    def __init__(self, b: int, width: int, counts: Sequence[int] | None, device: torch.device) -> None:
        self.b, self.width = b, width
        self.nodes: Tensor | None = None
        if counts is None:
            self.starts: Sequence[int] = range(0, b * width, width)
        else:
            self.starts = [0, *accumulate(counts)]
            nodes = [row * width + column for row, count in enumerate(counts) for column in range(count)]
            self.nodes = torch.tensor(nodes, device=device)

    def flat(self, padded: Tensor) -> Tensor:
        """[b, width, ...] -> [n, ...]."""
        flat = padded.flatten(0, 1)
        return flat if self.nodes is None else flat[self.nodes]

    def padded(self, rows: Tensor) -> Tensor:
        """[n, ...] -> [b, width, ...], zero-padded."""
        if self.nodes is not None:
            rows = rows.new_zeros(self.b * self.width, *rows.shape[1:]).index_copy_(0, self.nodes, rows)
        return rows.view(self.b, self.width, *rows.shape[1:])

    def scored(self, x: Tensor, columns: Sequence[tuple[int, int, int]]) -> tuple[Tensor, list[tuple[int, int]]]:
        """The rows of x [n, D] that need logits (:attr:`NetworkCall.wanted`), and their span per feed."""
        spans = [(self.starts[row] + start, self.starts[row] + end) for row, start, end in columns]
        counts = [end - start for start, end in spans]
        if sum(counts) == len(x):
            return x, spans
        rows = torch.tensor([row for span in spans for row in range(*span)], dtype=torch.long, device=x.device)
        ends = list(accumulate(counts))
        return x[rows], [(end - count, end) for count, end in zip(counts, ends, strict=True)]
