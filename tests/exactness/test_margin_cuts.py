"""The margin estimator that the benchmarks measure: what it learns, what censoring does to it, and cuts by it."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import block
from exact_cells import BATCH, CAUGHT, TINY, Reference, differences, reference
from torch import Tensor

from foretoken.core import Budget, TokenTree
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.dspark import DsparkDrafter
from foretoken.methods.drafters.parallel import Predictions
from foretoken.methods.trees.operations import first_nodes
from toys import engine, llamas

CURVES = [(0.8, -0.8), (0.5, 0.0), (1.2, -1.5), (0.6, -0.4)]
"""(w, b) of a made-up world, by position: neither flat nor where every curve starts."""


def loaded() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "margin_estimator.py"
    spec = importlib.util.spec_from_file_location("margin_estimator", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["margin_estimator"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


margin = loaded()


class World:
    """Drafts of four tokens that are accepted by these curves."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.estimator = random.Random(seed), margin.MarginEstimator()

    def round(self, stop: float = 0.0, knows_censoring: bool = True) -> None:
        """Verify one draft, which ends where it is estimated to survive with less than ``stop``."""
        margins = [self.rng.expovariate(0.5) for _ in CURVES]
        hits = [self.rng.random() < margin.chance_at(*CURVES[k], m) for k, m in enumerate(margins)]
        chances = [self.estimator.chance(k, m) for k, m in enumerate(margins)]
        kept = sum(value >= stop for value in margin.survival(chances))
        margins, chances = margins[:kept], chances[:kept]
        accepted = next((k for k, hit in enumerate(hits[:kept]) if not hit), kept)
        if knows_censoring:
            self.estimator.observe(margins, chances, accepted)
            return
        for place, (m, chance) in enumerate(zip(margins, chances, strict=True)):  # all after a rejection count as one
            self.estimator.curve(place).add(m, chance, place < accepted)
        self.estimator.observe([], [], 0)

    def error(self, place: int) -> float:
        """Mean distance of a position's chances from the true ones, over the margins that occur."""
        margins = [-2.0 * math.log(1 - (i + 0.5) / 50) for i in range(50)]
        off = [abs(self.estimator.chance(place, m) - margin.chance_at(*CURVES[place], m)) for m in margins]
        return sum(off) / len(off)


def refits(world: World, count: int, **options: Any) -> World:
    while world.estimator.steps < count:
        world.round(**options)
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_world_is_recovered_in_ten_refits(seed: int) -> None:
    fresh, world = World(), refits(World(seed), 10)
    for place, (slope, level) in enumerate(CURVES):
        assert fresh.error(place) > 0.13 and world.error(place) < 0.06
        if place < 2:  # the later positions are reached less often
            curve = world.estimator.curves[place]
            assert curve.slope == pytest.approx(slope, abs=0.3) and curve.level == pytest.approx(level, abs=0.4)


def test_positions_behind_a_rejection_tell_nothing() -> None:
    """Counted as rejections, they pull all later curves down."""
    right, wrong = refits(World(), 10), refits(World(), 10, knows_censoring=False)
    assert wrong.error(0) == pytest.approx(right.error(0))
    for place in (1, 2, 3):
        assert wrong.error(place) > 3 * right.error(place) and wrong.error(place) > 0.15


def test_cutting_before_the_warm_up_censors_its_own_labels() -> None:
    """Every curve starts at a chance of .82: whoever cuts below .85 from the first round on never scores a token to
    learn from, while whole drafts for three refits are enough for the positions that many of them reach."""
    fresh, early, late = World(), World(), World()
    for _ in range(1000):
        early.round(stop=0.85)
        late.round(stop=0.85 if late.estimator.is_warm else 0.0)
    for place in range(len(CURVES)):
        assert early.error(place) == fresh.error(place) > 0.13
        assert place > 1 or late.error(place) < 0.1


# -- cuts --------------------------------------------------------------------------------------------------------------

STOP = 0.6


class MarginStop(DsparkDrafter):
    """Ends a draft before the first token whose path is not likely enough by the margins of its distributions."""

    def drafted(self, prediction: Predictions, budget: Budget, depth: int, sharing: int) -> TokenTree:
        tree = super().drafted(prediction, budget, depth, sharing)
        if tree.q is None:
            return tree
        chances = [self.chance(tree.q[tree.q_rows[node]], tree.tokens[node]) for node in range(1, len(tree))]
        return first_nodes(tree, sum(value >= STOP for value in margin.survival(chances)))

    def chance(self, distribution: Tensor, token: int) -> float:
        return float(margin.chance_at(1.5, -0.6, margin.margin_of(distribution)))


class LooksAtTheToken(MarginStop):
    """Takes how far the drawn token, and not the best one, is ahead of the second best."""

    def chance(self, distribution: Tensor, token: int) -> float:
        second = float(distribution.topk(2).values[1])
        return float(margin.chance_at(1.5, -0.6, math.log(float(distribution[token]) / second)))


@cache
def right() -> Reference:
    return reference(llamas(vocab=4)[0], ("T=1",), lengths=(2, 3))


def difference(kind: type[DsparkDrafter], batch: int, length: int) -> float:
    target = llamas(vocab=4)[0]
    drafter: Any = block(kind, target, {"top": 4, "from_anchor": True})
    speculative = engine(target, drafter, None, ConstantController(), max_batch=batch)
    speculative.drafting.has_outside = False
    return differences(speculative, right(), ("T=1",), lengths=(length,))["T=1"].difference


def test_cuts_by_margins_known_before_the_token_are_exact() -> None:
    assert difference(MarginStop, BATCH, 2) < TINY


@pytest.mark.slow
def test_cuts_within_a_draft_are_exact() -> None:
    assert difference(MarginStop, 1, 3) < TINY


def test_cuts_by_the_drawn_token_are_caught() -> None:
    assert difference(LooksAtTheToken, BATCH, 2) > CAUGHT
