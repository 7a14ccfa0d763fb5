"""A plain Llama-style decoder layer, the component of feature-level drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models.forward.heads.lean import HeadRun
from foretoken.models.network.frequencies import rotary_frequencies

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores new keys and values [b, H, n, d] and returns all visible ones [b, H, m, d]."""
LayerKeep = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same for one of several layers, whose index comes first."""

Mask = Tensor | None
"""Additive, broadcast to [b, 1, n, m]; ``None``: no mask with a cache, causal without one."""


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a layer, taken from the target.

    Attributes:
        hidden_size: D.
        heads: number of attention heads.
        kv_heads: number of key-value heads.
        head_dim: width of an attention head.
        ffn: width of the MLP.
        rope_theta: base of the rotary embedding.
        eps: of the norms.
        rope: Transformers' parameters of a scaled or partial rotary embedding; ``None``: a plain one.
        attention_bias: whether the projections of the attention have biases.
        mlp_bias: whether those of the MLP have biases.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10000.0
    eps: float = 1e-6
    rope: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, not heads={self.heads} with kv_heads={self.kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2 or self.ffn < 1:  # rotary embeddings turn pairs of numbers
            raise ValueError(
                f"head_dim must be even and at least 2, and ffn at least 1, not {self.head_dim} and {self.ffn}"
            )
        if self.rope is not None:
            rotary_frequencies(self.head_dim, self.rope_theta, self.rope)

    @classmethod
    def of_target(cls, config: Any) -> LayerConfig:
        """The shape of the target's layers."""
        rope = getattr(config, "rope_parameters", None) or {}
        heads = int(config.num_attention_heads)
        return cls(
            hidden_size=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            ffn=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
            rope_theta=float(rope.get("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0),
            eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        )


class RmsNorm(nn.RMSNorm):
    """Uses the input's dtype: under autocast the input is bfloat16 and the weight is not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Rotary self-attention with grouped keys and values; norms and residuals are the caller's.

    Args:
        wide: whether queries, keys and values read two states side by side (EAGLE-3).
        head_norms: whether every head of the queries and keys is normed (Qwen3).
    """

    def __init__(self, config: LayerConfig, wide: bool = False, head_norms: bool = False) -> None:
        super().__init__()
        size, width = config.hidden_size, config.hidden_size * (2 if wide else 1)
        self.config, bias, dim = config, config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * dim, size, bias=bias)
        self.q_norm, self.k_norm = (RmsNorm(dim, config.eps) if head_norms else None for _ in range(2))

    def mixed(self, inputs: Tensor, positions: Tensor, mask: Mask, keep: Keep | None = None) -> Tensor:
        """[b, n, D] of normalised inputs [b, n, width]; other arguments as in :class:`DecoderLayer`."""
        if isinstance(keep, HeadRun):
            return keep.mixed(inputs)
        query, key, value = self.heads_of(inputs, positions)
        if keep is not None:
            key, value = keep(key, value)
        return self.attend(query, key, value, mask, causal=keep is None and mask is None)

    def heads_of(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [b, H, n, d] and keys [b, H', n, d], and values, of inputs [b, n, width]."""
        b, n, _ = inputs.shape
        dim = self.config.head_dim
        query = self.q_proj(inputs).view(b, n, -1, dim).transpose(1, 2)
        key = self.k_proj(inputs).view(b, n, -1, dim).transpose(1, 2)
        value = self.v_proj(inputs).view(b, n, -1, dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = rotary(positions, self.config, query)
        return turned(query, cos, sin), turned(key, cos, sin), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, causal: bool) -> Tensor:
        """Attention and its output projection, [b, n, D]."""
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask.to(query.dtype),
            is_causal=causal,
            enable_gqa=self.config.heads != self.config.kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DecoderLayer(Attention):
    """Attention and a gated MLP with residuals.

    Args:
        input_norm: whether the attention's input is normalised (EAGLE-1 omits this).
        wide, head_norms: as for :class:`Attention`.
    """

    def __init__(
        self, config: LayerConfig, input_norm: bool = True, wide: bool = False, head_norms: bool = False
    ) -> None:
        super().__init__(config, wide, head_norms)
        size, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, config.ffn, bias=bias)
        self.up_proj = nn.Linear(size, config.ffn, bias=bias)
        self.down_proj = nn.Linear(config.ffn, size, bias=bias)
        self.input_layernorm = RmsNorm(size, config.eps) if input_norm else None
        self.post_attention_layernorm = RmsNorm(size, config.eps)
        for linear in (self.o_proj, self.down_proj):
            nn.init.normal_(linear.weight, std=0.02 / 2**0.5)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Mask, keep: Keep | None = None, beside: Tensor | None = None
    ) -> Tensor:
        """x [b, n, D] -> [b, n, D].

        Args:
            x: the residual stream.
            positions: [b, n].
            keep: a cache; one that runs the layer itself (``HeadRun``) takes rows [n, D] instead of [b, n, D].
            beside: for a wide layer, the already normalised attention input [b, n, 2 D].
        """
        if isinstance(keep, HeadRun):
            return keep.decoded(x, beside)
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.mixed(normed if beside is None else beside, positions, mask, keep)
        return x + self.mlp(self.post_attention_layernorm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """[b, n, D], without the residual."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(positions: Tensor, config: LayerConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [b, 1, n, r] of positions [b, n], for the r numbers of a head that are rotated."""
    frequencies, scale = rotary_frequencies(config.head_dim, config.rope_theta, config.rope, positions.device)
    angles = positions[..., None].float() * frequencies
    both = torch.cat([angles, angles], -1)[:, None]
    return (both.cos() * scale).to(like.dtype), (both.sin() * scale).to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [b, H, n, d] (halves, as Transformers stores them)."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([turned(x[..., :size], cos, sin), x[..., size:]], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
