"""Drafting during verification: formulas against a simulated clock, hit chances against drawn rounds."""

from __future__ import annotations

import math
import random
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

from foretoken.core.costs import TargetCost
from foretoken.core.io.finite import finite
from foretoken.lab.plan.ahead import ahead_row, ahead_summary, hit_probability
from foretoken.lab.plan.assumptions import Assumptions, Measured

SCRIPT = run_path(str(Path(__file__).parents[3] / "benchmarks" / "ahead.py"))
race_positions, residual_positions = SCRIPT["race_positions"], SCRIPT["residual_positions"]
POSITIONS = [0.6, 0.15, 0.08, 0.02]


def drawn_hits(k: int, fanout: int, positions: list[float], rounds: int = 20_000) -> float:
    """The share of drawn rounds whose outcome is guessed: every place has the rank of the target's token."""
    rng, hits = random.Random(0), 0
    for _ in range(rounds):
        ranks = rng.choices(range(len(positions) + 1), [*positions, 1 - sum(positions)], k=k + 1)
        accepted = next((i for i, rank in enumerate(ranks[:k]) if rank), k)
        rank = ranks[accepted]
        hits += rank < fanout if accepted == k else 0 < rank <= fanout
    return hits / rounds


@pytest.mark.parametrize("fanout", [1, 3])
@pytest.mark.parametrize("k", [1, 4])
def test_hits_are_those_of_drawn_rounds(k: int, fanout: int) -> None:
    assert hit_probability(POSITIONS[0], k, POSITIONS, fanout) == pytest.approx(
        drawn_hits(k, fanout, POSITIONS), abs=0.015
    )


def test_measured_survival() -> None:
    """Half of the rounds accept both drafts, half end at the first."""
    assert hit_probability((0.5, 0.5), 2, [0.5, 0.2], 1) == pytest.approx(0.5 * 0.4 + 0.5 * 0.5)


def clock(call: float, work: float, s: float) -> float:
    """Two jobs side by side, in small steps: when both are done."""
    at, step, target, drafter = 0.0, 1e-4, call, work
    while target > 0 or drafter > 0:
        both = target > 0 and drafter > 0
        target, drafter = target - step / (s if both else 1), drafter - step / (s if both else 1)
        at += step
    return at


@pytest.mark.parametrize("s", [1.0, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("c", [0.02, 0.3])
def test_the_clock(c: float, s: float) -> None:
    """The time of a round is that of two jobs that slow each other down, plus the draft after a miss."""
    assumptions = Assumptions(0.6, c=c, overhead=0.05, v=Measured(TargetCost({1: 1.0, 5: 1.2, 20: 1.6})))
    row = ahead_row(assumptions, 4, 2, s, POSITIONS)
    assert row.work == pytest.approx(c * (1.2 + 4 * (1.2 + 0.4 / 3)))  # five rows, then four calls of ten
    round_ = clock(1.2, row.work, s) + (1 - row.hits) * 4 * c + 0.05
    assert assumptions.tokens(4) / row.speedup == pytest.approx(round_, abs=2e-3)
    assert row.without == pytest.approx(assumptions.speedup(4))
    assert row.pays == (row.speedup > row.without)


def test_break_even() -> None:
    """At the reported contention both are equal; a little more and drafting ahead loses."""
    assumptions = Assumptions(0.7, c=0.1)
    most = ahead_row(assumptions, 4, 2, 1.0, POSITIONS).contention
    assert most is not None and 1 < most < 2
    assert ahead_row(assumptions, 4, 2, most, POSITIONS).speedup == pytest.approx(assumptions.speedup(4))
    assert ahead_row(assumptions, 4, 2, most - 0.05, POSITIONS).pays
    assert not ahead_row(assumptions, 4, 2, most + 0.05, POSITIONS).pays


def test_work_that_outlasts_the_call_never_pays() -> None:
    row = ahead_row(Assumptions(0.5, c=0.5), 4, 1, 1.0, POSITIONS)
    assert row.contention is None and not row.pays and row.public()["contention"] is None
    assert "no contention factor would make it pay" in ahead_summary([row], 1.0)


def test_sharing_everything_never_pays() -> None:
    """At 2 the guesses are paid in full, and they cost more than a draft."""
    for c in (0.01, 0.1, 0.2):
        for k in (1, 3, 6):
            assert not ahead_row(Assumptions(0.9, c=c), k, 2, 2.0, [0.9, 0.05, 0.02]).pays


def test_free_drafts_have_nothing_to_gain() -> None:
    row = ahead_row(Assumptions(0.5), 2, 1, 2.0)
    assert row.speedup == row.without and not row.pays and row.contention == math.inf
    assert finite(row.public())["contention"] == "Infinity"  # null: slower at any factor


P, Q = [0.5, 0.3, 0.15, 0.05], [0.4, 0.2, 0.3, 0.1]


def test_the_targets_own_race_is_guessed_more_often() -> None:
    """With its noise the drafter ranks what the target takes; the rest after a rejection is guessed by q alone."""
    raced, drawn = race_positions(P, Q, 4, trials=40_000), residual_positions(P, Q, 4)
    assert sum(raced) == pytest.approx(1.0)
    by_hand = race_by_hand(40_000)
    assert raced == pytest.approx(by_hand, abs=0.02)
    assert drawn[0] == pytest.approx(sum(map(min, P, Q)))
    # Tokens 2 and 3 are rejected with .15 and .05; the rest is tokens 0 and 1, equally; 0 is the best by q.
    assert drawn[1] == pytest.approx(0.2 * 0.5) and drawn[2] == pytest.approx(0.15 * 0.5)
    assert drawn[3] == pytest.approx(0.05 * 0.5)
    same = race_positions(P, P, 2)
    assert same == [1.0, 0.0] and residual_positions(P, P, 2) == [1.0, 0.0]


def race_by_hand(trials: int) -> list[float]:
    rng, counts = np.random.default_rng(7), [0] * 4
    for _ in range(trials):
        noise = rng.gumbel(size=4)
        right = int((np.log(P) + noise).argmax())
        counts[[int(i) for i in (np.log(Q) + noise).argsort()[::-1]].index(right)] += 1
    return [count / trials for count in counts]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ahead_row(Assumptions(0.5), 0, 1, 1.0),
        lambda: ahead_row(Assumptions(0.5), 2, 0, 1.0),
        lambda: ahead_row(Assumptions(0.5), 2, 1, 0.5),
        lambda: ahead_row(Assumptions(0.5), 2, 1, math.nan),
        lambda: hit_probability(0.5, 2, [0.5], 1),
        lambda: hit_probability(0.5, 2, [0.7, 0.6], 1),
        lambda: hit_probability(0.5, 2, [1.2, 0.1], 1),
        lambda: race_positions([0.5, 0.5], [1.0], 1),
        lambda: residual_positions([0.5, 0.6], [0.5, 0.5], 1),
    ],
)
def test_what_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        wrong()
