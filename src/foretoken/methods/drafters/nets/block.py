"""A network that predicts a block of positions in one pass: DFlash, and methods built on it (arXiv 2602.06036).

The target's hidden states of a sequence become keys and values of every layer.  The block's rows, the last token and
masks, attend to them and to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.methods.drafters.nets.decoder import LayerConfig, LayerKeep, RmsNorm, rotary, turned
from foretoken.models.forward.heads.pieces import BlockNetParts, LayerParts


@dataclass(frozen=True)
class BlockConfig(LayerConfig):
    """Shape of the network; its width is the target's, whose embedding and vocabulary projection it uses.

    Attributes:
        vocab_size: V of the target.
        layers: number of decoder layers (published networks: 5).
        taps: depths of the target that are fused, joined by commas; k is the output of the first k layers.  By default
            five from 2 to L - 2.
        block: rows of a block: the last token, and masks (published networks: 16).
        mask_token: id whose embedding is the input of the predicted positions.
        own_mask: use a learned embedding instead of that of ``mask_token``.
        from_anchor: row 0, the last token, predicts too: as many draft tokens as rows, and every row predicts the token
            after its position instead of the one at it.
        reach: attention distance of a row in tokens, 0 for no limit: one number for all layers, or one each.
        causal: whether a row attends only to earlier rows of its block, 0 or 1: one for all layers, or one each.
        sinks: whether every head has a learned logit in its softmax without a value.
        draft_vocab: V_d, size of the draft vocabulary; 0 means all.
        own_head: whether it has a vocabulary projection instead of the target's.
        input_scale: factor of the embeddings.
        own_embedding: whether it has a token embedding instead of the target's.
    """

    vocab_size: int = 0
    layers: int = 1
    taps: str = ""
    block: int = 8
    mask_token: int = 0
    own_mask: bool = False
    from_anchor: bool = False
    reach: str = "0"
    causal: str = "0"
    sinks: bool = False
    draft_vocab: int = 0
    own_head: bool = False
    input_scale: float = 1.0
    own_embedding: bool = False

    def __post_init__(self) -> None:
        # More than any published network has, fewer than the scratch of a sequence holds.
        if not 2 - self.from_anchor <= self.block <= 256:
            raise ValueError(f"a block has {2 - self.from_anchor} to 256 rows, not {self.block}")
        super().__post_init__()
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, not {self.layers}")
        if not all(part.isdecimal() for part in self.taps.split(",")):
            raise ValueError(f"taps={self.taps!r} must be depths of the target joined by commas, for example 2,5,8")
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token must be a token of the target, from 0 to {self.vocab_size - 1}, not {self.mask_token}"
            )
        if not 0 <= self.draft_vocab <= self.vocab_size:
            raise ValueError(f"draft_vocab must be from 0 (all) to {self.vocab_size}, not {self.draft_vocab}")
        if self._each("reach") and max(self._each("causal")) > 1:
            raise ValueError(f"causal={self.causal!r} must be 0 or 1")

    def _each(self, key: str) -> tuple[int, ...]:
        text: str = getattr(self, key)
        parts = text.split(",")
        if not all(part.isdecimal() for part in parts) or len(parts) not in (1, self.layers):
            raise ValueError(f"{key}={text!r} must be one number, or one for each of {self.layers} layers")
        return tuple(int(part) for part in parts) * (self.layers if len(parts) == 1 else 1)

    @property
    def tap_names(self) -> tuple[str, ...]:
        """Names of the fused hidden states; a depth may occur twice."""
        return tuple(f"layer:{int(part)}" for part in self.taps.split(","))

    @property
    def reaches(self) -> tuple[int, ...]:
        return self._each("reach")

    @property
    def causals(self) -> tuple[bool, ...]:
        return tuple(bool(value) for value in self._each("causal"))

    @property
    def drafts(self) -> int:
        return self.block - (not self.from_anchor)

    @property
    def num_draft_ids(self) -> int:
        return self.draft_vocab or self.vocab_size

    def rows_for(self, drafts: int) -> int:
        """Number of rows that must run for ``drafts`` tokens: all if rows attend to later ones."""
        return drafts + (not self.from_anchor) if all(self.causals) else self.block


class BlockAttention(nn.Module):
    """Attention of a block's rows to the sequence and each other, with normed queries and keys (Qwen3)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config = config
        self.q_proj = nn.Linear(size, config.heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * dim, size, bias=bias)
        self.q_norm, self.k_norm = RmsNorm(dim, config.eps), RmsNorm(dim, config.eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [b, H', n, d] of positions x [b, n, D]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.config.head_dim))).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return turned(key, cos, sin), value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, keep: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """[b, n, D] of normed rows x [b, n, D]; ``mask`` [b, 1, n, m] is additive."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))).transpose(1, 2)
        key, value = keep(*self.keys(x, cos, sin))
        mask = mask.to(query.dtype)
        if self.attention_sink_bias is not None:  # one more key that scores this logit and adds nothing
            (b, _, n, _), sink = mask.shape, self.attention_sink_bias.to(query.dtype)
            mask = torch.cat([mask.expand(b, len(sink), n, -1), sink[:, None, None].expand(b, -1, n, 1)], -1)
            key, value = (F.pad(part, (0, 0, 0, 1)) for part in (key, value))
        groups = self.config.heads != self.config.kv_heads
        out = F.scaled_dot_product_attention(turned(query, cos, sin), key, value, attn_mask=mask, enable_gqa=groups)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockMlp(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn, bias=bias)
        self.down_proj = nn.Linear(config.ffn, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockLayer(nn.Module):
    """Attention and MLP with norms before them and residuals around them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.eps)
        self.self_attn, self.mlp = BlockAttention(config), BlockMlp(config)
        for linear in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.normal_(linear.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def pieces(self) -> LayerParts:
        return LayerParts(self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, keep: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [b, n, D] -> [b, n, D]; the arguments are those of :class:`BlockAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, keep)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockNet(nn.Module):
    """The network: :meth:`context` and :meth:`keys` process positions of the sequence, :meth:`forward` rows of blocks.

    With a draft vocabulary, the buffers ``d2t`` and ``t2d`` are those of
    :class:`~foretoken.methods.drafters.nets.eagle3.Eagle3Net`.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.tap_names) * size, size, bias=False)
        self.hidden_norm, self.norm = RmsNorm(size, config.eps), RmsNorm(size, config.eps)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if config.own_mask else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.lm_head = nn.Linear(size, config.num_draft_ids, bias=False) if config.own_head else None
        if config.draft_vocab:
            self.register_buffer("d2t", torch.zeros(config.num_draft_ids, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.num_draft_ids)

    def layer(self, config: BlockConfig) -> nn.Module:
        return BlockLayer(config)

    def pieces(self) -> BlockNetParts:
        covered = "its attention has sinks" if self.config.sinks else ""
        layers: Any = self.layers
        return BlockNetParts(self.config, [layer.pieces() for layer in layers], self.norm, self.fc, covered)

    @property
    def vocabulary(self) -> Tensor | None:
        """[V_d] ids of the draft vocabulary; ``None``: all."""
        if not self.config.draft_vocab:
            return None
        offsets: Tensor = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def context(self, taps: Sequence[Tensor]) -> Tensor:
        """Fused states [..., D] from the target's hidden states at the tapped depths, each [..., D]."""
        return self.hidden_norm(self.fc(torch.cat(list(taps), -1)))

    def keys(self, context: Tensor, positions: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [b, H', n, d] of fused states [b, n, D] at positions [b, n]."""
        cos, sin = rotary(positions, self.config, context)
        attention: BlockAttention = self.layers[layer].self_attn  # type: ignore[assignment]
        return attention.keys(context, cos, sin)

    def embedded(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Embeddings [..., D] of a block's ids, by the target's embedding [V, D] if the network has none."""
        if self.embed_tokens is not None:
            embedding = self.embed_tokens.weight
        rows = F.embedding(tokens, embedding.detach()).to(self.fc.weight.dtype) * self.config.input_scale
        if self.mask_embedding is None:
            return rows
        masked = torch.ones(tokens.shape[-1], dtype=torch.bool, device=tokens.device)
        masked[0] = False
        return torch.where(masked[:, None], self.mask_embedding, rows)

    def block_ids(self, anchors: Tensor, rows: int) -> Tensor:
        """Ids [..., rows] of blocks: the anchors [...], and masks."""
        masks = anchors.new_full((*anchors.shape, rows - 1), self.config.mask_token)
        return torch.cat([anchors[..., None], masks], -1)

    def forward(self, x: Tensor, positions: Tensor, masks: Sequence[Tensor], keep: LayerKeep) -> Tensor:
        """Normed states [b, n, D] of the rows of blocks.

        Args:
            x: [b, n, D] embedded rows, block after block.
            positions: [b, n].
            masks: per layer, additive [b, 1, n, m].
        """
        cos, sin = rotary(positions, self.config, x)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, masks[index], lambda key, value, i=index: keep(i, key, value))
        return self.norm(x)


def block_mask(starts: Tensor, rows: int, used: int, reach: int, causal: bool) -> Tensor:
    """Additive [b, 1, rows, used]: attention mask of the rows of one block per sequence.

    Slot s of a sequence's cache is position s; the block begins at ``starts`` [b].
    """
    slots = torch.arange(used, device=starts.device)
    query = starts[:, None] + torch.arange(rows, device=starts.device)  # [b, rows]
    last = query if causal else (starts + rows - 1)[:, None].expand(-1, rows)
    visible = slots <= last[..., None]
    if reach:
        visible &= (query[..., None] - slots).abs() <= reach
    return torch.where(visible, 0.0, -torch.inf)[:, None]
