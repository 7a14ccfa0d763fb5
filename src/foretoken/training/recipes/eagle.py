"""Training of EAGLE-1: regression of the next feature, and agreement with the target's distribution (arXiv 2401.15077,
section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.methods.drafters.nets.eagle import EagleConfig
from foretoken.training.recipes.base import Batch, mean_of
from foretoken.training.recipes.features import FeatureRecipe, TopKSettings, at_rows, some_rows, texts_of


@dataclass(frozen=True)
class EagleSettings(TopKSettings, EagleConfig):
    """The head's shape and its loss.

    Attributes:
        regression: weight of the smooth L1 distance between features.
        agreement: weight of the cross-entropy with the target's distribution.
        noise: width of the uniform noise on input features, for texts of 512 tokens.
        unroll: steps on the head's own features (more than the paper's 1 is HASS, arXiv 2408.15766).
    """

    regression: float = 1.0
    agreement: float = 0.1
    noise: float = 0.2
    unroll: int = 3

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise ValueError(f"eagle needs unroll >= 1, not {self.unroll}")


class EagleRecipe(FeatureRecipe):
    """One step per position from true features, with noise in place of the errors of drafting."""

    config_class: ClassVar[type[Any]] = EagleSettings
    drafter_class = EagleDrafter
    reduces = True  # it uses the target's projection
    config: EagleSettings

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted sum of the two distances, mean over steps."""
        truth = batch.taps["last"].float()
        noise = torch.rand(truth.shape, generator=generator).to(truth.device) - 0.5
        features = truth + noise * (self.config.noise * 512 / batch.length)
        steps = self.config.unroll
        judged = some_rows(batch, steps, generator)
        rows = torch.arange(batch.length - steps, device=truth.device).expand(len(truth), -1)
        total = truth.new_zeros(())
        labels = self.labels(batch, judged, steps)
        for step, output in enumerate(self.unrolled(batch, features, rows, steps)):
            weight = self.config.agreement
            agreement = self.agreement(labels, at_rows(output, judged), judged + 1 + step, weight=weight)
            distance = F.smooth_l1_loss(output.float(), at_rows(truth, rows + 1 + step), reduction="none").mean(-1)
            counted = batch.counted(texts_of(rows).view_as(rows), rows + 1 + step)
            regression = mean_of(distance, counted)
            total = total + agreement + self.config.regression * regression
        return total / steps
