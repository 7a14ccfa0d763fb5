"""How likely a draft token is to be accepted, from how far the best token is ahead of the second best: what
``margin.py`` measures.

One logistic curve per position of a draft, two parameters each, is learned online from what was verified; the idea and
its numbers are those of vLLM's adaptive verification (2026).  The margin is that of log-probabilities, capped, and
known before the token is drawn: whether a draft goes on behind it may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

CAP = 40.0
"""Margins above this are one."""
SLOPE, LEVEL = 0.0, 1.5
"""Where every curve starts: a chance of .82, whatever the margin."""
EVERY, ENOUGH = 100, 50
"""Rounds between two steps, and observations of a position without which its curve stays."""
RIDGE, KEEP = 1e-3, 0.8
"""Added to the curvature, and what it is worth one step later."""
WARM_UP = 3
"""Steps before which no draft is cut: one that is tells nothing of the positions behind, and first curves are wrong."""


def margin_of(distribution: Tensor) -> float:
    """How much likelier (natural logarithm) the best token of a distribution [V] is than the second best, capped."""
    if len(distribution) < 2:
        return CAP
    best, second = distribution.topk(2).values.tolist()
    return min(math.log(best / second), CAP) if second > 0 else CAP


def chance_at(slope: float, level: float, margin: float) -> float:
    """The logistic curve."""
    x = slope * margin + level
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


@dataclass
class Curve:
    """What is known of one position.

    Attributes:
        slope, level: the curve's parameters.
        count: observations since the last step.
        mean: running mean of the chances that it gave.
    """

    slope: float = SLOPE
    level: float = LEVEL
    count: int = 0
    mean: float = 0.8
    _curvature: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of m^2, m and 1
    _gradient: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, margin: float, chance: float, accepted: bool) -> None:
        """A token with this margin, the chance that was told when it was drafted, and what became of it."""
        weight, error = chance * (1.0 - chance), float(accepted) - chance
        for index, value in enumerate((margin * margin, margin, 1.0)):
            self._curvature[index] += weight * value
        self._gradient[0] += error * margin
        self._gradient[1] += error
        self.count += 1
        self.mean += 0.02 * (chance - self.mean)

    def step(self) -> None:
        """One step of Newton's method, if there is enough to go by and the curve still rises with the margin.

        The curvature of earlier steps counts on, so that a step averages over several of them.
        """
        if self.count < ENOUGH:
            return
        a, b, c = self._curvature[0] + RIDGE, self._curvature[1], self._curvature[2] + RIDGE
        determinant = a * c - b * b
        if determinant > 0:
            slope = self.slope + (c * self._gradient[0] - b * self._gradient[1]) / determinant
            level = self.level + (a * self._gradient[1] - b * self._gradient[0]) / determinant
            if math.isfinite(slope) and math.isfinite(level) and slope >= 0:
                self.slope, self.level = slope, level
        self._curvature = [KEEP * value for value in self._curvature]
        self._gradient, self.count = [0.0, 0.0], 0


class MarginEstimator:
    """Curves by position, learned from verified chains.

    Attributes:
        curves: of positions 0, 1, ...
        steps: how often they have been fitted.
    """

    def __init__(self) -> None:
        self.curves: list[Curve] = []
        self.steps = 0
        self._rounds = 0

    def curve(self, place: int) -> Curve:
        """That of a position; a new one starts where the one before it is."""
        while len(self.curves) <= place:
            before = self.curves[-1] if self.curves else Curve()
            self.curves.append(Curve(before.slope, before.level, mean=before.mean))
        return self.curves[place]

    @property
    def is_warm(self) -> bool:
        """Whether drafts may be cut by what it says."""
        return self.steps >= WARM_UP

    def chance(self, place: int, margin: float) -> float:
        """That the token at a position is accepted, if those before it are."""
        curve = self.curve(place)
        return chance_at(curve.slope, curve.level, margin)

    def observe(self, margins: list[float], chances: list[float], accepted: int) -> None:
        """A verified chain: of its tokens those that were accepted, and the first that was not, tell something.

        Args:
            margins: by position, of all that was drafted and verified.
            chances: what was told of them then.
            accepted: how many were accepted.
        """
        for place, (margin, chance) in enumerate(zip(margins, chances, strict=True)):
            if place > accepted:
                break
            self.curve(place).add(margin, chance, place < accepted)
        self._rounds += 1
        if self._rounds >= EVERY:
            self._rounds = 0
            self.steps += 1
            for curve in self.curves:
                curve.step()


def survival(chances: Sequence[float]) -> list[float]:
    """Chance that a draft is accepted so far, by position."""
    found, product = [], 1.0
    for chance in chances:
        product *= chance
        found.append(product)
    return found


def prefixes(survivals: Sequence[Sequence[float]], plain: int, calls_per_s: Callable[[int], float]) -> list[int]:
    """How many tokens of every chain are scored: the likeliest ones of all, until the throughput falls for the first
    time.

    Not until it is highest: whether a token is scored may depend on what is as likely as itself or likelier, which is
    before it or of another request, never on what is drafted behind it.

    Args:
        survivals: by chain and position; they fall along a chain.
        plain: tokens, and rows, of a round without drafts.
        calls_per_s: by rows in one call.
    """
    order = sorted((-value, place, chain) for chain, row in enumerate(survivals) for place, value in enumerate(row))
    counts, rows, tokens = [0] * len(survivals), plain, float(plain)
    best = tokens * calls_per_s(rows)
    for negative, place, chain in order:
        rows, tokens = rows + 1, tokens - negative
        rate = tokens * calls_per_s(rows)
        if rate < best:
            break
        best, counts[chain] = rate, place + 1
    return counts
