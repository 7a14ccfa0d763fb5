"""Assumptions of a plan: acceptance, draft cost, overhead and v(n), set, estimated or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from foretoken.core.costs import RoundCosts, TargetCost, speedup
from foretoken.lab.plan import speedup as theory
from foretoken.lab.plan.speedup import Acceptance


class CallCost(Protocol):
    """v: cost of scoring ``nodes`` tokens of each of ``batch`` requests, relative to one token of one request."""

    def __call__(self, nodes: int, batch: int = 1) -> float:
        """The cost, positive."""


@dataclass(frozen=True)
class Flat:
    """Scoring any number of tokens costs the same, as papers assume; true while memory bandwidth is the limit."""

    def __call__(self, nodes: int, batch: int = 1) -> float:
        return 1.0


@dataclass(frozen=True)
class Measured:
    """Measured costs, interpolated linearly and extrapolated along the last segment.

    ``target`` has the call's cost by its total nodes; ``rest_s`` is the rest of every round in the same unit.
    """

    target: TargetCost
    rest_s: float = 0.0

    def __call__(self, nodes: int, batch: int = 1) -> float:
        """The cost in rounds of one node."""
        return (self.target.of(nodes * batch) + self.rest_s) / self.unit

    @property
    def unit(self) -> float:
        """Cost of a plain round of one request."""
        return self.target.of(1) + self.rest_s

    @property
    def known_to(self) -> int:
        return max(self.target.seconds)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a plan; all costs in plain rounds of one request.

    Attributes:
        acceptance: alpha, or a survival vector.
        c: cost of a draft step.
        overhead: cost of a speculative round beyond the target call and the draft steps.
        drafter_grows: whether a draft step grows with the batch as the target's does (c is then the ratio at every
            batch size); otherwise its cost is constant.
        nodes_per_depth: draft nodes per level; 1 for a chain of the requested length.
        guesses: chains that guess the same k tokens in a round, independently of each other (lookahead's G).
        c_hat: operations of the drafter per token over those of the target; ``None``: as c.
    """

    acceptance: Acceptance
    c: float = 0.0
    overhead: float = 0.0
    v: CallCost = field(default_factory=Flat)
    drafter_grows: bool = True
    nodes_per_depth: float = 1.0
    c_hat: float | None = None
    guesses: int = 1

    def __post_init__(self) -> None:
        theory.tokens_of_guesses(self.acceptance, 1, self.guesses)
        theory.round_cost(1, self.c, 1.0, self.overhead)
        theory.round_cost(1, self.c if self.c_hat is None else self.c_hat, 1.0)

    @classmethod
    def measured(cls, costs: RoundCosts, spec: str) -> Assumptions:
        """Assumptions for a measured drafter of a profile, consistent with :meth:`RoundCosts.speedup`."""
        if spec not in costs.drafters:
            measured = ", ".join(costs.drafters) or "none"
            raise ValueError(f"drafter {spec!r} was not measured for this profile; it has: {measured}")
        drafter, v = costs.drafters[spec], Measured(costs.target, costs.rest_s)
        return cls(
            tuple(drafter.survival),
            drafter.step_s / v.unit,
            drafter.call_s / v.unit,
            v,
            drafter_grows=False,
            nodes_per_depth=drafter.nodes_per_depth * drafter.proposes,
        )

    def tokens(self, k: int) -> float:
        """Tokens per round for drafts of k levels."""
        return theory.tokens_of_guesses(self.acceptance, k, self.guesses)

    def nodes(self, k: int) -> int:
        """Nodes that the target scores per request, including the root."""
        return 1 + round(self.nodes_per_depth * k * self.guesses)

    def cost(self, steps: int, nodes: int, batch: int = 1) -> float:
        """Cost of a round with ``steps`` draft steps and ``nodes`` nodes, in plain rounds of the batch: its break-even
        tokens."""
        plain = self.v(1, batch)
        c = self.c * (plain if self.drafter_grows else 1.0)
        return theory.round_cost(steps, c, self.v(nodes, batch), self.overhead) / plain if steps else 1.0

    def speedup(self, k: int, batch: int = 1) -> float:
        """Tokens per second over plain decoding's."""
        return speedup(self.tokens(k), self.cost(k, self.nodes(k), batch), 1.0)

    def best_k(self, ks: Sequence[int], batch: int = 1) -> int:
        """The k of the largest speed-up among ``ks`` and 0, the smallest on ties."""
        return max(sorted({0, *ks}), key=lambda k: self.speedup(k, batch))

    def shifted(self, by: float) -> Assumptions:
        """A copy with every step's acceptance changed by ``by`` and clipped to [0, 1]."""
        return replace(self, acceptance=shifted(self.acceptance, by))


def shifted(acceptance: Acceptance, by: float) -> Acceptance:
    """The acceptance rate, or every step's rate of a survival vector, changed by ``by`` and clipped to [0, 1]."""
    if isinstance(acceptance, float | int):
        return min(max(acceptance + by, 0.0), 1.0)
    values, before, share = [], 1.0, 1.0
    for s in acceptance:
        share *= min(max((s / before if before > 0 else 0.0) + by, 0.0), 1.0)
        before = s
        values.append(share)
    return tuple(values)
