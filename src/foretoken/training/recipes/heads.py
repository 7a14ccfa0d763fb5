"""Shared parts of the recipes with several heads on one hidden state: labels, weights, and accuracies for the tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.heads import HeadsDrafter
from foretoken.training.recipes.base import Batch, Recipe, some_positions
from foretoken.training.recipes.labels import Labels, mask_of

PLACES = 256
"""Positions per step and block whose heads are trained."""
RANKS = 10
"""Number of ranks per head whose accuracy is measured."""


class HeadsRecipe(Recipe):
    """Head i learns the target's token i + 1 positions after the target's own next token.

    Settings include ``heads``, ``labels`` (``"target"``: the target's distribution, which the heads must predict, or
    ``"text"``: the next tokens of the text) and ``decay`` (the weight of head i is ``decay ** i``).
    """

    drafter_class: ClassVar[type[HeadsDrafter]]
    fixed = (*Recipe.fixed, "draft_vocab_size")

    def build(self) -> nn.Module:
        """New heads; their own projections start as the target's."""
        heads = super().build()
        for projection in heads.projections:  # type: ignore[union-attr]
            projection.weight.data.copy_(self.parts.head.weight.detach())
        return heads

    @property
    def ahead(self) -> int:
        return int(self.config.heads) + 1

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        frequent = () if self.frequent is None else self.frequent.tolist()
        options: dict[str, Any] = {"accuracies": measured.get("accuracies"), "frequent": frequent}
        return self.drafter_class.over(self.net, self.parts, self.target, **options, **self.shape)

    @abstractmethod
    def states(
        self, batch: Batch, rows: Tensor, columns: Tensor, generator: torch.Generator | None = None
    ) -> Sequence[Tensor]:
        """The outputs of the K heads at the positions [m], K times [m, D].  ``rows`` and ``columns`` [m] are the text
        and the token before the root.

        The generator is the randomness of a training step; ``None`` when accuracies are measured.
        """

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted mean over heads of the cross-entropy."""
        count = self.config.heads
        rows, columns = some_positions(batch, PLACES * len(batch.tokens), count + 1, generator, ahead=2)
        masks = [mask_of(batch, rows, columns + 1 + i) for i in range(count)]
        labels = Labels(batch, torch.stack(masks).any(0), self.frequent)
        total = torch.zeros((), device=rows.device)
        for i, state in enumerate(self.states(batch, rows, columns, generator)):
            part = labels.loss(self.project(i, state), rows, columns + 1 + i, self.config.labels)
            total = total + self.config.decay**i * part
        return total / sum(self.config.decay**i for i in range(count))

    @property
    def reduces(self) -> bool:
        """Whether the heads use the target's projection and learn its distribution."""
        return self.config.labels == "target" and not len(self.net.projections)  # type: ignore[arg-type]

    def project(self, head: int, state: Tensor) -> Tensor:
        """[m, V_d] logits of one head's output [m, D]."""
        projections: Any = self.net.projections
        if len(projections):
            logits: Tensor = projections[head](state)
            return logits
        return self.parts.logits(state, self.frequent)

    @torch.no_grad()
    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """``accuracies`` [K][R]: how often the candidate of each rank is the target's most likely token.

        Heads that read draft tokens get those of the text, so the frequency is conditional on the path above.
        """
        hits = torch.zeros(self.config.heads, RANKS)
        tries = torch.zeros(self.config.heads, 1)
        for batch in batches:
            n = batch.length - self.config.heads - 1
            if n < 1:
                continue
            columns = torch.arange(n, device=batch.tokens.device).repeat(len(batch.tokens))
            rows = torch.arange(len(batch.tokens), device=batch.tokens.device).repeat_interleave(n)
            choices = self.parts.logits(batch.taps["last"]).argmax(-1)  # [b, n]: the target's argmax after each token
            for i, state in enumerate(self.states(batch, rows, columns)):
                targets = choices[rows, columns + 1 + i]
                logits = self.project(i, state)
                ranked = logits.topk(min(RANKS, logits.shape[-1]), -1).indices
                ranked = ranked if self.frequent is None else self.frequent[ranked]
                counted = batch.counted(rows, columns + 1 + i)
                counted = torch.ones(len(rows), device=rows.device) if counted is None else counted
                hits[i, : ranked.shape[1]] += ((ranked == targets[:, None]) * counted[:, None]).sum(0).cpu()
                tries[i] += counted.sum().cpu()
        return {"accuracies": (hits / tries.clamp_min(1)).tolist()}
