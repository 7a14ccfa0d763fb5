"""The prefix scheduler: which tokens of a batch are scored, and what it learns from."""

from __future__ import annotations

import itertools
import random

import pytest

from foretoken.controllers.margin import WARM_UP
from foretoken.controllers.prefix import PrefixController, prefixes, survival
from foretoken.core import Budget, Limits
from foretoken.drafters.model import ModelDrafter
from foretoken.engine.request import Request
from foretoken.sampling import SamplingParams
from toys import engine, outputs, serve, tables


def rate(counts: tuple[int, ...], survivals: list[list[float]], calls_per_s: list[float]) -> float:
    tokens = len(survivals) + sum(sum(row[:count]) for row, count in zip(survivals, counts, strict=True))
    return tokens * calls_per_s[len(survivals) + sum(counts)]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_choice_where_rows_cost_alike(seed: int) -> None:
    """Against all choices of prefixes of three chains, for a call's time that rises by a line."""
    draw = random.Random(seed)
    survivals = [survival([draw.uniform(0.3, 1.0) for _ in range(3)]) for _ in range(3)]
    slope = draw.uniform(0.01, 0.3)
    calls_per_s = [1.0 / (1.0 + slope * rows) for rows in range(20)]
    found = tuple(prefixes(survivals, 3, lambda rows: calls_per_s[rows]))
    best = max(itertools.product(range(4), repeat=3), key=lambda counts: rate(counts, survivals, calls_per_s))
    assert rate(found, survivals, calls_per_s) == pytest.approx(rate(best, survivals, calls_per_s))


def test_it_stops_at_the_first_fall() -> None:
    """A later gain would depend on what was drafted behind: seven rows are dear, twelve are not."""
    survivals = [survival([0.9] * 6)]
    assert prefixes(survivals, 1, lambda rows: 1.0) == [6]
    assert prefixes(survivals, 1, lambda rows: 0.1 if rows == 4 else 1.0) == [2]
    assert prefixes([[], [0.5]], 2, lambda rows: 1.0) == [0, 1]
    assert prefixes([[1.0, 1.0], [1.0]], 2, lambda rows: 1.0) == [2, 1]


def ready(**options: int) -> PrefixController:
    """One whose curves are steep and known."""
    controller = PrefixController(**options)
    for estimator in controller.estimators.values():
        estimator.steps = WARM_UP
        for place in range(8):
            estimator.curve(place).slope, estimator.curve(place).level = 2.0, -1.0
    return controller


def test_texts_stay_and_fewer_nodes_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tables()
    requests = [Request([0, 1, 2], max_new_tokens=30), Request([3], SamplingParams(temperature=1.0), 30, seed=2)]
    plain, scored = outputs(engine(target, None), requests), dict[bool, int]()
    for cuts in (False, True):
        controller = ready() if cuts else PrefixController()
        running = engine(target, ModelDrafter(draft, k=6), controller=controller)
        monkeypatch.setattr(controller.costs, "round_s", lambda batch, rows: 1.0 + 0.4 * rows)
        assert outputs(running, requests) == plain
        runs = serve(running, requests)
        scored[cuts] = sum(run.stats.num_draft_tokens for run in runs)
    assert scored[True] < 0.8 * scored[False]


def test_it_learns_from_what_was_scored() -> None:
    target, draft = tables()
    controller = PrefixController(k=3)
    serve(engine(target, ModelDrafter(draft, k=6), controller=controller), [Request([0, 1], max_new_tokens=120)])
    curve = controller.estimators[True].curve(0)
    assert curve.count + 100 * controller.estimators[True].steps > 20
    assert controller.costs.rounds.samples and not controller._seen


def test_options() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        PrefixController(k=0)
    controller = PrefixController()
    controller.attach(Limits("toy", 7, 33))
    assert (controller.cap, controller.nodes) == (7, 33)
    assert isinstance(controller.admitted([], []), list) and isinstance(Budget(), Budget)
