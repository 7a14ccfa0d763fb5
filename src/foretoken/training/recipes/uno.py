"""Training of UNO: chains of noise after random positions of a text, with the updates in their rows (arXiv
2609.04010)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.methods.drafters.uno import UnoDrafter
from foretoken.models.network.chains import chain_states
from foretoken.models.variants.gated import linear_shapes, updated
from foretoken.training.recipes.base import Batch, Recipe, mean_of
from foretoken.training.recipes.features import chain_accuracies, some_rows, texts_of

PARTS = ("all", "attention", "mlp")


@dataclass(frozen=True)
class UnoSettings(UnoConfig):
    """The updates' shape and their loss.

    Attributes:
        noise: input of unknown positions: the ``"mask"`` token, or ``"random"`` ids as published, learned more slowly.
        mask_token: id of the mask token, or the bound of random ids; -1: id 0, or the size of the vocabulary.
        parts: linear layers to update: ``"all"``, or those of the ``"attention"`` or the ``"mlp"``.
        entropy: weight of the cross-entropy; the total variation distance has the remaining weight (1 in the paper).
        decay: weight of noise row i (from 0) is ``decay ** i``.
    """

    noise: str = "mask"
    parts: str = "all"
    entropy: float = 0.5
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.mask_token == -1:
            object.__setattr__(self, "mask_token", self.vocab_size if self.noise == "random" else 0)
        super().__post_init__()
        if self.parts not in PARTS:
            raise ValueError(f"parts must be one of {', '.join(PARTS)}, not {self.parts!r}")
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be from 0 to 1, not {self.entropy}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay}")


class UnoRecipe(Recipe):
    """Row i of noise after column c learns the target's prediction after the token at c + i."""

    drafter_class = UnoDrafter
    lr = 3e-3
    config_class: ClassVar[type[Any]] = UnoSettings
    fixed = ("vocab_size", "num_layers", "shapes")
    needs = ("", "a target that is a network of layers, not {}")
    net: UnoNet
    config: UnoSettings

    @property
    def ahead(self) -> int:
        return self.config.places - 1

    def from_target(self) -> dict[str, Any]:
        shapes = linear_shapes(self.model.model)
        return {"vocab_size": self.parts.vocab_size, "num_layers": self.parts.num_layers, "shapes": shapes}

    def stored_config(self) -> dict[str, Any]:
        config = super().stored_config()
        if self.config.parts != "all":
            is_mlp, shapes = self.config.parts == "mlp", config["shapes"].items()
            config["shapes"] = {name: shape for name, shape in shapes if ("att" in name) != is_mlp}
        return config

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over noise rows of the distance to the target's distribution."""
        config, unknown = self.config, self.config.places - 1
        # At most 512 noise rows per text and step
        groups = max(1, min(batch.length, 512) // unknown)
        columns = some_rows(batch, unknown, generator, groups)
        ids = self.random_noise((*columns.shape, unknown), generator).to(columns.device)
        states = self.states(batch, columns, ids)
        rows, columns = texts_of(columns), columns.flatten()
        weights = [config.decay**i for i in range(unknown)]
        total = torch.zeros((), device=columns.device)
        for i, weight in enumerate(weights):
            log_guess = torch.log_softmax(self.parts.logits(states[:, :, i].flatten(0, 1)).float(), -1)
            targets = batch.teacher(rows, columns + 1 + i)
            distance = 0.5 * (targets - log_guess.exp()).abs().sum(-1)
            losses = -config.entropy * (targets * log_guess).sum(-1) + (1 - config.entropy) * distance
            total = total + weight / sum(weights) * mean_of(losses, batch.counted(rows, columns + 1 + i))
        return total

    def random_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Ids for unknown positions, drawn anew for each of them."""
        return self.config.filler(torch.randint(2**31, tuple(shape), generator=generator))

    def states(self, batch: Batch, columns: Tensor, ids: Tensor) -> Tensor:
        """States [b, g, k, D] of the noise ``ids`` [b, g, k] after the positions ``columns`` [b, g]."""

        @contextmanager
        def within(hidden: Tensor) -> Iterator[Tensor]:
            with updated(self.model.model, self.net):
                yield hidden

        return chain_states(self.model, batch.tokens[:, :-1], columns, ids, within)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return UnoDrafter(self.target, self.net)

    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """``accuracies`` of the noise rows: how often a token is the target's most likely one if all tokens before it
        are."""

        def guess(batch: Batch, columns: Tensor, ahead: Tensor) -> Tensor:
            ids = self.config.filler(ahead).expand(len(batch.tokens), -1, -1)
            return self.parts.logits(self.states(batch, columns, ids))[0].argmax(-1)

        return chain_accuracies(self, batches, self.config.places - 1, guess, conditional=True)
