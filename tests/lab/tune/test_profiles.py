"""Profiles: what is read back, and whether it still holds on this machine for this target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken import load
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.loading import read_profile
from foretoken.loading.measured import profile as profiles
from foretoken.loading.measured.profile import ProfileWarning, fingerprint_of, machine_of, misfits, refresh
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.models.huggingface import HuggingFaceModel
from toys import fixed_tables, llama, llamas

V = TargetCost({1: 0.010, 2: 0.011, 256: 0.265})
"""10 ms for one node and 1 ms for every further one."""
REST = 0.002


class Noting(ConstantController):
    """Keeps the costs that it is given."""

    uses_costs = True
    costs: RoundCosts | None = None

    def start_from(self, costs: RoundCosts) -> None:
        """Keep them."""
        self.costs = costs


COSTS = RoundCosts(V, {"ngram": DrafterCost(0.001, 0.002, [0.5, 0.25], 0.7, 1.0)}, REST)


def written(tmp_path: Path, **changes: Any) -> Path:
    """A profile of the toy target on this machine."""
    target = HuggingFaceModel(llama())
    content = {
        "format": 1,
        "target": {"source": "./x", "fingerprint": fingerprint_of(target)},
        "machine": machine_of(target),
        "drafter": "ngram",
        "costs": COSTS.as_dict(),
    }
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**content, **changes}))
    return file


def test_a_controller_starts_from_the_profile(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: pytest.fail("nothing is to be measured"))
    noting = Noting()
    llm = load(llama(), controller=noting, profile=written(tmp_path))
    assert noting.costs == COSTS and llm.drafter is not None and llm.drafter.spec == "ngram"
    assert not [w for w in recwarn if w.category is ProfileWarning]
    load(llama(), drafter=None, profile=written(tmp_path))


def test_a_profile_of_another_target_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = TargetCost({1: 0.001, 64: 0.002})
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: fast)
    noting = Noting()
    with pytest.warns(ProfileWarning, match=r"for another target, \./x\).*measured again"):
        load(llama(seed=5), controller=noting, profile=written(tmp_path))
    assert noting.costs is not None and noting.costs.target == fast
    cost = noting.costs.drafters["ngram"]
    assert (cost.call_s, cost.step_s, noting.costs.rest_s) == pytest.approx((1e-4, 2e-4, 2e-4))  # ten times faster
    assert cost.survival == [0.5, 0.25]
    monkeypatch.setattr(profiles, "measured_target", lambda *args, **more: pytest.fail("nobody wants the costs"))
    with pytest.warns(ProfileWarning, match="foretoken tune"):
        load(llama(seed=5), controller=ConstantController(), profile=written(tmp_path))


def test_another_machine(tmp_path: Path) -> None:
    target = HuggingFaceModel(llama())
    machine = machine_of(target)
    for key, other in (
        ("cpu", "abacus"),
        ("torch_threads", 999),
        ("dtype", "float8"),
        ("weight_storage", "int3"),
        ("gpus", ["one"]),
    ):
        profile = read_profile(written(tmp_path, machine={**machine, key: other}))
        (reason,) = misfits(profile, target)
        assert key in reason and (str(other) if key != "gpus" else "one") in reason
    load_only = {**machine, "load": 17.0, "versions": {}}
    assert misfits(read_profile(written(tmp_path, machine=load_only)), target) == []
    assert misfits({"drafter": "ngram"}, target) == []  # written by hand


def test_refreshing_measures_the_target() -> None:
    """Really measured, on a tiny target: one call per node count that fits, all positive."""
    target, _ = llamas()
    costs = refresh(COSTS, target)
    assert sorted(costs.target.seconds) == [1, 2, 4, 8, 16, 32, 64] and min(costs.target.seconds.values()) > 0
    factor = costs.target.of(1) / V.of(1)
    assert costs.drafters["ngram"].step_s == pytest.approx(0.002 * factor)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"target": "x"},
        {"target": {}},
        {"machine": 3},
        {"costs": []},
        {"costs": {"target_s": {}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": "a", "step_s": 1}}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": 1.0}}}},
        {"costs": {**COSTS.as_dict(), "drafters": {"ngram": {"call_s": 1, "step_s": 1, "survival": ["x"]}}}},
        {"controller": 5},
    ],
)
def test_profiles_of_the_wrong_shape(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"profile\.json"):
        read_profile(file)


def test_a_target_without_a_network_has_a_fingerprint() -> None:
    first, _ = fixed_tables([0.5, 0.5], [0.5, 0.5])
    other, _ = fixed_tables([0.2, 0.3, 0.5], [0.5, 0.3, 0.2])
    assert fingerprint_of(first) != fingerprint_of(other)


def test_start_from_is_nothing_to_a_plain_controller() -> None:
    assert ConstantController.start_from is Controller.start_from
    ConstantController().start_from(COSTS)


def test_a_profile_that_says_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"profile\.json has no drafter, verifier, controller or costs"):
        read_profile(file)
