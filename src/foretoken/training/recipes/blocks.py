"""Shared parts of the recipes of block drafters: blocks after positions all over a text, in one pass (arXiv
2602.06036).

A block after the anchor at column a sees the text's positions before a, and its own rows.  It does not see the anchor's
hidden state, which the target has not computed when it drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.blocks import BlockDrafter
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.training.mask_rows import additive
from foretoken.training.recipes.base import SHAPE, Batch, Recipe, check_depths, cross_entropies, mean_of
from foretoken.training.recipes.features import NOT_SHAPE, some_rows, texts_of
from foretoken.training.recipes.labels import Labels, mask_of


@dataclass(frozen=True)
class BlockSettings(BlockConfig):
    """The network's shape and its loss; heads and widths default to the target's.

    Attributes:
        heads, kv_heads, head_dim, ffn: as for :class:`~foretoken.methods.drafters.nets.decoder.LayerConfig`, by default
            as in the target.
        anchors: blocks per text and step (0: as many as compare about 512 positions with the target).
        weights: ``"decay"`` (of positions, by ``gamma``) or ``"dpace"`` (D-PACE: by the tokens that are accepted from a
            position on, as far as the drafter's present confidences say).
        gamma: the position k tokens after the anchor has the weight ``exp(-(k - 1) / gamma)``.
        smoothing: share of 1 in D-PACE's confidences, the rest is the drafter's.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    own_mask: bool = True
    anchors: int = 0
    weights: str = "decay"
    gamma: float = 4.0
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ValueError(f"gamma must be above 0, not {self.gamma}")
        if self.weights not in ("decay", "dpace"):
            raise ValueError(f"weights must be decay or dpace, not {self.weights!r}")
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing must be from 0 to 1, not {self.smoothing}")


@dataclass(frozen=True)
class PositionLosses:
    """The losses of one position of all blocks.

    Attributes:
        losses: float32 [b R].
        entropies: cross-entropies with the target's distribution, float32 [b R].
        counted: which of them count, float32 [b R]; ``None``: all.
        memory: what the next position reads.
    """

    losses: Tensor
    entropies: Tensor
    counted: Tensor | None
    memory: Any = None


def default_taps(count: int) -> str:
    """Depths of a target of ``count`` layers: five from 2 to L - 2; fewer, and up to L - 1, for a shallow one."""
    high = count - 2 if count > 6 else max(1, count - 1)
    low, fused = min(2, high), max(1, min(5, count // 2))
    depths = [round(low + i * (high - low) / max(1, fused - 1)) for i in range(fused)]
    return ",".join(map(str, dict.fromkeys(depths if fused > 1 else [high])))


class BlockRecipe(Recipe):
    """Every position of a block learns the target's distribution there."""

    config_class: ClassVar[type[Any]] = BlockSettings
    fixed = ("vocab_size", *NOT_SHAPE, "draft_vocab", "own_head", "own_embedding", "input_scale")
    target_defaults = (*SHAPE, "taps")
    drafter_class: ClassVar[type[BlockDrafter]]
    lr = 3e-3
    reduces = True  # the projection to a large vocabulary costs more than all the rest
    needs_masses: ClassVar[bool] = False
    """Whether the losses read the target's share of the draft vocabulary."""
    config: Any
    net: BlockNet

    @property
    def taps(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self.config.tap_names, "last")))

    @property
    def ahead(self) -> int:
        return int(self.config.drafts)

    def from_target(self) -> dict[str, Any]:
        shape = asdict(LayerConfig.of_target(self.parts.config))
        return {**shape, "vocab_size": self.parts.vocab_size, "taps": default_taps(self.parts.num_layers)}

    def configure(self, settings: Mapping[str, str]) -> Any:
        config = super().configure(settings)
        check_depths("taps", config.taps, self.parts.num_layers)
        return config

    def build(self) -> nn.Module:
        """A new network, whose last norm starts as the target's, because the target's projection reads it."""
        net: Any = super().build()
        weight = getattr(self.parts.final_norm, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == net.norm.weight.shape:
            net.norm.weight.data.copy_(weight.detach())
        if net.mask_embedding is not None:
            ids = torch.linspace(0, self.parts.vocab_size - 1, 1024, device=self.parts.device).long()
            rows = self.parts.embed.weight.detach()[ids].float().cpu()
            net.mask_embedding.data.copy_(rows.mean(0) + 0.1 * rows.std(0) * torch.randn(rows.shape[1]))
        return net

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return self.drafter_class.of(self.net, self.parts, self.target, self.frequent, **self.shape)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over positions of their losses."""
        drafts = self.config.drafts
        # By default about 512 positions per text are compared with the target.
        anchors = 1 + some_rows(batch, drafts, generator, self.config.anchors or max(1, 512 // drafts))
        states = self.states(batch, anchors)  # [b, R, drafts, D]
        columns = anchors[..., None] + torch.arange(drafts, device=anchors.device)
        labels = self.labels(batch, columns)
        parts: list[PositionLosses] = []
        for position in range(drafts):
            memory = parts[-1].memory if parts else None
            parts.append(self.position_losses(batch, labels, states[:, :, position], columns[..., position], memory))
        if self.config.weights == "dpace":
            return paced_mean(parts, self.config.smoothing)
        weights = [math.exp(-position / self.config.gamma) for position in range(drafts)]
        total = states.new_zeros(())
        for weight, part in zip(weights, parts, strict=True):
            total = total + weight / sum(weights) * mean_of(part.losses, part.counted)
        return total

    def labels(self, batch: Batch, columns: Tensor) -> Labels:
        """The target's distributions after the tokens at ``columns`` [b, R, drafts]."""
        mask = mask_of(batch, texts_of(columns.flatten(1)), columns.flatten())
        return Labels(batch, mask, self.frequent, self.needs_masses)

    def position_losses(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> PositionLosses:
        """The losses of one position of all blocks.  States are [b, R, D] of the network, ``columns`` [b, R] the tokens
        before the predicted ones, and ``memory`` that of the previous position (``None`` at first)."""
        distributions, counted = labels.of(texts_of(columns), columns.flatten())
        entropies = cross_entropies(self.logits(states), distributions)
        return PositionLosses(entropies, entropies, counted)

    def logits(self, states: Tensor) -> Tensor:
        """[b R, V_d] of states [b, R, D]."""
        return self.parts.logits(states.flatten(0, 1), self.frequent)

    def states(self, batch: Batch, anchors: Tensor) -> Tensor:
        """[b, R, drafts, D] states of the predicting rows, of blocks after ``anchors`` [b, R]."""
        net, config, n = self.net, self.config, batch.length
        b, count = anchors.shape
        context = net.context([batch.taps[tap].float() for tap in config.tap_names])
        columns = torch.arange(n, device=anchors.device).expand(b, n)
        positions = (anchors[..., None] + torch.arange(config.block, device=anchors.device)).flatten(1)

        def keep(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            text_rows = net.keys(context, columns, layer)
            return torch.cat([text_rows[0].to(key.dtype), key], 2), torch.cat([text_rows[1].to(value.dtype), value], 2)

        kinds = list(zip(config.reaches, config.causals, strict=True))
        masks = {kind: training_mask(anchors, n, config.block, *kind) for kind in set(kinds)}
        ids = net.block_ids(batch.tokens.gather(1, anchors), config.block)
        x = net.embedded(ids, self.parts.embed.weight).flatten(1, 2)
        states = net(x, positions, [masks[kind] for kind in kinds], keep).unflatten(1, (count, config.block))
        return states if config.from_anchor else states[:, :, 1:]


def pace(confidences: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights [n, places] of the positions of blocks, from the drafter's confidences of their shape.

    With ``s = (1 - smoothing) confidence + smoothing`` a position's weight is the number of tokens accepted from it on:
    the sum, over it and the later ones, of the product of all ``s`` up to there.
    """
    reached = ((1 - smoothing) * confidences + smoothing).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def paced_mean(parts: Sequence[PositionLosses], smoothing: float) -> Tensor:
    """Mean of the losses of all positions with D-PACE's weights, through which no gradient flows."""
    losses = torch.stack([part.losses for part in parts], -1)
    counted = torch.stack(
        [torch.ones_like(part.losses) if part.counted is None else part.counted for part in parts], -1
    )
    entropies = torch.stack([part.entropies.detach() for part in parts], -1)
    weights = counted * pace(torch.exp(-entropies) * counted, smoothing)
    return (weights * losses).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def training_mask(anchors: Tensor, length: int, rows: int, reach: int, causal: bool) -> Tensor:
    """Additive mask [b, 1, R rows, length + R rows]: a row sees positions before its anchor and rows of its own
    block."""
    b, count = anchors.shape
    positions = torch.arange(length, device=anchors.device)
    within = torch.arange(rows, device=anchors.device)
    query = anchors[..., None] + within  # [b, R, rows]
    text = (positions < anchors[..., None, None]).expand(b, count, rows, length)
    same_block = torch.eye(count, dtype=torch.bool, device=anchors.device)[:, None, :, None].expand(
        count, rows, count, rows
    )
    if reach:
        text = text & (query[..., None] - positions <= reach)
        same_block = same_block & ((within[:, None] - within).abs() <= reach)[None, :, None]
    if causal:
        same_block = same_block & (within[:, None] >= within)[None, :, None]
    visible = torch.cat([text.flatten(1, 2), same_block.flatten(2).flatten(0, 1).expand(b, -1, -1)], -1)
    return additive(visible)[:, None]
