"""Training of PaSS: look-ahead tokens after random positions of a text, everything else frozen (arXiv 2311.13581)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.nets.pass_tokens import PassTokens, PassTokensConfig
from foretoken.methods.drafters.pass_tokens import PassTokensDrafter
from foretoken.models.network.chains import branch_states
from foretoken.models.network.extra import check_rows
from foretoken.training.recipes.base import Batch, Recipe, check_labels
from foretoken.training.recipes.features import chain_accuracies, some_rows, texts_of
from foretoken.training.recipes.labels import Labels


@dataclass(frozen=True)
class PassTokensSettings(PassTokensConfig):
    """Number of look-ahead tokens, and training settings.

    Attributes:
        labels: ``"target"`` (the target's distribution, which they must predict) or ``"text"`` (the paper's labels).
        decay: weight of look-ahead token i (from 0) is ``decay ** i``.
        noise: initial spread of the rows, relative to the spread of token embeddings.
    """

    labels: str = "target"
    decay: float = 0.8
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels, self.decay)
        if not self.noise >= 0:
            raise ValueError(f"noise must be >= 0, not {self.noise}")


class PassTokensRecipe(Recipe):
    """Look-ahead token i after column c learns the target's prediction after the token at c + i."""

    drafter_class = PassTokensDrafter
    lr = 1e-2
    config_class: ClassVar[type[Any]] = PassTokensSettings
    fixed = ("hidden_size",)
    needs = ("", "a target that takes trees, not {}")
    net: PassTokens
    config: PassTokensSettings

    @property
    def ahead(self) -> int:
        return self.config.k

    def from_target(self) -> dict[str, Any]:
        return {"hidden_size": int(self.parts.embed.weight.shape[1])}

    def build(self) -> nn.Module:
        """Rows near the mean of the token embeddings."""
        check_rows(self.model.model, torch.empty(self.config.k, self.config.hidden_size))
        net: Any = super().build()
        ids = torch.linspace(0, self.parts.vocab_size - 1, 1024, device=self.parts.device).long()
        rows = self.parts.embedding(ids).float().cpu()
        spread = torch.randn(net.rows.shape) * rows.std(0) * self.config.noise
        net.learned.data[0] = rows.mean(0) + spread
        return net

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over look-ahead tokens of the cross-entropy."""
        b, k = len(batch.tokens), self.config.k
        last = batch.length - k  # columns that have all labels
        if last < 1:
            raise ValueError(f"blocks of {batch.length} tokens are too short: use a larger --context")
        # At most 512 look-ahead tokens per text and step: the target reads at most twice the text's tokens
        groups = max(1, min(batch.length, 512) // k)
        columns = torch.randint(last, (b, groups), generator=generator).to(batch.tokens.device)
        if batch.learned is not None:
            columns = some_rows(batch, k, generator, groups)
        states = self.states(batch, columns)
        rows, columns = texts_of(columns), columns.flatten()
        total, labels = torch.zeros((), device=columns.device), Labels(batch)
        for i in range(k):
            logits = self.parts.logits(states[:, :, i].flatten(0, 1))
            part = labels.loss(logits, rows, columns + 1 + i, self.config.labels)
            total = total + self.config.decay**i * part
        return total / sum(self.config.decay**i for i in range(k))

    def states(self, batch: Batch, columns: Tensor) -> Tensor:
        """[b, g, k, D] of the look-ahead tokens after the positions ``columns`` [b, g]."""
        return branch_states(self.model, batch.tokens[:, :-1], columns, self.net.rows)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        return PassTokensDrafter(self.net, self.target)

    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """``accuracies`` [k]: how often a look-ahead token predicts the target's most likely token."""

        def guess(batch: Batch, columns: Tensor, ahead: Tensor) -> Tensor:
            return self.parts.logits(self.states(batch, columns))[0].argmax(-1)

        return chain_accuracies(self, batches, self.config.k, guess)
