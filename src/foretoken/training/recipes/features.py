"""What the recipes of feature-level drafters share: unrolled steps over whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.drafters.base import Drafter
from foretoken.drafters.features import FeatureDrafter
from foretoken.drafters.nets.decoder import LayerConfig
from foretoken.models.features import FeatureModel
from foretoken.training.recipes.base import Batch, Recipe, soft_cross_entropy

PLACES = 256
"""Places per text and step whose logits are compared with the target's law."""


class FeatureRecipe(Recipe):
    """Trains a network that maps (embedding of the next token, feature) to the next feature."""

    fixed = tuple(LayerConfig.__dataclass_fields__)
    net_config: ClassVar[type[Any]]
    net_class: ClassVar[type[nn.Module]]
    drafter_class: ClassVar[type[FeatureDrafter]]
    lr = 3e-3

    def from_target(self) -> dict[str, Any]:
        """The shape of the target's own layers."""
        return asdict(LayerConfig.of_target(self.parts.config))

    def build(self) -> nn.Module:
        """A new network."""
        return self.net_class(self.net_config(**self.stored_config()))

    def stored_config(self) -> dict[str, Any]:
        """Only what the network needs."""
        found = asdict(self.config)
        return {key: found[key] for key in self.net_config.__dataclass_fields__}

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        """The network as it is."""
        return self.drafter_class(FeatureModel(self.net, self.parts, self.target))

    def unrolled(self, batch: Batch, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Outputs of ``steps`` steps: step k reads the tokens k + 1 places on and the outputs of the step before it.

        Row t of step k, [b, n - k, D], is the feature of token t + k + 1.
        """
        n = batch.length
        for step in range(steps):
            embeddings = self.parts.embedding(batch.tokens[:, 1 + step :]).to(features.dtype)
            positions = torch.arange(step, n, device=features.device).expand(len(features), -1)
            output: Tensor = self.net(embeddings, features, positions)
            yield output
            features = output[:, :-1]

    def agreement(self, batch: Batch, output: Tensor, step: int, generator: torch.Generator) -> Tensor:
        """Cross-entropy between the target's law and the draft's at random places of one step's output."""
        b, n = len(output), output.shape[1] - 1
        picked = torch.randint(b * n, (PLACES * b,), generator=generator).to(output.device)
        rows, columns = picked // n, picked % n
        logits = self.parts.logits(self.net.head_state(output[rows, columns]))  # type: ignore[operator]
        return soft_cross_entropy(logits, batch.teacher(rows, columns + 1 + step))
