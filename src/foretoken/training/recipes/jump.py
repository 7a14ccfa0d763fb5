"""Training of ``jump``: draft rollouts through the target's own frozen layers, from positions all over a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.jump import JumpDrafter
from foretoken.methods.drafters.nets.jump import JumpConfig, JumpNet
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.network.chains import windows
from foretoken.models.network.layers import LayerPlan
from foretoken.training.recipes.base import LAYER_WINDOWS, Batch, Recipe, mean_of
from foretoken.training.recipes.features import at_rows, some_rows, texts_of
from foretoken.training.recipes.labels import Labels, mask_of


@dataclass(frozen=True)
class JumpSettings(JumpConfig):
    """Shape of the predictor, and training settings.

    Attributes:
        steps: draft tokens per position.
        decay: weight of step k (from 0) is ``decay ** k``.
        state_weight: weight of the distance between predicted and true state, relative to the latter's size.
    """

    start: int = 1
    stop: int = 2
    state: int = 2
    steps: int = 4
    decay: float = 0.8
    state_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1 or not 0 < self.decay <= 1 or not self.state_weight >= 0:
            raise ValueError(
                "jump needs steps >= 1, 0 < decay <= 1 and state_weight >= 0, "
                f"not {self.steps}, {self.decay} and {self.state_weight}"
            )


class JumpRecipe(Recipe):
    """Trains the predictor and the readout; the drafting layers are the target's and stay frozen."""

    drafter_class = JumpDrafter
    config_class: ClassVar[type[Any]] = JumpSettings
    fixed = ("hidden_size",)
    target_defaults = ("start", "stop", "state")
    needs = LAYER_WINDOWS
    lr = 1e-2
    reduces = True  # the logits of a large vocabulary's rare tokens would cost most of a step
    net: JumpNet
    config: JumpSettings

    @property
    def taps(self) -> Sequence[str]:
        return tuple(dict.fromkeys((f"layer:{self.config.state}", f"layer:{self.config.start}", "last")))

    @property
    def ahead(self) -> int:
        return self.config.steps

    def configure(self, settings: Mapping[str, str]) -> Any:
        """The layers and the predictor's shape; ``state`` follows ``stop`` and ``stop`` follows ``start``."""
        options = dict(settings)
        if "start" in options and options["start"].isdecimal():
            options.setdefault("stop", str(int(options["start"]) + 1))
        if "stop" in options:
            options.setdefault("state", options["stop"])
        config: JumpSettings = super().configure(options)
        config.check(self.parts.num_layers, int(self.parts.embed.weight.shape[1]))
        return config

    def from_target(self) -> dict[str, Any]:
        """One layer after two thirds of the layers: layer 17 of 24, as published."""
        layers = self.parts.num_layers
        start = max(1, min(2 * layers // 3, layers - 1))
        return {"hidden_size": self.parts.hidden_size, "start": start, "stop": start + 1, "state": start + 1}

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over steps of the cross-entropy with the target's distribution and the distance of predicted
        states."""
        config = self.config
        columns = 1 + some_rows(batch, config.steps, generator, 32)  # a draft begins after a token
        positions = torch.cat([columns + step for step in range(config.steps)], 1)
        labels = Labels(batch, mask_of(batch, texts_of(positions), positions.flatten()), self.frequent)
        total = torch.zeros((), device=columns.device)
        for step, (predicted, states) in enumerate(self.rollout(batch, columns)):
            ahead = columns + step
            logits = self.draft_logits(states.flatten(0, 1))
            part = labels.distance(logits, texts_of(ahead), ahead.flatten())
            true = at_rows(batch.taps[f"layer:{config.start}"].float(), ahead)
            size = true.square().mean(-1).clamp_min(1e-12)
            apart = ((predicted - true).square().mean(-1) / size).flatten()
            distance = mean_of(apart, batch.counted(texts_of(ahead), ahead.flatten()))
            total = total + config.decay**step * (part + config.state_weight * distance)
        return total / sum(config.decay**step for step in range(config.steps))

    def rollout(self, batch: Batch, columns: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per step: the predicted states [b, R, D] at layer ``start``, and the states after layer ``stop``, of the
        tokens from ``columns`` [b, R] on."""
        config, ends, read = self.config, f"layer:{self.config.stop}", f"layer:{self.config.state}"
        state, true = at_rows(batch.taps[read].float(), columns - 1), batch.taps[f"layer:{config.start}"]
        plan, states = LayerPlan(start=config.start, stop=config.stop), []
        with windows(self.model, batch.tokens[:, :-1], true, columns, plan) as run:
            for step in range(config.steps):
                embedded = self.parts.embedding(batch.tokens.gather(1, columns + step))
                predicted = self.net(embedded, state)
                rows = run.step(predicted, tuple({ends} if config.state == config.start else {ends, read}))
                state = predicted if config.state == config.start else rows[read].float()
                states.append((predicted, rows[ends]))
        return states

    def draft_logits(self, states: Tensor) -> Tensor:
        """Logits [m, V_d] of states [m, D] after layer ``stop``."""
        wide = self.net.read_out(states)
        norm = self.parts.final_norm
        dtype = next((weight.dtype for weight in norm.parameters()), wide.dtype)
        return self.parts.logits(norm(wide.to(dtype)), self.frequent)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return JumpDrafter(self.target, self.net, head=DraftHead(self.parts, self.frequent))
