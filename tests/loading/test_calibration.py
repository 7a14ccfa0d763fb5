"""Costs that are measured when a model is loaded: what is measured, for whom, and that it is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import load
from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.loading.measured import calibration
from foretoken.loading.measured.calibration import calibrated, line_of, measured
from foretoken.methods.controllers.auto import AutoController
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.models import wrap
from foretoken.models.base import Feed, Rows
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.machine import results_file
from foretoken.models.other.table import TableModel
from toys import llama, llamas


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, on a quiet machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "is_busy", lambda: False)


def test_the_target_and_every_network_are_measured() -> None:
    target, draft = llamas()
    router = RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter()])
    costs = measured(target, router)
    assert sorted(costs.target.seconds) == [1, 2, 5, 9] and min(costs.target.seconds.values()) > 0
    assert set(costs.drafters) == {"model"} and costs.rest_s >= 0
    cost = costs.drafters["model"]
    assert cost.seconds(3) > 0 and not cost.survival  # acceptance is for requests to show
    assert target.kv_bytes == 0 and draft.kv_bytes == 0


class Refusing(NgramDrafter):
    """A drafter that ends its second round."""

    def observe(self, *args: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_measurement_keeps_no_sequence() -> None:
    target, _ = llamas()
    with pytest.raises(KeyboardInterrupt):
        calibration._rounds(target, Refusing(), ConstantController(), [1, 2, 3], 4)
    assert target.kv_bytes == 0


class Pausing(TableModel):
    """A table whose network takes 2 ms and .1 ms per node by its own account, and in one of its calls 90 ms more."""

    def __init__(self, pause: int) -> None:
        super().__init__(TableModel.random(5, seed=1).distribution, 5)
        self.pause, self.calls = pause, 0

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        before, rows = self.run_s, super().forward(feeds, taps)
        self.run_s = (
            before + 0.002 + 0.0001 * sum(len(feed.tokens) for feed in feeds) + 0.09 * (self.calls == self.pause)
        )
        self.calls += 1
        return rows


@pytest.mark.parametrize("pause", range(16))
def test_a_pause_of_the_machine_in_one_call_does_not_count(pause: int) -> None:
    target = Pausing(pause)
    drafter = NgramDrafter()
    assert measured(target, drafter).target.seconds == pytest.approx({1: 0.0021, 2: 0.0022, 5: 0.0025, 9: 0.0029})
    assert target.calls > pause


def test_a_call_and_its_steps_are_told_apart() -> None:
    assert line_of({1: 0.005, 4: 0.011}).seconds(8) == pytest.approx(0.003 + 8 * 0.002)
    assert line_of({1: 0.004}).seconds(3) == pytest.approx(0.012)
    noisy = line_of({1: 0.009, 4: 0.008})
    assert noisy.step_s == 0.0 and noisy.call_s == pytest.approx(0.008)
    steep = line_of({1: 0.001, 4: 0.020})
    assert steep.call_s == 0.0 and steep.seconds(4) == pytest.approx(0.020)


def test_what_learns_from_all_requests_is_left_alone() -> None:
    target = HuggingFaceModel(llama())
    learner = RecyclingDrafter()
    before = learner.limits
    assert measured(target, EnsembleDrafter([learner, NgramDrafter()])).drafters == {}
    assert learner.limits == before


def test_it_is_measured_once_for_a_model_a_machine_and_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas()
    calls: list[str] = []
    whole = calibration.measured

    def counted(target: Any, drafter: Any) -> RoundCosts:
        calls.append(drafter.name)
        return whole(target, drafter)

    monkeypatch.setattr(calibration, "measured", counted)
    first = calibrated(target, ModelDrafter(draft))
    assert calibrated(HuggingFaceModel(target.model), ModelDrafter(draft)) == first and len(calls) == 1
    calibrated(target, NgramDrafter())
    calibrated(HuggingFaceModel(llama(seed=9)), ModelDrafter(draft))
    assert len(calls) == 3
    for text in ("{", "[]", json.dumps({key: {"a": 1} for key in json.loads(results_file().read_text())})):
        results_file().write_text(text)
        calibrated(target, ModelDrafter(draft))
    assert len(calls) == 6


def test_another_forward_of_the_same_networks_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with PyTorch's forward, they are wrong for our library's, and the other way round."""
    answers = [RoundCosts(TargetCost({1: float(i)}), {}, 0.0) for i in range(1, 5)]
    seconds = iter(answers)
    monkeypatch.setattr(calibration, "measured", lambda target, drafter: next(seconds))
    network, small = llama(dtype=torch.float32), llama(seed=9, dtype=torch.float32)
    public, fast = wrap(network, exact="bitwise", lean=False), wrap(network)
    drafts = [wrap(small, exact="bitwise", lean=False), wrap(small)]
    pairs = [(target, ModelDrafter(draft)) for target in (public, fast) for draft in drafts]
    for _ in range(2):
        assert [calibrated(*pair) for pair in pairs] == answers
    monkeypatch.setattr(calibration, "code_version", lambda: "another")
    with pytest.raises(StopIteration):
        calibrated(*pairs[0])


def test_a_busy_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "is_busy", lambda: True)
    calibrated(HuggingFaceModel(llama()), NgramDrafter())
    assert not calibration.KEPT.stored()


class Noting(AutoController):
    """Keeps the costs that it is given."""

    start_costs: RoundCosts | None = None

    def start_from(self, costs: RoundCosts) -> None:
        """Keep them."""
        self.start_costs = costs
        super().start_from(costs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    monkeypatch.setattr("foretoken.llm.calibrated", lambda target, drafter: calls.append(drafter) or RoundCosts(V))
    yield calls


V = measured(HuggingFaceModel(llama()), NgramDrafter()).target


def test_what_is_loaded_starts_from_it_and_what_is_handed_in_is_not_run(counted: list[Any]) -> None:
    noting = Noting()
    load("builtin", controller=noting)
    assert noting.start_costs == RoundCosts(V) and len(counted) == 1
    load(llama())
    load("builtin", drafter=None)
    load("builtin", drafter="ngram", controller=ConstantController())
    assert len(counted) == 1
    assert not Controller.weighs_costs and AutoController.weighs_costs


def test_texts_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load("builtin")
    expected = load("builtin", drafter=None).generate("for item in", max_new_tokens=24).token_ids
    assert llm.generate("for item in", max_new_tokens=24).token_ids == expected

    def broken(*args: Any) -> RoundCosts:
        raise ValueError("the drafter fails")

    monkeypatch.setattr("foretoken.llm.calibrated", broken)
    assert load("builtin").generate("for item in", max_new_tokens=24).token_ids == expected


def test_what_a_controller_raises_when_it_gets_costs_is_not_swallowed(counted: list[Any]) -> None:
    """Only a failed measurement is: requests report that error."""

    class Broken(Noting):
        def start_from(self, costs: RoundCosts) -> None:
            raise KeyError("lost")

    with pytest.raises((KeyError, ValueError), match="lost"):
        load("builtin", controller=Broken())
