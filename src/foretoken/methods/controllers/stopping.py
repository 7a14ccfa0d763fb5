"""What rules that end a draft early have in common: signals from the draft's distribution, and a threshold that moves.

A rule is asked after every token, with the distribution that it was drawn from.  It may end the draft there; the token
stays. Entropies are in nats.  A drafter without distributions (counted n-grams) gives the token's own probability only,
and each signal says what it makes of that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Limits, StepRecord, check_least
from foretoken.core.largest import largest
from foretoken.methods.controllers.base import Controller

Stop = Callable[[Tensor | None, float], bool]
TINY = 1e-30
"""Stands for a probability of zero, whose surprise would be infinite."""


def entropy(distribution: Tensor | None, probability: float) -> float:
    """Entropy of a distribution [V]; without one the token's surprise, whose mean over the distribution is the
    entropy."""
    if distribution is None:
        return -math.log(max(probability, TINY))
    return float(torch.special.entr(distribution).sum())


def top(distribution: Tensor | None, probability: float) -> float:
    """The largest probability of a distribution [V]; without one the token's own."""
    return probability if distribution is None else float(distribution.max())


def margin(distribution: Tensor | None, probability: float) -> float:
    """How far the best token is ahead of the second best; without a distribution the least that this can be."""
    if distribution is None or len(distribution) < 2:
        return max(2.0 * probability - 1.0, 0.0)
    best, second = largest(distribution, 2)[0].tolist()
    return float(best - second)


@dataclass
class MovingThreshold:
    """A bar that rises while too little is accepted and falls when a draft could have been longer.

    Draft & Verify, arXiv 2309.08168: ``rate`` and ``value`` are moving averages, and one round moves the value by at
    most ``(1 - smoothing) * step``.

    A draft ends where its signal is below ``value``, which stays within [0, 1], where all signals lie; ``rate`` is
    steered to ``aim``, and ``step`` is how far the value is drawn before smoothing.
    """

    value: float
    aim: float = 0.9
    step: float = 0.01
    rate: float = 0.0
    rate_smoothing: float = 0.5
    smoothing: float = 0.9

    def update(self, drafted: int, accepted: int, cap: int) -> None:
        """Learn from a round of ``drafted`` > 0 tokens; at the cap it was not this bar that ended the draft."""
        self.rate = self.rate_smoothing * self.rate + (1 - self.rate_smoothing) * accepted / drafted
        if self.rate < self.aim:
            goal = self.value + self.step
        else:
            goal = self.value if drafted >= cap else self.value - self.step
        self.value = min(max(self.smoothing * self.value + (1 - self.smoothing) * goal, 0.0), 1.0)


class StoppingController(Controller):
    """The longest draft that the drafter makes, ended early by a rule.

    Args:
        k: longest draft; the drafter's own by default.
    """

    def __init__(self, k: int | None = None) -> None:
        check_least(self.name, 1, k=k)
        self.k = k
        self.cap, self.nodes = k or 5, 64

    def attach(self, limits: Limits) -> None:
        """Take the length from the drafter; a longer one than it makes would never be reached."""
        self.cap, self.nodes = min(self.k or limits.max_depth, limits.max_depth), limits.max_nodes

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self.cap, self.nodes, stop=self.rule(context))

    @abstractmethod
    def rule(self, context: Context) -> Stop:
        """When the draft of a request's next round ends."""


class MovingThresholdController(StoppingController):
    """A rule whose bar follows what is accepted, for each request on its own.

    Args:
        starts: first bar of greedy requests, and of others.
        k: longest draft; the drafter's own by default.
        aim: acceptance rate that the bar steers to.
        step: how far it is drawn per round, before smoothing.
    """

    def __init__(self, starts: tuple[float, float], k: int | None, aim: float, step: float) -> None:
        super().__init__(k)
        if not all(0 <= value <= 1 for value in (*starts, aim, step)):
            raise ValueError(f"{self.name} needs threshold, aim and step in [0, 1]")
        self.starts, self.aim, self.step = starts, aim, step

    def bar(self, context: Context) -> MovingThreshold:
        """The request's bar."""
        start = self.starts[0 if context.sampler.greedy else 1]
        return context.state.setdefault(self, MovingThreshold(start, self.aim, self.step))

    def observe(self, context: Context, record: StepRecord) -> None:
        drafted = levels(record)
        if drafted:
            self.bar(context).update(drafted, record.num_accepted_tokens, self.cap)


def levels(record: StepRecord) -> int:
    """How deep the draft of a round was; probes, which hang below it, do not count."""
    return min(record.depth, record.num_draft_tokens)
