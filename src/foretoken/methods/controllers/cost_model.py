"""Cost of rounds on this machine, calibrated at first use, then corrected by one drift factor and one per drafter.

    round without drafting = a + b requests + c nodes           drafting = a + b depth + c depth requests

Each is measured at a few points, by the median of the first rounds there. A line through all points gives the costs
between and beyond them. A round at a calibrated point only updates the drift factor and, for drafting, the drafter's
own factor. Costs are stored in units of the drift, so that measurements of different times are comparable.
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
"""Rounds that calibrate a point, and rounds after which it updates the drift."""


@dataclass
class CostCurve:
    """A cost: a line over two features, and the measured seconds at every point.

    ``shape`` is the prior: the shares of the cost that are constant, and proportional to each feature.
    """

    shape: tuple[float, float, float]
    samples: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _line: tuple[float, float, float] | None = None
    _corrections: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, point: tuple[int, int], seconds: float) -> None:
        """Add a round at a point, unless it is calibrated."""
        samples = self.samples.setdefault(point, [])
        if len(samples) < SAMPLES:
            samples.append(seconds)
            self._line = None

    def at(self, x: int, y: int) -> float:
        """The cost at any point. Never 0, although a profile may give that for a look-up."""
        if self._line is None:
            medians = {point: (median(samples), len(samples)) for point, samples in self.samples.items()}
            self._line = fit(medians, self.shape)
            # At a point the line counts as five rounds, because costs jump where kernels change.
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
    values = np.maximum(values, 1e-9)  # a coarse clock may measure 0
    prior = np.maximum(np.array(shape), 1e-9) * np.average(values / (features @ shape), weights=counts)
    weights = counts**0.5 / (0.1 * values)  # a round varies by 10 %, and the prior by 100 %
    rows = np.concatenate([weights[:, None] * features, np.diag(1.0 / prior)])
    goal = np.concatenate([weights * values, np.ones(3)])
    a, b, c = np.maximum(np.linalg.lstsq(rows, goal, rcond=None)[0], 0.0).tolist()
    return a, b, c


class CostModel:
    """Seconds of rounds by requests and nodes, and of drafts by drafter, depth and requests, in units of the drift.

    Args:
        members: the drafters; one with ``relative_cost`` 0 runs no model.
        start: earlier measurements.
    """

    SKIPPED = 2
    """First rounds to skip, because caches are cold."""

    def __init__(self, members: Sequence[Limits], start: RoundCosts | None = None) -> None:
        self.members = members
        self.rounds = CostCurve((0.85, 0.1, 0.05))
        shapes = ((0.25, 0.6, 0.15) if member.relative_cost else (0.96, 0.02, 0.02) for member in members)
        self.drafts = [CostCurve(shape) for shape in shapes]
        self.drift, self.factors = 1.0, [1.0] * len(members)
        self._points = set[tuple[int, int]]()  # points of observed rounds, without earlier measurements
        self._skip, self._evicted = self.SKIPPED if start is None else 0, False
        self._assumed = frozenset[tuple[int, int]]()  # points of earlier measurements
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
        """Drop the earlier measurements, which another process has disturbed."""
        for point in self._assumed:
            del self.rounds.samples[point][:SURE]
        self.rounds.samples = {point: samples for point, samples in self.rounds.samples.items() if samples}
        self._assumed = frozenset()

    def round_s(self, batch: int, nodes: float) -> float:
        """Seconds of a round without its drafting; 1 before the first measurement."""
        return self.rounds.at(batch, max(round(nodes), 1)) if self.rounds.samples else 1.0

    def plain_rounds(self, batch: int) -> int:
        """Calibration rounds of plain decoding at this batch size."""
        return len(self.rounds.samples.get((bucket(batch), bucket(batch)), ()))

    def was_seen(self, batch: int, nodes: float) -> bool:
        """Whether a round of this batch size with at least half the drafts was observed; not every request has a
        draft."""
        least = (batch + nodes) / 2
        return any(b == bucket(batch) and n >= least for b, n in self._points)

    def draft_s(self, member: int, depth: int, batch: int) -> float:
        """Seconds of a draft for this batch; before the first measurement estimated by its size, without a model .02
        plain rounds."""
        curve = self.drafts[member]
        if not curve.samples:
            relative = self.members[member].relative_cost
            return (relative * depth if relative else 0.02) * self.round_s(batch, batch)
        return curve.at(depth, depth * batch) * self.factors[member]

    def observe(self, record: StepRecord, member: int, depth: int, requests: int) -> None:
        """Learn from a round in which ``requests`` requests got drafts of ``depth`` from one member (-1: from none, or
        from several).

        A plain round after a network's draft is skipped: the draft's weights have evicted the target's from the
        processor's cache (6 ms became 9 with a model of 270 MB), unlike in plain decoding.
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
        # A round of less than half the earlier measurement shows that this was disturbed.
        if self._assumed and record.total_s - draft_s < 0.5 * self.drift * self.rounds.at(*point):
            self._forget_start()
        self.drift *= math.exp(0.1 * self._learn(self.rounds, point, record.total_s - draft_s, 1.0))
        if member < 0 or depth == 0 or draft_s <= 0:
            return
        point = bucket(depth), bucket(depth * requests)
        off = self._learn(self.drafts[member], point, draft_s, self.factors[member])
        self.factors[member] *= math.exp(0.05 * off)

    def _learn(self, curve: CostCurve, point: tuple[int, int], seconds: float, factor: float) -> float:
        """Calibrate the point. Returns the round's deviation (natural logarithm) if it is calibrated, else 0."""
        sure = len(curve.samples.get(point, ())) >= SURE
        seconds = max(seconds, 1e-9)
        expected = self.drift * factor * curve.at(*point) if sure else seconds
        curve.add(point, seconds / (self.drift * factor))
        return min(max(math.log(seconds / expected), -0.2), 0.2)  # clipped: pauses are not costs


@cache
def bucket(size: int) -> int:
    """Bucket of a size: exact up to 16, then steps of an eighth."""
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step
