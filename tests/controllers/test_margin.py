"""The margin estimator: it finds a planted world, learns from what was verified alone, and waits before it cuts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from foretoken.controllers.margin import CAP, ENOUGH, EVERY, WARM_UP, Curve, MarginEstimator, chance_at, margin_of

PLANTED = [(0.9, -0.5), (0.6, -1.0), (0.3, 0.2)]
"""Slope and level by position."""


def play(estimator: MarginEstimator, rounds: int, length: Callable[[random.Random], int], blind: bool = False) -> None:
    """Rounds of the planted world, of which a part of every draft is verified; ``blind``: the position behind it counts
    as one that was rejected."""
    draw = random.Random(0)
    for _ in range(rounds):
        margins = [draw.expovariate(0.4) for _ in PLANTED]
        chances = [estimator.chance(place, margin) for place, margin in enumerate(margins)]
        accepted = next((i for i, (w, b) in enumerate(PLANTED) if draw.random() > chance_at(w, b, margins[i])), 3)
        verified = length(draw)
        if blind and accepted >= verified:
            estimator.observe(margins, chances, verified)
        else:
            estimator.observe(margins[:verified], chances[:verified], min(accepted, verified))


def distance(estimator: MarginEstimator) -> float:
    """The largest error of a chance, over positions and ordinary margins."""
    places = [(place, margin / 2) for place in range(len(PLANTED)) for margin in range(14)]
    return max(abs(estimator.chance(place, m) - chance_at(*PLANTED[place], m)) for place, m in places)


def test_a_planted_world_is_found_in_ten_steps() -> None:
    estimator = MarginEstimator()
    assert distance(estimator) > 0.3
    play(estimator, 10 * EVERY, lambda draw: 3)
    assert estimator.steps == 10 and distance(estimator) < 0.1
    play(estimator, 60 * EVERY, lambda draw: 3)
    assert distance(estimator) < 0.1


def test_what_was_not_verified_says_nothing() -> None:
    right, wrong = MarginEstimator(), MarginEstimator()
    play(right, 60 * EVERY, lambda draw: draw.choice((1, 2, 3)))
    play(wrong, 60 * EVERY, lambda draw: draw.choice((1, 2, 3)), blind=True)
    assert distance(right) < 0.1 < 0.3 < distance(wrong)


def test_it_waits_before_it_cuts() -> None:
    estimator = MarginEstimator()
    play(estimator, WARM_UP * EVERY - 1, lambda draw: 3)
    assert not estimator.is_warm
    play(estimator, 1, lambda draw: 3)
    assert estimator.is_warm


def test_a_curve_keeps_what_a_step_cannot_improve() -> None:
    few = Curve()
    for _ in range(ENOUGH - 1):
        few.add(2.0, 0.8, False)
    few.step()
    assert (few.slope, few.level, few.count) == (0.0, 1.5, ENOUGH - 1)
    falling = Curve()
    for margin, accepted in [(0.1, True), (6.0, False)] * ENOUGH:
        falling.add(margin, 0.8, accepted)
    falling.step()
    assert falling.slope == 0.0  # a chance that falls with the margin is noise


def test_margins() -> None:
    q = torch.tensor([0.1, 0.6, 0.3])
    assert margin_of(q) == pytest.approx(math.log(2.0))
    assert margin_of(torch.tensor([0.5, 0.5])) == 0.0
    assert margin_of(torch.tensor([0.0, 1.0])) == margin_of(torch.ones(1)) == CAP
    assert [chance_at(1.0, 0.0, m) for m in (-800.0, 0.0, 800.0)] == pytest.approx([0.0, 0.5, 1.0])
