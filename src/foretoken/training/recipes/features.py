"""Shared parts of the recipes of feature-level drafters: batched drafting from every position of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.features import FeatureDrafter
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.training.mask_rows import additive
from foretoken.training.recipes.base import SHAPE, Batch, Recipe
from foretoken.training.recipes.labels import Labels, mask_of

NOT_SHAPE = tuple(name for name in LayerConfig.__dataclass_fields__ if name not in SHAPE)
"""Settings of a layer that are the target's or a plain one's."""


@dataclass(frozen=True)
class TopKSettings:
    """Settings of top-k distillation, the loss of HASS (arXiv 2408.15766).

    Attributes:
        top_k: number of the target's most likely tokens whose cross-entropy is added to the loss (HASS: 10; 0: none).
        top_weight: weight of that cross-entropy.
    """

    top_k: int = 0
    top_weight: float = 1.0


class FeatureRecipe(Recipe):
    """Trains a network that maps (embedding of the next token, feature) to the next feature."""

    fixed = tuple(LayerConfig.__dataclass_fields__)
    drafter_class: ClassVar[type[FeatureDrafter]]
    lr = 3e-3

    def from_target(self) -> dict[str, Any]:
        return asdict(LayerConfig.of_target(self.parts.config))

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        head = DraftHead(self.parts, self.draft_ids)
        return self.drafter_class(FeatureModel(self.net, self.parts, self.target, head), **self.shape)

    @property
    def ahead(self) -> int:
        return int(self.config.unroll)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The networks of the first steps; the last one runs all further steps."""
        return (self.net,)

    def unrolled(self, batch: Batch, features: Tensor, rows: Tensor, steps: int) -> Iterator[Tensor]:
        """Outputs [b, R, D] of ``steps`` draft steps from each of ``rows`` [b, R], one per step.

        Step 0 reads the whole text with true features.  Step k continues from the same row's output with the text's
        token k positions later, as in drafting: it sees the true positions up to the row, and only its own row of the
        later steps (training-time test, arXiv 2503.01840).  Output k is the feature of token row + k + 1.  With several
        modules, each reads the whole text with the features of the one before it, and the last one runs all further
        steps.
        """
        b, count = rows.shape
        modules = self.modules[:steps]
        cached: dict[int, list[tuple[Tensor, Tensor]]] = {}

        def stored(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            pairs = cached.setdefault(layer, [])
            pairs.append((key, value))
            return torch.cat([key for key, _ in pairs], 2), torch.cat([value for _, value in pairs], 2)

        keep = stored if self.num_layers > 1 else partial(stored, 0)
        whole = features
        for step, module in enumerate(modules):
            cached.clear()
            embeddings = self.embedded(batch.tokens[:, 1 + step :]).to(features.dtype)
            n = embeddings.shape[1]
            positions = torch.arange(n, device=rows.device)
            causal = additive(positions <= positions[:, None])
            whole = module(embeddings, whole[:, :n], (positions + step).expand(b, n), causal, keep)
            output = at_rows(whole, rows)
            yield output
        before = additive(positions <= rows[:, None, :, None])
        diagonal = additive(torch.eye(count, dtype=torch.bool, device=rows.device)).expand(b, 1, count, count)
        for step in range(len(modules), steps):
            embeddings = self.embedded(batch.tokens.gather(1, rows + 1 + step)).to(features.dtype)
            mask = torch.cat([before, *[diagonal] * (step - len(modules) + 1)], -1)
            output = modules[-1](embeddings, output, rows + step, mask, keep)
            yield output

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values."""
        return 1

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of ids."""
        return self.parts.embedding(ids)

    def unrolled_loss(
        self, batch: Batch, features: Tensor, steps: int, decay: float, generator: torch.Generator
    ) -> Tensor:
        """Weighted mean over draft steps of the cross-entropy with the target's distribution over the draft vocabulary;
        a step's weight is ``decay`` times that of the step before it."""
        weights = [decay**step for step in range(steps)]
        rows = some_rows(batch, steps, generator)
        total = features.new_zeros(())
        labels = self.labels(batch, rows, steps)
        for step, output in enumerate(self.unrolled(batch, features, rows, steps)):
            total = total + weights[step] / sum(weights) * self.agreement(labels, output, rows + 1 + step, step)
        return total

    def labels(self, batch: Batch, rows: Tensor, steps: int) -> Labels:
        """Labels of ``steps`` steps from ``rows`` [b, R]."""
        columns = torch.cat([rows + step for step in range(1, steps + 1)], 1)
        return Labels(batch, mask_of(batch, texts_of(columns), columns.flatten()), self.draft_ids)

    def agreement(self, labels: Labels, output: Tensor, columns: Tensor, step: int = 0, weight: float = 1.0) -> Tensor:
        """``weight`` times the cross-entropy of the distributions of a step's outputs [b, R, D] with the target's after
        the tokens at ``columns`` [b, R], plus top-k distillation if the settings ask for it."""
        logits, texts, columns = self.draft_logits(output.flatten(0, 1), step), texts_of(columns), columns.flatten()
        loss = weight * labels.distance(logits, texts, columns)
        config = self.config
        if isinstance(config, TopKSettings) and config.top_k:
            loss = loss + config.top_weight * labels.top_distance(logits, texts, columns, config.top_k)
        return loss

    @property
    def draft_ids(self) -> Tensor | None:
        """[V_d] the draft vocabulary; ``None``: all tokens."""
        return self.frequent

    def draft_logits(self, output: Tensor, step: int = 0) -> Tensor:
        """Logits [m, V_d] of a step's outputs [m, D]."""
        module = self.modules[min(step, len(self.modules) - 1)]
        return self.parts.logits(module.head_state(output), self.draft_ids)  # type: ignore[operator]


@torch.no_grad()
def chain_accuracies(
    recipe: Recipe,
    batches: Sequence[Batch],
    length: int,
    draft: Callable[[Batch, Tensor, Tensor], Tensor],
    conditional: bool = False,
) -> dict[str, Any]:
    """``accuracies`` [k]: how often the i-th token of a chain of ``length`` is the target's most likely one.

    Args:
        batches: held-out batches; only the first text of each is used.
        draft: function that returns draft tokens [g, k] after positions [1, g], predictions of the tokens after the
            positions [g, k].
        conditional: count a token only if all before it are right.
    """
    hits, tries = torch.zeros(length), torch.zeros(length)
    for batch in batches:
        if batch.length <= length:
            continue
        columns = torch.arange(0, batch.length - length, length, device=batch.tokens.device)[None]
        ahead = columns[0][:, None] + 1 + torch.arange(length, device=columns.device)
        targets = recipe.parts.logits(batch.taps["last"])[0].argmax(-1)[ahead]
        counted = torch.ones(targets.shape) if batch.learned is None else batch.learned[0][ahead + 1].float().cpu()
        right, before = (draft(batch, columns, ahead) == targets).float().cpu(), torch.ones(targets.shape)
        if conditional:
            right = right.cumprod(-1)
            before[:, 1:] = right[:, :-1]
        hits += (right * counted).sum(0)
        tries += (before * counted).sum(0)
    return {"accuracies": (hits / tries.clamp_min(1)).tolist()}


def some_rows(batch: Batch, steps: int, generator: torch.Generator, count: int = 256) -> Tensor:
    """[b, R] at most ``count`` random positions per text, in order, that are followed by ``steps`` positions.

    If only some tokens are learned, positions whose first predicted token is learned come first, and R is at most their
    largest number in a text.  Raises ``ValueError`` for texts that are too short.
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
    """[b R] index of the text of each of ``rows`` [b, R]."""
    return torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
