"""What rounds cost on this machine: calibrated at first use, then corrected by one drift factor and one per drafter.

    round without drafting = a + b requests + c nodes           drafting = a + b depth + c depth requests

Each is measured at a few points, by the median of the first rounds there; between and beyond them the line through all
points holds.  A round at a calibrated point tells of the machine only: it moves the drift factor, and for drafting the
drafter's own factor.  Costs are kept in units of the drift: what was seen at different times can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import numpy as np

from foretoken.core import Limits, StepRecord
from foretoken.core.costs import RoundCosts

SAMPLES, SURE = 20, 3
"""Rounds that a point is calibrated by, and from which on it tells of drift."""
NOISE = 0.1
"""Standard deviation of a round's time, as a part of it; the parts of a shape are known beforehand to 100 %."""
ROUND_SHAPE, DRAFT_SHAPE, FREE_SHAPE = (0.85, 0.1, 0.05), (0.25, 0.6, 0.15), (0.96, 0.02, 0.02)
"""Parts of a cost that are constant, and that grow with the two features, until more is seen."""
DRIFT_RATE, FACTOR_RATE, CLIP = 0.1, 0.05, 0.2
"""How fast the factors follow; a round counts at most as this much (natural logarithm) off: pauses are not costs."""
FALSE = 0.5
"""A round that takes less than this part of what was measured before shows that the measurement was disturbed."""
FREE = 0.02
"""A draft of a drafter that runs no model, in plain rounds, until one was seen."""


@dataclass
class CostCurve:
    """A cost: a line over two features, of a ``shape`` known beforehand, and the seconds seen at every point."""

    shape: tuple[float, float, float]
    samples: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _line: tuple[float, float, float] | None = None
    _corrections: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, point: tuple[int, int], seconds: float) -> None:
        """One more round at a point, if it still needs one."""
        samples = self.samples.setdefault(point, [])
        if len(samples) < SAMPLES:
            samples.append(seconds)
            self._line = None

    def at(self, x: int, y: int) -> float:
        """The cost at a point, seen or not; never nothing, though a profile may say that a look-up takes no time."""
        if self._line is None:
            medians = {point: (median(samples), len(samples)) for point, samples in self.samples.items()}
            self._line = fit(medians, self.shape)
            # At a point the line through all points is worth five rounds there: costs jump where kernels change.
            self._corrections = {
                point: (value / self._on_line(*point)) ** (count / (count + 5.0))
                for point, (value, count) in medians.items()
            }
        return max(self._on_line(x, y) * self._corrections.get((bucket(x), bucket(y)), 1.0), 1e-9)

    def _on_line(self, x: int, y: int) -> float:
        a, b, c = self._line or self.shape
        return max(a + b * x + c * y, 1e-9)


def fit(medians: Mapping[tuple[int, int], tuple[float, int]], shape: Sequence[float]) -> tuple[float, float, float]:
    """The line through points (value, rounds) by weighted least squares, with a Gaussian prior of the shape."""
    features = np.array([(1.0, *point) for point in medians])
    values, counts = np.array(list(medians.values())).T
    values = np.maximum(values, 1e-9)  # a coarse clock may say that a round took no time
    prior = np.maximum(np.array(shape), 1e-9) * np.average(values / (features @ shape), weights=counts)
    weights = counts**0.5 / (NOISE * values)
    rows = np.concatenate([weights[:, None] * features, np.diag(1.0 / prior)])
    goal = np.concatenate([weights * values, np.ones(3)])
    a, b, c = np.maximum(np.linalg.lstsq(rows, goal, rcond=None)[0], 0.0).tolist()
    return a, b, c


class CostModel:
    """Seconds of rounds by requests and nodes, and of drafts by drafter, depth and requests, in units of the drift.

    Args:
        members: the drafters; ``relative_cost`` 0 says that one runs no model.
        start: what was measured before.
    """

    SKIPPED = 2
    """Rounds at the very beginning that say nothing: caches are cold."""

    def __init__(self, members: Sequence[Limits], start: RoundCosts | None = None) -> None:
        self.members = members
        self.rounds = CostCurve(ROUND_SHAPE)
        self.drafts = [CostCurve(DRAFT_SHAPE if member.relative_cost else FREE_SHAPE) for member in members]
        self.drift, self.factors = 1.0, [1.0] * len(members)
        self._points = set[tuple[int, int]]()  # points of rounds, not of what was measured before
        self._skip, self._evicted = self.SKIPPED if start is None else 0, False
        self._assumed = frozenset[tuple[int, int]]()  # points that were measured before
        if start is not None:
            self._start_from(start)

    def _start_from(self, start: RoundCosts) -> None:
        for nodes, seconds in start.target.seconds.items():
            self.rounds.samples[1, bucket(nodes)] = [seconds + start.rest_s] * SURE
        self._assumed = frozenset(self.rounds.samples)
        for curve, member in zip(self.drafts, self.members, strict=True):
            if (cost := start.drafters.get(member.name)) is not None:
                for depth in range(1, max(2, len(cost.survival)) + 1):
                    curve.samples[bucket(depth), bucket(depth)] = [cost.seconds(depth)] * SURE

    def _forget_start(self) -> None:
        """Keep only what was seen since: another process was in the way when rounds were measured before."""
        for point in self._assumed:
            del self.rounds.samples[point][:SURE]
        self.rounds.samples = {point: samples for point, samples in self.rounds.samples.items() if samples}
        self._assumed = frozenset()

    def round_s(self, batch: int, nodes: float) -> float:
        """A round without its drafting; 1 until one was seen."""
        return self.rounds.at(batch, max(round(nodes), 1)) if self.rounds.samples else 1.0

    def plain_rounds(self, batch: int) -> int:
        """Rounds by which plain decoding is calibrated at this size."""
        return len(self.rounds.samples.get((bucket(batch), bucket(batch)), ()))

    def was_seen(self, batch: int, nodes: float) -> bool:
        """Whether a round of so many requests was run here with half as many drafts: not all of them have a guess."""
        least = (batch + nodes) / 2
        return any(b == bucket(batch) and n >= least for b, n in self._points)

    def draft_s(self, member: int, depth: int, batch: int) -> float:
        """A draft for so many requests; by its size while none was seen."""
        curve = self.drafts[member]
        if not curve.samples:
            relative = self.members[member].relative_cost
            return (relative * depth if relative else FREE) * self.round_s(batch, batch)
        return curve.at(depth, depth * batch) * self.factors[member]

    def observe(self, record: StepRecord, member: int, depth: int, requests: int) -> None:
        """Learn from a round in which so many ``requests`` got drafts of ``depth`` from one member (-1: from none, or
        from several).

        A plain round behind a network's draft says nothing: the other weights have pushed the target's out of the
        processor's cache (6 ms became 9 with a model of 270 MB), which plain decoding never does to itself.
        """
        is_plain = member < 0 and record.round_nodes <= record.batch_size
        draft_s = 0.0 if is_plain else record.draft_s
        drafters = self.members if member < 0 else (self.members[member],)
        runs_network = draft_s > 0 and any(drafter.relative_cost for drafter in drafters)
        is_cold, self._evicted = is_plain and self._evicted, runs_network
        if self._skip or is_cold:
            self._skip = max(self._skip - 1, 0)
            return
        point = bucket(record.batch_size), bucket(record.round_nodes or record.num_nodes)
        self._points.add(point)
        if self._assumed and record.total_s - draft_s < FALSE * self.drift * self.rounds.at(*point):
            self._forget_start()
        self.drift *= math.exp(DRIFT_RATE * self._learn(self.rounds, point, record.total_s - draft_s, 1.0))
        if member < 0 or depth == 0 or draft_s <= 0:
            return
        point = bucket(depth), bucket(depth * requests)
        off = self._learn(self.drafts[member], point, draft_s, self.factors[member])
        self.factors[member] *= math.exp(FACTOR_RATE * off)

    def _learn(self, curve: CostCurve, point: tuple[int, int], seconds: float, factor: float) -> float:
        """Calibrate, or say how far off the round was (natural logarithm)."""
        sure = len(curve.samples.get(point, ())) >= SURE
        seconds = max(seconds, 1e-9)
        expected = self.drift * factor * curve.at(*point) if sure else seconds
        curve.add(point, seconds / (self.drift * factor))
        return min(max(math.log(seconds / expected), -CLIP), CLIP)


@cache
def bucket(size: int) -> int:
    """Sizes that are told apart: each up to 16, then steps of an eighth."""
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step
