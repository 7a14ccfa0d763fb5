"""Drafts that are cut by their margins keep the distribution, which is enumerated; cuts by what was drawn do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from exact_cells import CAUGHT, TINY, Reference, differences, reference
from torch import Tensor

from foretoken.controllers import prefix
from foretoken.controllers.base import Controller
from foretoken.controllers.margin import WARM_UP, MarginEstimator, MarginStops
from foretoken.controllers.prefix import PrefixController
from foretoken.core import Budget, Context, StepRecord
from foretoken.drafters.model import ModelDrafter
from toys import engine, tables

STEEP = 3.0, -2.5


def warm(estimator: MarginEstimator) -> MarginEstimator:
    """Curves by which half of the places are worth a token, and that stay."""
    estimator.steps = WARM_UP
    for place in range(6):
        curve = estimator.curve(place)
        curve.slope, curve.level, curve.mean = *STEEP, 0.7
    estimator.observe = lambda *_: None  # type: ignore[method-assign]
    return estimator


class Stopped(Controller):
    """The stop rule, with a fixed bar."""

    name = "stopped"

    def __init__(self) -> None:
        self.stops = MarginStops()
        warm(self.stops.estimator(0, False))
        warm(self.stops.estimator(0, True))

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(3, 8, stop=self.stops.rule(context, 0, 0.35))

    def observe(self, context: Context, record: StepRecord) -> None:
        self.stops.observe(context, record)


def scheduled(monkeypatch: pytest.MonkeyPatch) -> PrefixController:
    """Ready to cut, where a row costs a third of a call."""
    controller = PrefixController(k=3)
    for estimator in controller.estimators.values():
        warm(estimator)
    monkeypatch.setattr("foretoken.controllers.cost_model.CostModel.round_s", lambda self, batch, rows: 2.0 + rows / 3)
    return controller


@pytest.fixture(scope="module")
def right() -> Reference:
    return reference(tables()[0], ["T=1"], lengths=(3,))


def difference(controller: Controller, right: Reference) -> float:
    """Of one request's text; in a batch requests are cut by each other's chances, so that each is served alone."""
    target, draft = tables()
    speculative = engine(target, ModelDrafter(draft, k=3), controller=controller, max_batch=1)
    return differences(speculative, right, ["T=1"], lengths=(3,))["T=1"].difference


def test_margins_keep_the_distribution(right: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []
    asked = MarginStops.rule

    def counted(self: MarginStops, *given: object) -> Callable[[Tensor | None, float], bool]:
        stop = asked(self, *given)  # type: ignore[arg-type]
        return lambda *told: cuts.append(found := stop(*told)) or found  # type: ignore[func-returns-value]

    monkeypatch.setattr(MarginStops, "rule", counted)
    assert difference(Stopped(), right) < TINY
    assert 0.1 < sum(cuts) / len(cuts) < 0.9
    counts: list[int] = []
    scheduler = prefix.prefixes

    def watched(survivals: Sequence[Sequence[float]], *more: object) -> list[int]:
        counts.extend(found := scheduler(survivals, *more))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(prefix, "prefixes", watched)
    assert difference(scheduled(monkeypatch), right) < TINY
    assert len(set(counts)) > 1


def test_cuts_that_look_ahead_are_seen(right: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a token stays only if the one drafted behind it is sure, or if it is likely itself."""

    def looks_behind(survivals: Sequence[Sequence[float]], plain: int, calls: object) -> list[int]:
        return [len(row) if row and row[-1] > 0.2 else 0 for row in survivals]

    with monkeypatch.context() as planted:
        planted.setattr(prefix, "prefixes", looks_behind)
        assert difference(scheduled(planted), right) > CAUGHT
    with monkeypatch.context() as planted:
        controller = scheduled(planted)
        budget = controller.budget

        def by_the_token(context: Context, batch_size: int) -> Budget:
            given = budget(context, batch_size)
            told = context.state[controller]

            def note(distribution: Tensor | None, probability: float) -> bool:
                told.margins.append(1.0)
                told.chances.append(0.9 if probability > 0.3 else 0.1)
                return False

            return Budget(given.max_depth, given.max_nodes, stop=note)

        planted.setattr(controller, "budget", by_the_token)
        assert difference(controller, right) > CAUGHT
