"""Training of P-EAGLE: the text's rows, and masks after positions all over it, in one pass (arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.nets.peagle import PeagleConfig, PeagleNet
from foretoken.methods.drafters.peagle import PeagleDrafter
from foretoken.training.mask_rows import KEEP, LEAST, additive, mask_ids, mask_rows, rows_mask, with_text
from foretoken.training.recipes.base import SHAPE, Batch
from foretoken.training.recipes.eagle3 import Eagle3Recipe
from foretoken.training.recipes.features import NOT_SHAPE, texts_of
from foretoken.training.recipes.labels import Labels, mask_of


@dataclass(frozen=True)
class PeagleSettings(PeagleConfig):
    """The network's shape and its loss; heads and widths default to the target's.

    Attributes:
        keep: depth d of the masks keeps ``max(keep ** d, least)`` of all anchors.
        least: least share of all anchors at a depth.
        heads, kv_heads, head_dim, ffn: as for :class:`~foretoken.methods.drafters.nets.decoder.LayerConfig`, by default
            as in the target.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    own_embedding: bool = False
    keep: float = KEEP
    least: float = LEAST

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= self.keep <= 1:
            raise ValueError(f"0 < least <= keep <= 1 must hold, not least={self.least} and keep={self.keep}")


class PeagleRecipe(Eagle3Recipe):
    """Every row learns the target's distribution after its position."""

    config_class: ClassVar[type[Any]] = PeagleSettings
    fixed = ("vocab_size", *NOT_SHAPE)
    target_defaults = (*Eagle3Recipe.target_defaults, *SHAPE)
    drafter_class: ClassVar[type[Any]] = PeagleDrafter
    config: Any
    net: PeagleNet

    def build(self) -> nn.Module:
        """A new network, started like EAGLE-3's; the hidden state of masks starts as noise."""
        net: Any = super().build()
        net.mask_hidden.data.normal_(std=0.1)
        return net

    @property
    def ahead(self) -> int:
        return self.config.places

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Mean over rows of the cross-entropy with the target's distribution over the draft vocabulary."""
        anchors, depths = self.rows(batch, generator)
        output = self.outputs(batch, anchors, depths)
        # At most 512 rows per text are compared with the target.
        chosen = torch.randperm(len(anchors), generator=generator)[:512].sort().values
        columns = (anchors + depths + 1)[chosen].to(output.device).expand(len(output), -1)
        rows, columns = texts_of(columns), columns.flatten()
        labels = Labels(batch, mask_of(batch, rows, columns), self.draft_ids)
        return labels.distance(self.draft_logits(output[:, chosen].flatten(0, 1)), rows, columns)

    def rows(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Anchors and depths [m] of the rows of a text, whose last position has a label, and of masks.  Raises
        ``ValueError`` for texts that are too short."""
        config, n = self.config, batch.length - 1
        if n < config.places:
            raise ValueError(
                f"blocks of {batch.length} tokens are too short for {config.places} positions: use a larger --context"
            )
        seeds = torch.ones(n, dtype=torch.bool)
        if batch.learned is not None:
            counted = batch.learned[:, 2 : 2 + n].any(0).cpu()
            seeds = counted if bool(counted.any()) else seeds
        return with_text(n, *mask_rows(seeds, config.places - 1, generator, config.keep, config.least))

    def outputs(self, batch: Batch, anchors: Tensor, depths: Tensor) -> Tensor:
        """Outputs [b, m, D] of rows by anchors and depths [m], those of the text first."""
        net, device, n = self.net, batch.tokens.device, int((depths == 0).sum())
        features = net.fuse([batch.taps[tap][:, :n].float() for tap in self.config.taps])
        masks = net.mask_feature.expand(len(features), len(anchors) - n, -1)
        ids = mask_ids(batch.tokens[:, 1 : n + 1], len(anchors) - n, self.config.mask_token)
        positions = (anchors + depths).to(device).expand(len(ids), -1)
        visible = additive(rows_mask(anchors, depths).to(device))[None, None]
        whole = torch.cat([features, masks.to(features.dtype)], 1)
        return net(self.embedded(ids).to(features.dtype), whole, positions, visible)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return PeagleDrafter.of(self.net, self.parts, self.target, **self.shape)
