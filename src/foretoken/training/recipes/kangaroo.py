"""Training of Kangaroo: the adapter's distribution at every position approaches the whole model's (arXiv
2404.18911)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.kangaroo import KangarooDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.kangaroo import KangarooConfig, KangarooNet
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.training.recipes.base import LAYER_WINDOWS, Batch, Recipe, soft_cross_entropy, some_positions


class KangarooRecipe(Recipe):
    """The adapter reads the exit states of whole texts; the target stays frozen."""

    drafter_class = KangarooDrafter
    config_class: ClassVar[type[Any]] = KangarooConfig
    fixed = tuple(LayerConfig.__dataclass_fields__)
    target_defaults = ("layer",)
    needs = LAYER_WINDOWS
    lr = 1e-2
    net: KangarooNet
    config: KangarooConfig

    @property
    def taps(self) -> Sequence[str]:
        return (f"layer:{self.config.layer}", "last")

    def configure(self, settings: Mapping[str, str]) -> Any:
        config: KangarooConfig = super().configure(settings)
        if config.layer >= self.parts.num_layers:
            last = self.parts.num_layers - 1
            raise ValueError(f"kangaroo needs an exit layer from 1 to {last}, not {config.layer}")
        return config

    def from_target(self) -> dict[str, Any]:
        """The attention shape of the target's layers, and an exit after a sixteenth of them: layer 2 of 32, as in the
        paper."""
        shape = asdict(LayerConfig.of_target(self.parts.config))
        return {**shape, "ffn": 0, "layer": max(1, round(self.parts.num_layers / 16))}

    def build(self) -> nn.Module:
        """A new adapter that starts as an early exit: if the target ends with an RMS norm, it gets that norm."""
        net: Any = super().build()
        some = torch.randn(2, self.config.hidden_size, dtype=self.parts.head.weight.dtype, device=self.parts.device)
        with torch.no_grad():
            weight = self.parts.normed(torch.ones_like(some))[0].float().cpu()
            normed, plain = self.parts.normed(some).float().cpu(), net.norm(some.float().cpu())
            if torch.allclose(normed, plain * weight, rtol=0.05, atol=0.05):
                net.norm.weight.copy_(weight)
        return net

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy with the whole model's distribution at random positions."""
        states = batch.taps[self.taps[0]].float()
        output = self.net(None, states, torch.arange(batch.length, device=states.device).expand(len(states), -1))
        rows, columns = some_positions(batch, 256 * len(states), 0, generator)
        logits = self.parts.logits(self.net.head_state(output[rows, columns]))
        return soft_cross_entropy(logits, batch.teacher(rows, columns), batch.counted(rows, columns))

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return KangarooDrafter(self.target, FeatureModel(self.net, self.parts, self.target))
