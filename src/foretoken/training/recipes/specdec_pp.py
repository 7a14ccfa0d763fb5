"""Training of SpecDec++: which of the draft model's tokens would the target accept? Arxiv 2405.19715.

Some tokens of a text are replaced by tokens of the draft model ("token mixing").  The head reads the draft model's
state after each of them and learns its acceptance probability, ``min(1, p/q)``, with p and q on the mixed text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.nets.specdec_pp import StopHead, StopHeadConfig, best_constant, weighted_loss
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts
from foretoken.training.optimizers import autocast
from foretoken.training.recipes.base import Batch, Recipe
from foretoken.training.written import drawn

CHUNK = 256
"""Positions whose distributions are computed at once."""
HELD_MIX, HELD_ROUNDS = 0.15, 6
"""Measured with few mixed tokens, as when drafts are made, and with several draws of them."""


class SpecdecPpRecipe(Recipe):
    """The head on the hidden states of a frozen draft model, which is the trainer's ``target``.

    ``judge`` is the target, whose acceptance is learned; ``settings`` are ``key=value`` of the head and its loss.
    """

    method = "specdec_pp"
    config_class: ClassVar[type[Any]] = StopHeadConfig
    net_class = StopHead
    fixed = ("hidden_size", "judge", "judge_layers")
    lr = 1e-3
    net: StopHead
    config: StopHeadConfig

    def __init__(self, judge: LanguageModel, draft: LanguageModel, settings: Mapping[str, str], seed: int = 0) -> None:
        self.judge, self.judge_parts = judge, TargetParts(judge)
        self.judge_parts.check_head()
        self.judge_parts.network.requires_grad_(False)
        super().__init__(draft, TargetParts(draft), settings, seed)
        self.width = min(self.parts.vocab_size, self.judge_parts.vocab_size)

    @property
    def writer(self) -> LanguageModel:
        """The target writes, not the draft model."""
        return self.judge

    def from_target(self) -> dict[str, Any]:
        judge = self.judge_parts.fingerprint()
        return {"hidden_size": self.parts.hidden_size, "judge": judge.weights, "judge_layers": judge.layers}

    @torch.no_grad()
    def samples(self, batch: Batch, generator: torch.Generator, mix: float | None = None) -> tuple[Tensor, Tensor]:
        """The draft model's states [m, D] after the tokens mixed into the texts, and their acceptance probabilities
        [m].

        ``mix`` is the share of mixed tokens, by default the setting's.
        """
        tokens = batch.tokens[:, :-1]
        share = self.config.mix if mix is None else mix
        chosen = torch.rand(tokens.shape[0], tokens.shape[1] - 1, generator=generator) < share
        if batch.learned is not None:
            chosen &= batch.learned[:, 1:-1].cpu()
        rows, before = chosen.to(tokens.device).nonzero(as_tuple=True)
        uniforms = torch.rand(len(rows), generator=generator).to(tokens.device)
        sampled = [
            drawn(torch.softmax(self._logits(self.parts, batch.taps["last"][r, c]), -1), u)
            for r, c, u in zip(rows.split(CHUNK), before.split(CHUNK), uniforms.split(CHUNK), strict=True)
        ]
        mixed = tokens.clone()
        mixed[rows, before + 1] = torch.cat(sampled)
        with autocast(tokens.device.type, "float32"):  # not the loss's: the states are the models' own
            draft_states = self.parts.features(mixed, ("last",))["last"]
            target_states = self.judge_parts.features(mixed, ("last",))["last"]
        return draft_states[rows, before + 1].float(), self.acceptance(draft_states, target_states, mixed, rows, before)

    def acceptance(
        self, draft_states: Tensor, target_states: Tensor, tokens: Tensor, rows: Tensor, before: Tensor
    ) -> Tensor:
        """``min(1, p/q)`` [m] of the tokens after the positions (rows, before), float32."""
        parts = []
        for r, c in zip(rows.split(CHUNK), before.split(CHUNK), strict=True):
            token = tokens[r, c + 1][:, None]
            p = torch.log_softmax(self._logits(self.judge_parts, target_states[r, c]), -1).gather(1, token)
            q = torch.log_softmax(self._logits(self.parts, draft_states[r, c]), -1).gather(1, token)
            parts.append((p - q)[:, 0].clamp(max=0).exp())
        return torch.cat(parts)

    def _logits(self, parts: TargetParts, states: Tensor) -> Tensor:
        """Logits [m, V] of the tokens in both vocabularies, float32."""
        return parts.logits(states)[:, : self.width].float()

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Weighted cross-entropy with the acceptance probabilities."""
        states, acceptance = self.samples(batch, generator)
        return weighted_loss(self.net(states), acceptance, self.config.mismatch)

    @torch.no_grad()
    def measure(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Held-out loss, that of the best constant, and the calibration of the head's probabilities."""
        generator = torch.Generator().manual_seed(0)
        pairs = [self.samples(batch, generator, HELD_MIX) for _ in range(HELD_ROUNDS) for batch in batches]
        if not sum(len(states) for states, _ in pairs):
            return {}
        acceptance = torch.cat([values for _, values in pairs])
        log_odds = torch.cat([self.net(states).float() for states, _ in pairs])
        weight = self.config.mismatch
        constant = best_constant(acceptance, weight).expand_as(acceptance)
        return {
            "guesses": len(acceptance),
            "loss": float(weighted_loss(log_odds, acceptance, weight)),
            "constant_loss": float(weighted_loss(constant, acceptance, weight)),
            "calibration": _calibration(torch.sigmoid(log_odds + torch.tensor(weight).log()), acceptance),
        }

    def drafter(self, measured: Mapping[str, Any]) -> ModelDrafter:
        """The draft model, with drafts long enough for the head to stop."""
        return ModelDrafter(self.target, k=8, target=self.judge)


def _calibration(predicted: Tensor, acceptance: Tensor, bins: int = 5) -> list[list[float]]:
    """(mean predicted probability, mean true probability) of groups of tokens, from the least to the most likely."""
    order = predicted.argsort()
    groups = [part for part in order.tensor_split(bins) if len(part)]
    return [[float(predicted[part].mean()), float(acceptance[part].mean())] for part in groups]
