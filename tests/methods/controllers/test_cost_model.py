"""The cost model: calibration at points, the line between and beyond them, drift, and the factor of a drafter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from foretoken.core import Limits, StepRecord
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.methods.controllers.cost_model import SAMPLES, SURE, CostCurve, CostModel, bucket, fit

MEMBERS = (Limits("model", 8, 8, relative_cost=0.2), Limits("ngram", 10, 10, relative_cost=0.0))
SHAPE = (0.8, 0.1, 0.1)


def record(batch: int, nodes: int, round_s: float, draft_s: float = 0.0) -> StepRecord:
    return StepRecord(0, 1, 0, 0, batch, draft_s, round_s, 0.0, round_s + draft_s, nodes)


def true_round_s(batch: int, nodes: int) -> float:
    return 5.0 + 0.9 * batch + 0.3 * nodes


def true_draft_s(depth: int, requests: int) -> float:
    return 0.5 + depth * (1.0 + 0.3 * requests)


def calibrated(rounds: int = 6, noise: float = 0.0, seed: int = 0, skip: int = 0) -> CostModel:
    """Plain rounds (two: the first one, behind drafts, says nothing) and drafts of one and of four tokens, for one
    request and for four."""
    costs, rng = CostModel(MEMBERS), random.Random(seed)
    costs._skip = skip
    for _ in range(rounds):
        for batch in (1, 4):
            for depth in (0, 0, 1, 4):
                slow = rng.lognormvariate(0.0, noise)
                nodes = batch * (1 + depth)
                draft_s = true_draft_s(depth, batch) if depth else 0.0
                seen = record(batch, nodes, slow * true_round_s(batch, nodes), slow * draft_s)
                costs.observe(seen, 0 if depth else -1, depth, batch if depth else 0)
    return costs


def test_the_line_through_points_with_a_weak_prior_by_hand() -> None:
    """Three points and much seen: the line is theirs.  One point: the shape, scaled to it."""
    points = {(1, 1): 6.2, (4, 4): 9.8, (4, 16): 13.4}
    assert fit({p: (v, 10**6) for p, v in points.items()}, SHAPE) == pytest.approx((5.0, 0.9, 0.3), rel=1e-3)
    assert fit({(1, 1): (2.0, 1)}, SHAPE) == pytest.approx((1.6, 0.2, 0.2), rel=1e-6)


def test_a_line_never_falls() -> None:
    falling = {(1, 1): (2.0, 9), (1, 2): (1.5, 9), (1, 4): (1.0, 9), (1, 8): (0.9, 9)}
    assert min(fit(falling, SHAPE)) >= 0.0


def test_the_median_of_the_first_rounds_is_what_a_point_costs() -> None:
    curve = CostCurve(SHAPE)
    for seconds in (9.0, 1.0, 1.0, 1.1, 1.0, 5.0, 1.0, 0.9, 1.0):
        curve.add((1, 1), seconds)
    assert curve.at(1, 1) == pytest.approx(1.0, rel=0.02)
    for _ in range(100):
        curve.add((1, 1), 1.0 if len(curve.samples[1, 1]) < SAMPLES else 100.0)  # then it is calibrated
    assert len(curve.samples[1, 1]) == SAMPLES and curve.at(1, 1) == pytest.approx(1.0, rel=0.02)


def test_costs_at_points_between_and_beyond_them() -> None:
    costs = calibrated()
    for batch, nodes in ((1, 1), (4, 8), (1, 3), (2, 6), (8, 24)):
        expected = true_round_s(batch, nodes) / true_round_s(1, 1)
        assert costs.round_s(batch, nodes) / costs.round_s(1, 1) == pytest.approx(expected, rel=0.08)
    for depth, requests in ((1, 1), (4, 1), (2, 1), (8, 1), (2, 2), (4, 8)):
        expected = true_draft_s(depth, requests) / true_draft_s(1, 1)
        assert costs.draft_s(0, depth, requests) / costs.draft_s(0, 1, 1) == pytest.approx(expected, rel=0.12)


def test_a_jump_at_a_point_is_known() -> None:
    """Kernels change: two nodes cost twice one, and sixteen no more than two."""
    costs = CostModel(MEMBERS)
    for nodes, seconds in 12 * [(1, 1.0), (2, 2.0), (16, 2.0)]:
        costs.observe(record(1, nodes, seconds), -1, 0, 0)
    assert costs.round_s(1, 2) / costs.round_s(1, 1) == pytest.approx(2.0, rel=0.2)
    assert costs.round_s(1, 16) / costs.round_s(1, 2) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_averaged_away(seed: int) -> None:
    costs = calibrated(rounds=SAMPLES, noise=0.1, seed=seed)
    expected = true_round_s(4, 20) / true_round_s(4, 4)
    assert costs.round_s(4, 20) / costs.round_s(4, 4) == pytest.approx(expected, rel=0.1)


def test_a_machine_that_gets_slower_makes_nothing_more_expensive() -> None:
    """Only the shape in use is measured; the drift factor moves, and all costs stay comparable."""
    costs = calibrated(rounds=SAMPLES)
    before = [costs.round_s(1, 1), costs.round_s(4, 20), costs.draft_s(0, 4, 4)]
    for _ in range(100):
        costs.observe(record(1, 1, 1.5 * true_round_s(1, 1)), -1, 0, 0)
    assert costs.drift == pytest.approx(1.5, rel=0.02)
    assert [costs.round_s(1, 1), costs.round_s(4, 20), costs.draft_s(0, 4, 4)] == before


def test_a_plain_round_behind_a_network_s_draft_says_nothing() -> None:
    """The draft's weights were in the cache, and not the target's; what copies has no weights."""
    costs = calibrated(rounds=SAMPLES)
    model, copies = record(1, 5, true_round_s(1, 5), true_draft_s(4, 1)), record(1, 5, true_round_s(1, 5), 1e-4)
    costs.observe(model, 0, 4, 1)
    drift = costs.drift
    costs.observe(record(1, 1, 2 * true_round_s(1, 1)), -1, 0, 0)
    assert costs.drift == pytest.approx(drift, rel=1e-6)
    costs.observe(record(1, 1, 2 * true_round_s(1, 1)), -1, 0, 0)
    assert costs.drift > 1.01 * drift
    drift = costs.drift
    costs.observe(copies, 1, 4, 1)
    costs.observe(record(1, 1, 3 * true_round_s(1, 1)), -1, 0, 0)
    assert costs.drift > 1.01 * drift


def test_a_pause_moves_little() -> None:
    costs = calibrated(rounds=SAMPLES)
    costs.observe(record(1, 1, 50.0 * true_round_s(1, 1)), -1, 0, 0)
    assert 1.0 < costs.drift < 1.03


def test_a_drafter_that_gets_more_expensive_has_a_factor_of_its_own() -> None:
    costs = calibrated(rounds=SAMPLES)
    before, rounds = costs.draft_s(0, 1, 1), costs.round_s(1, 2)
    for _ in range(200):
        costs.observe(record(1, 2, true_round_s(1, 2), 2.0 * true_draft_s(1, 1)), 0, 1, 1)
    assert costs.factors[0] == pytest.approx(2.0, rel=0.02) and costs.factors[1] == 1.0
    assert costs.draft_s(0, 1, 1) == pytest.approx(2.0 * before, rel=0.02) and costs.round_s(1, 2) == rounds
    assert costs.drift == pytest.approx(1.0, abs=0.02)


def test_before_anything_is_seen_sizes_tell() -> None:
    costs = CostModel(MEMBERS)
    assert costs.round_s(1, 1) == 1.0
    assert costs.draft_s(0, 2, 1) == pytest.approx(0.4) and costs.draft_s(1, 8, 1) == costs.draft_s(1, 1, 1) < 0.1


def test_the_first_rounds_are_not_looked_at() -> None:
    costs = CostModel(MEMBERS)
    for seconds in (9.0, 9.0, 1.0):
        costs.observe(record(1, 1, seconds), -1, 0, 0)
    assert costs.round_s(1, 1) == pytest.approx(1.0)


def test_drafts_without_a_model_cost_the_same_whatever_their_length() -> None:
    costs = CostModel(MEMBERS)
    for _ in range(6):
        for member in (0, 1):
            costs.observe(record(1, 3, 1.0, 0.2), member, 2, 1)
    model, ngram = ([costs.draft_s(member, depth, 1) for depth in (2, 8)] for member in (0, 1))
    assert model[1] > 2 * model[0] and ngram[1] < 1.5 * ngram[0]


def test_a_profile_stands_for_some_rounds_and_is_corrected_by_more() -> None:
    start = RoundCosts(TargetCost({1: 1.0, 8: 1.4}), {"model": DrafterCost(0.1, 0.2, (0.5, 0.3))}, 0.1)
    costs = CostModel(MEMBERS, start)
    assert costs.round_s(1, 1) == pytest.approx(1.1, rel=0.05)
    assert costs.draft_s(0, 2, 1) == pytest.approx(0.5, rel=0.1)
    assert {len(seen) for seen in costs.rounds.samples.values()} == {SURE}


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (16, 16), (17, 18), (31, 32), (33, 36), (100, 104)])
def test_buckets(size: int, expected: int) -> None:
    assert bucket(size) == expected


# -- measured costs, as profiles store them --------------------------------------------------------------------------


def test_costs_survive_json() -> None:
    costs = RoundCosts(TargetCost({1: 0.5, 4: 0.6}), {"d": DrafterCost(0.1, 0.2, (0.5,), 0.9)}, 0.01)
    assert RoundCosts.from_dict(costs.as_dict()) == replace(costs, drafters={"d": DrafterCost(0.1, 0.2, [0.5], 0.9)})
    with pytest.raises(ValueError, match="not measured costs"):
        RoundCosts.from_dict({"target_s": {}})


def test_costs_between_and_beyond_what_was_measured() -> None:
    target = TargetCost({1: 1.0, 3: 2.0, 5: 2.0})
    assert [target.of(n) for n in (1, 2, 3, 4, 9)] == [1.0, 1.5, 2.0, 2.0, 2.0]
    drafter = DrafterCost(0.1, 0.2, (0.8, 0.4))
    assert drafter.expected_tokens(2) == pytest.approx(2.2)
    assert drafter.expected_tokens(4) == pytest.approx(2.2 + 0.2 + 0.1)
    assert drafter.seconds(0) == 0.0 and drafter.seconds(3) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="positive seconds"):
        TargetCost({1: 0.0})


def test_a_draft_that_took_no_time_has_a_cost() -> None:
    """A profile says 0 seconds of a drafter that looks something up; a coarse clock says it of any round."""
    costs = RoundCosts(TargetCost({1: 1e-3, 4: 1e-3}), {"copy": DrafterCost(0.0, 0.0, (0.5, 0.2))})
    model = CostModel((Limits("copy", 4, 4, relative_cost=0.0),), costs)
    assert 0.0 < model.draft_s(0, 2, 1) < 1e-6
    for seconds in (0.0, 1e-6, 0.0):
        model.observe(StepRecord(0, 3, 2, 1, 1, seconds, 1e-3, 0.0, 1e-3 + seconds), 0, 2, 1)
    assert np.isfinite(model.factors[0]) and np.isfinite(model.draft_s(0, 2, 1))
