"""The exact distribution of what a whole engine writes, without sampling.

All randomness of a request without noise comes from :meth:`foretoken.core.Rng.uniform`, and its output changes only
where one of these uniforms passes a number that it is compared with: an acceptance chance, or a step of a running sum.
So the cube of uniforms falls into boxes of one output each.  :func:`written` finds them: it runs the real engine on a
point of a box, notes what every uniform was compared with, and runs it again for what these cuts have split off.
Nothing that a drafter or a rule says of itself is believed, and every right engine agrees with the target's
distribution to the last bits, so that an error of any size that matters is seen at once.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from matrix import SAMPLED_MODES
from torch import Tensor

from foretoken.core import Rng
from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.models.base import LanguageModel
from toys import Distribution, joint_distribution

Box = list[tuple[float, float]]
Reference = dict[str, dict[int, Distribution]]

PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
LENGTHS = (2, 3, 4)
FEW, MANY = 30, 600
"""A longer text is looked at where the shorter one had few boxes, and left where it turns out to have many."""
BATCH = 64
EDGE = 1e-7
"""Cuts that are nearer to each other are one: networks of drafters compute in float32."""
TINY = 1e-6
"""Total variation of a right engine from the target: some boxes' edges, each rounded to ``EDGE`` at most."""
CAUGHT = 1e-3
"""Total variation at which a planted error counts as caught: a thousand times what a right engine may have."""


class Found(NamedTuple):
    """Total variation between an engine's texts and the target's, their length, and how many boxes there were."""

    difference: float
    length: int
    boxes: int


class Watched(float):
    """A uniform, or a multiple of one, that notes what it is compared with."""

    cuts: list[float]
    scale: float

    @classmethod
    def of(cls, value: float, cuts: list[float], scale: float = 1.0) -> Watched:
        """``value`` is ``scale`` times the uniform; the cuts are the uniform's."""
        watched = cls(value)
        watched.cuts, watched.scale = cuts, scale
        return watched

    def __mul__(self, other: float) -> Watched:
        return Watched.of(float(self) * other, self.cuts, self.scale * other)

    __rmul__ = __mul__

    def _noted(self, other: float) -> float:
        if self.scale > 0.0:
            self.cuts.append(float(other) / self.scale)
        return float(other)

    def __lt__(self, other: float) -> bool:
        return float(self) < self._noted(other)

    def __le__(self, other: float) -> bool:
        return float(self) <= self._noted(other)

    def __gt__(self, other: float) -> bool:
        return float(self) > self._noted(other)

    def __ge__(self, other: float) -> bool:
        return float(self) >= self._noted(other)


class Points:
    """Hands out uniforms, no two of which are near each other, and finds them again by their value."""

    NEAR = 1e-6

    def __init__(self) -> None:
        self.jitter = random.Random(0)
        self.values: list[float] = []
        self.cuts: dict[float, list[float]] = {}

    def forget(self) -> None:
        """A round is over: its uniforms are used."""
        self.values.clear()
        self.cuts.clear()

    def within(self, low: float, high: float) -> Watched:
        """A point of the middle of an interval."""
        while True:
            value = low + (high - low) * self.jitter.uniform(0.2, 0.8)
            if self.nearest(value) is None or high - low < 1e3 * self.NEAR:
                insort(self.values, value)
                self.cuts[value] = []
                return Watched.of(value, self.cuts[value])

    def nearest(self, value: float) -> float | None:
        """The uniform next to ``value``, if it is near."""
        at = bisect_left(self.values, value)
        around = self.values[max(at - 1, 0) : at + 1]
        best = min(around, key=lambda uniform: abs(uniform - value), default=None)
        return best if best is not None and abs(best - value) < self.NEAR else None

    def note(self, sums: Tensor, goals: Tensor) -> None:
        """Running sums [V] or [n, V] in which goals [m] or [n, m], multiples of uniforms, are searched."""
        rows, goal_rows = (sums, goals) if sums.dim() > 1 else (sums[None], goals[None])
        for row, row_goals in zip(rows.double(), goal_rows.double(), strict=True):
            steps = (row / row[-1]).tolist()
            for goal in (row_goals / row[-1]).tolist():
                uniform = self.nearest(goal)
                if uniform is None:
                    raise AssertionError(f"{goal} is no uniform of this round")
                self.cuts[uniform] += steps[:-1]


class BoxRng(Rng):
    """The uniforms of one box; beyond its sides they may be anything."""

    def __init__(self, box: Box, points: Points) -> None:
        super().__init__(0)
        self.box, self.points = box, points
        self.used: list[Watched] = []

    def uniform(self) -> float:
        self.used.append(self.points.within(*side(self.box, len(self.used))))
        return self.used[-1]


def side(box: Box, index: int) -> tuple[float, float]:
    return box[index] if index < len(box) else (0.0, 1.0)


@contextmanager
def watching(points: Points) -> Iterator[None]:
    """Searches in running sums are noted inside this context; their results stay the same."""
    search = torch.searchsorted

    def noted(sums: Tensor, goals: Tensor, **more: Any) -> Tensor:
        points.note(sums, goals)
        return search(sums, goals, **more)

    with mock.patch.object(torch, "searchsorted", noted):
        yield


def split(box: Box, used: Sequence[Watched]) -> tuple[float, list[Box]]:
    """The weight of the box around the point ``used`` on which nothing changes, and the boxes that are left over."""
    inside: Box = []
    others: list[Box] = []
    weight = 1.0
    for index, point in enumerate(used):
        low, high = side(box, index)
        edges = [low]
        for cut in sorted(point.cuts):
            if edges[-1] + EDGE < cut < high - EDGE:
                edges.append(cut)
        for piece in pairwise([*edges, high]):
            if piece[0] <= float(point) < piece[1]:
                own = piece
            else:
                others.append([*inside, piece])
        inside.append(own)
        weight *= own[1] - own[0]
    return weight, others


def play(engine: Engine, points: Points, request: Request, boxes: Sequence[Box]) -> list[Running]:
    """One run for a point of every box, all in one batch."""
    ids = []
    for box in boxes:
        ids.append(engine.add(request))
        run = engine.requests.waiting[-1]
        if run.context.sampler.noise is not None:
            raise AssertionError("noise is no uniform: such a request is tested by equality")
        run.context.update(rng=BoxRng(box, points))
    finished: dict[int, Running] = {}
    while engine.busy:
        points.forget()
        for run, emission in engine.step():
            if emission.error is not None:
                raise emission.error
            if emission.finish_reason is not None:
                finished[run.id] = run
    return [finished[number] for number in ids]


def written(
    engine: Engine, params: SamplingParams, length: int, prompt: Sequence[int] = PROMPT, most: int = 10**6
) -> tuple[Distribution, int] | None:
    """The distribution of the first ``length`` tokens that an engine writes, and the number of boxes; nothing if these
    are more than ``most``."""
    points, request = Points(), Request(prompt, params, length)
    boxes: list[Box] = [[]]
    chances: dict[tuple[int, ...], float] = defaultdict(float)
    count = 0
    with watching(points):
        while boxes:
            if count + len(boxes) > most:
                return None
            chosen, boxes = boxes[-BATCH:], boxes[:-BATCH]
            for box, run in zip(chosen, play(engine, points, request, chosen), strict=True):
                weight, others = split(box, run.context.rng.used)  # type: ignore[attr-defined]
                chances[tuple(run.output)] += weight
                boxes += others
                count += 1
    return dict(chances), count


def total_variation(p: Mapping[tuple[int, ...], float], q: Mapping[tuple[int, ...], float]) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * sum(abs(p.get(key, 0.0) - q.get(key, 0.0)) for key in {*p, *q})


def reference(
    right: LanguageModel,
    modes: Iterable[str] = tuple(SAMPLED_MODES),
    prompt: Sequence[int] = PROMPT,
    lengths: Sequence[int] = LENGTHS,
) -> Reference:
    """The target's own distributions of texts of these lengths, by mode."""
    return {
        mode: {length: joint_distribution(right, SAMPLED_MODES[mode], prompt, length) for length in lengths}
        for mode in modes
    }


def differences(
    engine: Engine,
    right: Reference,
    modes: Iterable[str] = tuple(SAMPLED_MODES),
    prompt: Sequence[int] = PROMPT,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, Found]:
    """The result of each mode, for the longest texts that have not too many boxes, the shortest at least."""
    results: dict[str, Found] = {}
    for mode in modes:
        for length in lengths:
            result = written(engine, SAMPLED_MODES[mode], length, prompt, MANY if mode in results else 10**6)
            if result is None:
                break
            results[mode] = Found(total_variation(result[0], right[mode][length]), length, result[1])
            if result[1] > FEW or results[mode].difference > TINY:
                break
    return results
