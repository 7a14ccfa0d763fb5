"""Training of Hydra: heads that read the text's own tokens learn the target's distribution (arXiv 2402.05109, section
4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.hydra import HydraDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.hydra import HydraConfig, HydraHeads
from foretoken.training.recipes.base import Batch, check_labels
from foretoken.training.recipes.heads import HeadsRecipe


@dataclass(frozen=True)
class HydraSettings(HydraConfig):
    """The heads' shape and training settings.

    Attributes:
        labels: ``"target"`` (the target's distribution, as in the paper) or ``"text"``.
        decay: weight of head i is ``decay ** i``.
        dropout: dropout rate of a head's inputs (the paper's long runs: 0.2).
    """

    labels: str = "target"
    decay: float = 0.8
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels, self.decay)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")


class HydraRecipe(HeadsRecipe):
    """Teacher forcing: the tokens between the state and the predicted one are those of the text."""

    config_class: ClassVar[type[Any]] = HydraSettings
    drafter_class = HydraDrafter
    fixed = (*HeadsRecipe.fixed, "layer")
    config: HydraSettings
    net: HydraHeads

    def from_target(self) -> dict[str, Any]:
        return super().from_target() | {"layer": asdict(LayerConfig.of_target(self.parts.config))}

    def states(
        self, batch: Batch, rows: Tensor, columns: Tensor, generator: torch.Generator | None = None
    ) -> Sequence[Tensor]:
        """K times [m, D]; head i reads the state and the next i + 1 tokens."""
        positions = columns[:, None] + 1 + torch.arange(self.config.heads, device=columns.device)
        embeddings = self.parts.embedding(batch.tokens[rows[:, None], positions]).float()  # [m, K, D]
        inputs = torch.cat([self._hidden(batch)[rows, columns], embeddings.flatten(1)], -1)
        if generator is not None and self.config.dropout:
            keep = torch.rand(inputs.shape, generator=generator).to(inputs.device) >= self.config.dropout
            inputs = inputs * keep / (1 - self.config.dropout)
        size = self.parts.hidden_size
        return [self.net(i, inputs[:, : (i + 2) * size]) for i in range(self.config.heads)]

    def _hidden(self, batch: Batch) -> Tensor:
        """[b, n, D]: the target's states, after the prefix layer if there is one."""
        hidden = batch.taps["last"].float()
        if self.net.prefix is None:
            return hidden
        positions = torch.arange(batch.length, device=hidden.device).expand(len(hidden), -1)
        return self.net.prefix(None, hidden, positions)
