"""What the recipes of feature-level drafters share: drafting from every place of a text, batched for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.training.mask_rows import additive
from foretoken.training.recipes.base import Batch, Recipe
from foretoken.training.recipes.labels import Labels, places_of

PLACES = 256
"""Places per text that are drafted from, and whose distributions are compared with the target's."""


class FeatureRecipe(Recipe):
    """Trains a network that maps (embedding of the next token, feature) to the next feature."""

    fixed = tuple(LayerConfig.__dataclass_fields__)
    net_config: ClassVar[type[Any]]
    drafter_class: ClassVar[type[FeatureDrafter]]
    lr = 3e-3

    def from_target(self) -> dict[str, Any]:
        return asdict(LayerConfig.of_target(self.parts.config))

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        head = DraftHead(self.parts, self.guessed)
        return self.drafter_class(FeatureModel(self.net, self.parts, self.target, head))

    @property
    def ahead(self) -> int:
        return int(self.config.unroll)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The networks of the first steps, the last of which goes on alone."""
        return (self.net,)

    def unrolled(self, batch: Batch, features: Tensor, rows: Tensor, steps: int) -> Iterator[Tensor]:
        """Outputs [b, R, D] of drafting ``steps`` steps from every one of ``rows`` [b, R], one per step.

        Step 0 reads the whole text on true features.  Step k goes on from the same row's output, with the text's token
        k places further, as drafting does: it sees the true places up to the row, and of the steps behind them its own
        row only (training-time test, arXiv 2503.01840).  Output k is the feature of token row + k + 1. Where there are
        several modules, each reads the whole text on what the one before it made, and the last one goes on so.
        """
        b, count = rows.shape
        modules = self.modules[:steps]
        cached: list[tuple[Tensor, Tensor]] = []

        def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            cached.append((key, value))
            return torch.cat([key for key, _ in cached], 2), torch.cat([value for _, value in cached], 2)

        whole = features
        for step, module in enumerate(modules):
            cached.clear()
            embeddings = self.parts.embedding(batch.tokens[:, 1 + step :]).to(features.dtype)
            n = embeddings.shape[1]
            places = torch.arange(n, device=rows.device)
            causal = additive(places <= places[:, None])
            whole = module(embeddings, whole[:, :n], (places + step).expand(b, n), causal, keep)
            output = at_rows(whole, rows)
            yield output
        before = additive(places <= rows[:, None, :, None])
        diagonal = additive(torch.eye(count, dtype=torch.bool, device=rows.device)).expand(b, 1, count, count)
        for step in range(len(modules), steps):
            embeddings = self.parts.embedding(batch.tokens.gather(1, rows + 1 + step)).to(features.dtype)
            mask = torch.cat([before, *[diagonal] * (step - len(modules) + 1)], -1)
            output = modules[-1](embeddings, output, rows + step, mask, keep)
            yield output

    def unrolled_loss(
        self, batch: Batch, features: Tensor, steps: int, decay: float, generator: torch.Generator
    ) -> Tensor:
        """Weighted mean over drafted steps of the cross-entropy with the target's distribution over what can be
        guessed; a step weighs ``decay`` times what the one before it does."""
        weights = [decay**step for step in range(steps)]
        rows = some_rows(batch, steps, generator)
        total = features.new_zeros(())
        labels = self.labels(batch, rows, steps)
        for step, output in enumerate(self.unrolled(batch, features, rows, steps)):
            total = total + weights[step] / sum(weights) * self.agreement(labels, output, rows + 1 + step, step)
        return total

    def labels(self, batch: Batch, rows: Tensor, steps: int) -> Labels:
        """What ``steps`` steps from ``rows`` [b, R] are judged by."""
        columns = torch.cat([rows + step for step in range(1, steps + 1)], 1)
        return Labels(batch, places_of(batch, texts_of(columns), columns.flatten()), self.guessed)

    def agreement(self, labels: Labels, output: Tensor, columns: Tensor, step: int = 0) -> Tensor:
        """Cross-entropy of the distributions of outputs [b, R, D] of a step with the target's behind the tokens at
        ``columns`` [b, R]."""
        return labels.distance(self.draft_logits(output.flatten(0, 1), step), texts_of(columns), columns.flatten())

    @property
    def guessed(self) -> Tensor | None:
        """[V_d] the tokens that can be guessed; ``None``: all."""
        return self.frequent

    def draft_logits(self, output: Tensor, step: int = 0) -> Tensor:
        """[m, V_d] of outputs [m, D] of a step."""
        module = self.modules[min(step, len(self.modules) - 1)]
        return self.parts.logits(module.head_state(output), self.guessed)  # type: ignore[operator]


@torch.no_grad()
def chain_accuracies(
    recipe: Recipe,
    batches: Sequence[Batch],
    length: int,
    guess: Callable[[Batch, Tensor, Tensor], Tensor],
    conditional: bool = False,
) -> dict[str, Any]:
    """``accuracies`` [k]: how often the i-th guess of a chain of ``length`` is what the target would say.

    Args:
        batches: held-out texts, of each of which the first counts.
        guess: the guesses [g, k] behind places [1, g], which stand for the tokens behind the places [g, k].
        conditional: count a guess only where all before it are right.
    """
    hits, tries = torch.zeros(length), torch.zeros(length)
    for batch in batches:
        if batch.length <= length:
            continue
        columns = torch.arange(0, batch.length - length, length, device=batch.tokens.device)[None]
        ahead = columns[0][:, None] + 1 + torch.arange(length, device=columns.device)
        targets = recipe.parts.logits(batch.taps["last"])[0].argmax(-1)[ahead]
        counted = torch.ones(targets.shape) if batch.learned is None else batch.learned[0][ahead + 1].float().cpu()
        right, before = (guess(batch, columns, ahead) == targets).float().cpu(), torch.ones(targets.shape)
        if conditional:
            right = right.cumprod(-1)
            before[:, 1:] = right[:, :-1]
        hits += (right * counted).sum(0)
        tries += (before * counted).sum(0)
    return {"accuracies": (hits / tries.clamp_min(1)).tolist()}


def some_rows(batch: Batch, steps: int, generator: torch.Generator, count: int = PLACES) -> Tensor:
    """[b, R] at most ``count`` random places per text, in order, that have ``steps`` places behind them.

    Where only some tokens are to be guessed, places whose first guess is one of them go first, and there are no more
    places than the text with the most of them has.  Raises ``ValueError`` for texts too short for that.
    """
    n = batch.length - steps
    if n < 1:
        raise ValueError(f"blocks of {batch.length} tokens are too short for {steps} steps: use a larger --context")
    keys = torch.rand(len(batch.tokens), n, generator=generator)
    if batch.learned is not None:
        first = batch.learned[:, 2 : 2 + n].cpu()
        keys, count = keys + ~first, min(count, max(1, int(first.sum(-1).max())))
    ranks = keys.argsort(-1)
    return ranks[:, :count].sort(-1).values.to(batch.tokens.device)


def at_rows(states: Tensor, rows: Tensor) -> Tensor:
    """[b, R, D] of states [b, n, D] at ``rows`` [b, R]."""
    return states.gather(1, rows[..., None].expand(*rows.shape, states.shape[-1]))


def texts_of(rows: Tensor) -> Tensor:
    """[b R] which text every one of ``rows`` [b, R] belongs to."""
    return torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
