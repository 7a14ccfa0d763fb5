"""Medusa-1: heads on a frozen target (arXiv 2401.10774, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.drafters.base import Drafter
from foretoken.drafters.medusa import MedusaDrafter
from foretoken.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.training.recipes.base import Batch, Recipe, cross_entropy, soft_cross_entropy, some_places

PLACES = 256
"""Places per step and block whose heads are trained."""
RANKS = 10
"""Ranks per head whose accuracy is measured."""


@dataclass(frozen=True)
class MedusaSettings(MedusaConfig):
    """The heads' shape and how they are trained.

    Attributes:
        labels: ``"target"`` (the target's own law, which is what they must guess) or ``"text"`` (the paper's labels).
        decay: weight of head i is ``decay ** i``.
    """

    labels: str = "target"
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in ("target", "text"):
            raise ValueError(f"labels must be target or text, not {self.labels!r}")


class MedusaRecipe(Recipe):
    """Head i learns the token that the target says i + 1 places after its own."""

    method = "medusa"
    config_class: ClassVar[type[Any]] = MedusaSettings
    net: MedusaHeads
    config: MedusaSettings

    def build(self) -> nn.Module:
        """New heads; own projections start as the target's."""
        heads = MedusaHeads(self.config)
        for projection in heads.projections:
            projection.weight.data.copy_(self.parts.head.weight.detach())  # type: ignore[operator]
        return heads

    def stored_config(self) -> dict[str, Any]:
        """Only what the network needs."""
        found = super().stored_config()
        return {key: found[key] for key in MedusaConfig.__dataclass_fields__}

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over heads of the cross-entropy."""
        count = self.config.heads
        rows, columns = some_places(batch, PLACES * len(batch.tokens), count + 1, generator)
        hidden = self.net(batch.taps["last"][rows, columns].float())
        total = hidden.new_zeros(())
        for i, state in enumerate(hidden):
            logits = self._project(i, state)
            if self.config.labels == "text":
                part = cross_entropy(logits, batch.tokens[rows, columns + 2 + i])
            else:
                part = soft_cross_entropy(logits, batch.teacher(rows, columns + 1 + i))
            total = total + self.config.decay**i * part
        return total / sum(self.config.decay**i for i in range(count))

    def _project(self, head: int, state: Tensor) -> Tensor:
        if len(self.net.projections):
            logits: Tensor = self.net.projections[head](state)
            return logits
        return self.parts.logits(state)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        """Heads as they are."""
        return MedusaDrafter(self.net, self.parts, accuracies=measured.get("accuracies"))

    @torch.no_grad()
    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """``accuracies`` [K][R]: how often the candidate of each rank is what the target would say."""
        hits = torch.zeros(self.config.heads, RANKS)
        seen = 0
        for batch in batches:
            n = batch.length - self.config.heads - 1
            hidden = self.net(batch.taps["last"][:, :n].flatten(0, 1).float())
            choices = self.parts.logits(batch.taps["last"]).argmax(-1)  # [b, n]: what the target says after each token
            for i, state in enumerate(hidden):
                wanted = choices[:, i + 1 : i + 1 + n].flatten()
                ranked = self._project(i, state).topk(RANKS, -1).indices
                hits[i] += (ranked == wanted[:, None]).sum(0).cpu()
            seen += len(hidden[0])
        return {"accuracies": (hits / max(1, seen)).tolist()}
