"""Shared code of early stop rules: signals from the draft's distribution, and a moving threshold.

A rule is called after every token with the distribution that it was drawn from, and may end the draft there; the token
stays. Entropies are in nats. A drafter without distributions (counted n-grams) passes only the token's own probability,
and each signal documents its substitute.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Limits, StepRecord, check_least
from foretoken.core.budget import MovingThreshold
from foretoken.core.largest import largest
from foretoken.methods.controllers.base import Controller

Stop = Callable[[Tensor | None, float], bool]


def entropy(distribution: Tensor | None, probability: float) -> float:
    """Entropy of a distribution [V]; without one, the token's surprise, whose mean over the distribution is the
    entropy."""
    if distribution is None:
        return -math.log(max(probability, 1e-30))  # the surprise of 0 would be infinite
    return float(torch.special.entr(distribution).sum())


def top(distribution: Tensor | None, probability: float) -> float:
    """The largest probability of a distribution [V]; without one, the token's own."""
    return probability if distribution is None else float(distribution.max())


def margin(distribution: Tensor | None, probability: float) -> float:
    """Difference of the two largest probabilities; without a distribution, its lower bound."""
    if distribution is None or len(distribution) < 2:
        return max(2.0 * probability - 1.0, 0.0)
    best, second = largest(distribution, 2)[0].tolist()
    return float(best - second)


class StoppingController(Controller):
    """Drafts of the drafter's longest length, ended early by a rule.

    Args:
        k: longest draft; the drafter's own by default.
    """

    def __init__(self, k: int | None = None) -> None:
        check_least(self.name, 1, k=k)
        self.k = k
        self.cap, self.nodes = k or 5, 64

    def attach(self, limits: Limits) -> None:
        """Take the length from the drafter, which also limits a longer one."""
        self.cap, self.nodes = min(self.k or limits.max_depth, limits.max_depth), limits.max_nodes

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self.cap, self.nodes, stop=self.rule(context))

    @abstractmethod
    def rule(self, context: Context) -> Stop:
        """The stop rule of a request's next draft."""


class MovingThresholdController(StoppingController):
    """A rule whose threshold follows the acceptance, separately for each request.

    Args:
        starts: first threshold of greedy requests, and of others.
        aim: acceptance rate that the threshold steers to.
        step: change of the threshold per round, before smoothing.
    """

    def __init__(self, starts: tuple[float, float], k: int | None, aim: float, step: float) -> None:
        super().__init__(k)
        if not all(0 <= value <= 1 for value in (*starts, aim, step)):
            raise ValueError(f"{self.name} needs threshold, aim and step in [0, 1]")
        self.starts, self.aim, self.step = starts, aim, step

    def bar(self, context: Context) -> MovingThreshold:
        """The request's threshold."""
        start = self.starts[0 if context.sampler.greedy else 1]
        return context.state.setdefault(self, MovingThreshold(start, self.aim, self.step))

    def observe(self, context: Context, record: StepRecord) -> None:
        drafted = levels(record)
        if drafted:
            self.bar(context).update(drafted, record.num_accepted_tokens, self.cap)


def levels(record: StepRecord) -> int:
    """Depth of a round's draft, without probes, which may be deeper."""
    return min(record.depth, record.num_draft_tokens)
