"""Training of DFlash, DFlash2 and DSpark: blocks after positions all over a text, all at once.

DFlash is arXiv 2602.06036.  DFlash2 adds the selector's loss over each position's candidates.  DSpark (arXiv
2607.05147) learns corrected distributions near the target's, and the probability that a draft is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.dflash import DflashDrafter
from foretoken.methods.drafters.dflash2 import Dflash2Drafter
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.training.calibration import calibration_errors, fit_temperatures
from foretoken.training.recipes.base import Batch, cross_entropies
from foretoken.training.recipes.blocks import BlockRecipe, BlockSettings, PositionLosses
from foretoken.training.recipes.features import texts_of
from foretoken.training.recipes.labels import Labels

CALIBRATED = 256
"""Blocks of a held-out text by which the confidence head is calibrated."""


class DflashRecipe(BlockRecipe):
    """The loss of the block alone."""

    drafter_class = DflashDrafter


@dataclass(frozen=True)
class Dflash2Settings(BlockSettings, Dflash2Config):
    """The network's shape and its loss."""


class Dflash2Recipe(BlockRecipe):
    """The selector learns to choose among the candidates after the text's own token."""

    config_class: ClassVar[type[Any]] = Dflash2Settings
    drafter_class = Dflash2Drafter
    net: Dflash2Net

    def position_losses(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> PositionLosses:
        """Cross-entropies with the target's distribution, over all tokens and over the candidates.

        The target's most likely token is always made a candidate: it takes the last rank if it is missing.  That token
        alone as the label accepts as many draft tokens, the text's own token fewer (docs/log.md).
        """
        logits = self.logits(states)
        distributions, counted = labels.of(texts_of(columns), columns.flatten())
        ids = logits.detach().topk(min(self.config.top, logits.shape[-1]), -1).indices
        best = distributions.argmax(-1, keepdim=True)
        ids[:, -1:] = torch.where((ids == best).any(-1, keepdim=True), ids[:, -1:], best)
        query, _ = self.net.query(batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1), None)
        targets = ids if self.frequent is None else self.frequent[ids]
        scores = self.net.corrected(logits.gather(-1, ids), ids, targets, query[:, None])[:, 0]
        entropies = cross_entropies(logits, distributions)
        probabilities = distributions.gather(-1, ids)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True).clamp_min(1e-9)
        losses = entropies + cross_entropies(scores, probabilities)
        return PositionLosses(losses, entropies, counted)


@dataclass(frozen=True)
class DsparkSettings(BlockSettings, DsparkConfig):
    """The network's shape and its loss.

    Attributes:
        entropy: weight of the cross-entropy; the L1 distance between the distributions has the remaining weight.
    """

    from_anchor: bool = True
    entropy: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be from 0 to 1, not {self.entropy}")


class _Position(NamedTuple):
    """One position of m blocks.

    Attributes:
        log_guess: [m, V_d] log-probabilities of the corrected draft.
        targets: [m, V_d] the target's distributions.
        counted: [m] positions that count, or ``None`` for all.
        accepted: [m] acceptance probabilities of a drawn draft token.
        odds: [m] log-odds of the confidence head, or ``None`` without it.
        memory: for the next position.
    """

    log_guess: Tensor
    targets: Tensor
    counted: Tensor | None
    accepted: Tensor
    odds: Tensor | None
    memory: Any


class DsparkRecipe(BlockRecipe):
    """Positions are corrected by the text's own tokens; the confidence head learns the acceptance probability of a
    draft token, and is calibrated on held-out text."""

    config_class: ClassVar[type[Any]] = DsparkSettings
    drafter_class = DsparkDrafter
    needs_masses = True
    net: DsparkNet

    def position_losses(
        self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any
    ) -> PositionLosses:
        """Cross-entropy with and distance to the target's distribution, and the confidence head's cross-entropy."""
        at, entropy = self._position(batch, labels, states, columns, memory), self.config.entropy
        entropies = -(at.targets * at.log_guess).sum(-1)
        losses = entropy * entropies + (1 - entropy) * (at.targets - at.log_guess.exp()).abs().sum(-1)
        if at.odds is not None:
            losses = losses + F.binary_cross_entropy_with_logits(at.odds.float(), at.accepted, reduction="none")
        return PositionLosses(losses, entropies, at.counted, at.memory)

    def _position(self, batch: Batch, labels: Labels, states: Tensor, columns: Tensor, memory: Any) -> _Position:
        before, states = batch.tokens.gather(1, columns).flatten(), states.flatten(0, 1)
        query, memory = self.net.query(before, states, memory)
        rows = self.net.successors if self.frequent is None else self.net.successors[self.frequent]
        logits = self.parts.logits(states, self.frequent) + F.linear(query, rows.to(query.dtype))
        at = texts_of(columns), columns.flatten()
        targets, counted = labels.of(*at)
        log_guess = torch.log_softmax(logits.float(), -1)
        # Drafts are verified with the target's distribution over all tokens, also with a draft vocabulary.
        accepted = torch.minimum(labels.mass_of(*at) * targets, log_guess.exp()).sum(-1).detach().clamp(0, 1)
        return _Position(log_guess, targets, counted, accepted, self.net.confidences(before, states), memory)

    def drafter(self, measured: Mapping[str, Any]) -> Drafter:
        drafter = self.drafter_class.of(self.net, self.parts, self.target, self.frequent, **self.shape)
        drafter.start_from(measured)
        return drafter

    @torch.no_grad()
    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """The confidence head's temperatures, fitted to half of the held-out blocks, and its calibration error by
        position without and with them on the other half."""
        if not self.config.confidence or not batches:
            return {}
        parts = [self._rounds(batch) for batch in batches if batch.length > self.config.drafts]
        parts = [part for part in parts if len(part[0])]
        if not parts:
            return {}
        fitted, others = _halves(parts)
        temperatures = fit_temperatures(*fitted, others)
        return {
            "confidence_temperatures": temperatures,
            "calibration": {
                "rounds": len(fitted[0]) + len(others[0]),
                "before": calibration_errors(*others, [1.0] * len(temperatures)),
                "after": calibration_errors(*others, temperatures),
            },
        }

    def _rounds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rounds along a text: the head's log-odds [n, drafts], and the probabilities [n, drafts] that a draft is
        accepted so far.  Rounds with a token that is not learned are left out."""
        drafts, texts = self.config.drafts, len(batch.tokens)
        last = batch.length - drafts
        anchors = torch.linspace(1, last, min(last, CALIBRATED)).long().to(batch.tokens.device).expand(texts, -1)
        states = self.states(batch, anchors)
        columns = anchors[..., None] + torch.arange(drafts, device=anchors.device)
        labels = self.labels(batch, columns)
        odds, accepted, memory = [], [], None
        for position in range(drafts):
            at = self._position(batch, labels, states[:, :, position], columns[..., position], memory)
            odds.append(torch.zeros_like(at.accepted) if at.odds is None else at.odds.float())
            accepted.append(at.accepted)
            memory = at.memory
        survived = torch.stack(accepted, -1).cumprod(-1)
        learned = batch.counted(texts_of(columns.flatten(1)), columns.flatten())
        kept = slice(None) if learned is None else learned.view(-1, drafts).all(-1)
        return torch.stack(odds, -1)[kept].cpu(), survived[kept].cpu()

    def reported(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return {key: measured[key] for key in ("confidence_temperatures", "calibration") if key in measured}


def _halves(parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The rounds of every second block, and those of the others; the halves of a single block's."""
    if len(parts) == 1:
        parts = list(zip(*(rounds.tensor_split(2) for rounds in parts[0]), strict=True))
    return [
        (torch.cat([odds for odds, _ in side]), torch.cat([survived for _, survived in side]))
        for side in (parts[::2], parts[1::2])
    ]
