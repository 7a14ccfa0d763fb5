"""Training of Medusa-1 (heads on a frozen target) and Medusa-2 (both together; arXiv 2401.10774, sections 2.2.1 and
2.2.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.medusa import MedusaDrafter
from foretoken.methods.drafters.nets.medusa import MedusaConfig
from foretoken.training.recipes.base import Batch, check_labels, check_rank, text_loss
from foretoken.training.recipes.heads import PLACES, HeadsRecipe


@dataclass(frozen=True)
class MedusaSettings(MedusaConfig):
    """The heads' shape and training settings.

    Attributes:
        labels: ``"target"`` (the target's distribution, which they must predict) or ``"text"`` (the paper's labels).
        decay: weight of head i is ``decay ** i``.
        mode: ``"frozen"`` (Medusa-1) or ``"joint"`` (Medusa-2: the target is trained too).
        head_weight: in the joint mode, the final weight of the heads' loss relative to the target's own; it rises from
            0 like the first quarter of a sine wave.
        rank: in the joint mode, 0 trains all weights of the target, a positive rank only a low-rank update of its
            linear layers.
    """

    labels: str = "target"
    decay: float = 0.8
    mode: str = "frozen"
    head_weight: float = 0.2
    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels, self.decay)
        if self.mode not in ("frozen", "joint"):
            raise ValueError(f"mode must be frozen or joint, not {self.mode!r}")
        check_rank(self.rank, self.mode == "joint")


class MedusaRecipe(HeadsRecipe):
    """Every head reads only the state."""

    config_class: ClassVar[type[Any]] = MedusaSettings
    drafter_class = MedusaDrafter
    config: MedusaSettings

    @property
    def trains_target(self) -> bool:
        return self.config.mode == "joint"

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The heads' loss; in the joint mode plus the target's own on the text."""
        heads = super().loss(batch, generator)
        if not self.trains_target:
            return heads
        ramp = math.sin(math.pi / 2 * min(1.0, (batch.step + 1) / batch.steps))
        return text_loss(batch, PLACES, generator) + self.config.head_weight * ramp * heads

    def states(
        self, batch: Batch, rows: Tensor, columns: Tensor, generator: torch.Generator | None = None
    ) -> Sequence[Tensor]:
        return self.net(batch.taps["last"][rows, columns].float()).unbind()
