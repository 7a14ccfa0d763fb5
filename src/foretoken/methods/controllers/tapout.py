"""A bandit whose arms are stop rules.

TapOut, Sridhar et al. 2025 (arXiv 2511.02017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.core import Context, StepRecord
from foretoken.methods.controllers.stopping import Stop, StoppingController, entropy, levels, margin, top

RULES: tuple[Stop, ...] = (
    lambda distribution, probability: top(distribution, probability) < 0.5,  # no token is likely
    lambda distribution, probability: entropy(distribution, probability) > 1.0,
    # AdaEDL's estimate of the acceptance rate, which is below .4 above 1.8 nats
    lambda distribution, probability: 1.0 - math.sqrt(0.2 * max(entropy(distribution, probability), 0.0)) < 0.4,
    # SVIP's root of the entropy, with .15, is above .3
    lambda distribution, probability: entropy(distribution, probability) > 0.6,
    lambda distribution, probability: margin(distribution, probability) < 0.2,  # the two best tokens are close
)


@dataclass
class Played:
    """Number of drafts that a rule ended, and the sum of their rewards, each in [0, 1]."""

    rounds: int = 0
    reward: float = 0.0


@dataclass
class Rules:
    """Results of the rules, and the current round's rule."""

    played: list[Played]
    playing: int = 0

    def best(self) -> int:
        """UCB1: the highest mean plus ``sqrt(2 ln t / n)``; rules without rounds first."""
        time = sum(rule.rounds for rule in self.played)

        def bound(index: int) -> float:
            rule = self.played[index]
            if not rule.rounds:
                return math.inf
            return rule.reward / rule.rounds + math.sqrt(2.0 * math.log(time) / rule.rounds)

        return max(range(len(self.played)), key=bound)


class TapoutController(StoppingController):
    """Applies one of five fixed stop rules in every round, chosen by UCB1 on the rewards of their drafts.

    Args:
        k: longest draft; the drafter's own by default.
        blend: a round's reward is this share of accepted / longest, the rest of accepted / drafted.
    """

    name = "tapout"

    def __init__(self, k: int | None = None, blend: float = 0.5) -> None:
        super().__init__(k)
        if not 0 <= blend <= 1:
            raise ValueError(f"tapout needs blend in [0, 1], not {blend}")
        self.blend = blend

    def rules(self, context: Context) -> Rules:
        """Results of the rules for this request."""
        return context.state.setdefault(self, Rules([Played() for _ in RULES]))

    def rule(self, context: Context) -> Stop:
        rules = self.rules(context)
        rules.playing = rules.best()
        return RULES[rules.playing]

    def observe(self, context: Context, record: StepRecord) -> None:
        drafted, accepted = levels(record), record.num_accepted_tokens
        if drafted:
            rules = self.rules(context)
            played = rules.played[rules.playing]
            played.rounds += 1
            played.reward += self.blend * accepted / self.cap + (1 - self.blend) * accepted / drafted
