"""Training of a multi-token prediction module that is used recursively (the recipe of FastMTP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.mtp import MtpConfig, MtpNet, module_for
from foretoken.models.forward.heads.mtp import NativeModule
from foretoken.models.network.taps import decoder_layers
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.features import FeatureRecipe, some_rows


@dataclass(frozen=True)
class MtpSettings(MtpConfig):
    """The module's shape and its loss; ``layer=target`` trains one as checkpoints ship it, of the target's own class.

    Attributes:
        unroll: steps on the module's own states.
        beta: a step's weight is ``beta`` times that of the step before it.
    """

    unroll: int = 3
    beta: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unroll < 1 or self.beta <= 0:
            raise ValueError(f"mtp needs unroll >= 1 and beta > 0, not {self.unroll} and {self.beta}")


class MtpRecipe(FeatureRecipe):
    """Teacher-forced tokens, own states fed back; every step learns the target's distribution at its place."""

    method = "mtp"
    config_class: ClassVar[type[Any]] = MtpSettings
    net_config = MtpConfig
    net_class = MtpNet
    drafter_class = MtpDrafter
    config: MtpSettings

    def from_target(self) -> dict[str, Any]:
        """The shape of the target's own layers, and whether they have experts."""
        names = (name for name, _ in decoder_layers(self.parts.network)[-1].named_modules())
        return {**super().from_target(), "experts": any("experts" in name.split(".") for name in names)}

    def build(self) -> nn.Module:
        """A new module, of the target's own class where that is asked for: it then starts from the target's layer."""
        made = module_for(MtpConfig(**self.stored_config()), self.parts.network)
        if isinstance(made, NativeModule):
            made.start_from(self.parts.network)
        return made

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over steps of the cross-entropy with the target's distribution."""
        features = batch.taps["last"].float()
        weights = [self.config.beta**step for step in range(self.config.unroll)]
        rows = some_rows(batch, self.config.unroll, generator)
        total = features.new_zeros(())
        labels = self.labels(batch, rows, self.config.unroll)
        for step, output in enumerate(self.unrolled(batch, features, rows, self.config.unroll)):
            total = total + weights[step] / sum(weights) * self.agreement(labels, output, rows + 1 + step)
        return total
