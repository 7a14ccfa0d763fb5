"""Training of a multi-token prediction module applied recursively (the recipe of FastMTP), or of several in a row
(DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.methods.drafters.nets.mtp import MtpConfig, module_for
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.mtp import TargetLayerModule
from foretoken.models.forward.heads.stacked import StackedModules
from foretoken.models.network.taps import decoder_layers
from foretoken.training.recipes.base import Batch
from foretoken.training.recipes.features import FeatureRecipe


@dataclass(frozen=True)
class MtpSettings(MtpConfig):
    """The module's shape and its loss; ``layer=target`` trains one of the target's own class, as checkpoints ship it.

    Attributes:
        unroll: draft steps: one per module, then further steps of the last module on its own states.
        beta: a step's weight is ``beta`` times that of the step before it; 1 gives equal weights, as in DeepSeek-V3.
    """

    unroll: int = 3
    beta: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unroll < self.modules or self.beta <= 0:
            raise ValueError(
                f"mtp needs unroll >= {self.modules} (a step for each module) and beta > 0, not {self.unroll} and "
                f"{self.beta}"
            )


class MtpRecipe(FeatureRecipe):
    """Teacher-forced tokens, own states fed back; every step learns the target's distribution at its position."""

    config_class: ClassVar[type[Any]] = MtpSettings
    target_defaults = ("experts",)
    drafter_class = MtpDrafter
    config: MtpSettings

    def from_target(self) -> dict[str, Any]:
        names = (name for name, _ in decoder_layers(self.parts.network)[-1].named_modules())
        return {**super().from_target(), "experts": any("experts" in name.split(".") for name in names)}

    def build(self) -> nn.Module:
        """A new module; if it is of the target's own class, it starts from the target's last layer."""
        net = module_for(MtpConfig(**self.stored_config()), self.parts.network)
        for module in net.steps if isinstance(net, StackedModules) else (net,):
            if isinstance(module, TargetLayerModule):
                module.start_from(self.parts.network)
        return net

    @property
    def modules(self) -> Sequence[nn.Module]:
        return tuple(self.net.steps) if isinstance(self.net, StackedModules) else (self.net,)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        head = DraftHead(self.parts, self.draft_ids)
        return MtpDrafter(MtpDrafter.model_of(self.net, self.parts, self.target, head))

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        features = batch.taps["last"].float()
        return self.unrolled_loss(batch, features, self.config.unroll, self.config.beta, generator)
