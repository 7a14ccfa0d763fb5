"""Limits of trees that follow a drafter's probabilities: they are raced one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.lab.tune import limits
from foretoken.lab.tune.limits import LimitRace, limits_of
from foretoken.lab.tune.race import RaceRound
from foretoken.loading.tree_files import check_target, with_limits
from foretoken.methods.drafters.eagle import EagleDrafter
from foretoken.registry import parse_spec, rows


class Arm:
    """A drafter whose speed is planted: fastest with 3 levels, 2 children and 8 nodes."""

    spec = ""

    def __init__(self, spec: str) -> None:
        options = {name: int(value) for name, value in parse_spec(spec).options.items()}
        depth, width, nodes = (options.get(name, usual) for name, usual in (("depth", 5), ("width", 4), ("nodes", 60)))
        if depth > 6:
            raise ValueError("a block has 6 places")
        self.nodes = min(nodes, 16)
        self.round_s = 1.0 + 0.1 * abs(depth - 3) + 0.2 * abs(width - 2) + 0.02 * abs(self.nodes - 8)
        self.left = 0

    def begin(self, prompt: Any) -> None:
        self.left = 16

    def advance(self) -> RaceRound | None:
        self.left -= 2
        return RaceRound(2, 1 + self.nodes, 1, 1, 0.1, self.round_s) if self.left >= 0 else None

    def cancel(self) -> None:
        self.left = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A workload that runs no model."""
    monkeypatch.setattr(limits, "EngineRacer", lambda _, spec: Arm(spec))
    return SimpleNamespace(subject=SimpleNamespace(drafter=lambda spec: spec), prompts=[[1], [2]])


MOST = {"depth": 12, "width": 64, "nodes": 64}


def test_the_fastest_limits_are_found(work: Any) -> None:
    race = LimitRace(work, "eagle3:HEAD", MOST)
    race.run()
    assert race.limits == {"depth": 3, "width": 2, "nodes": 8}
    assert race.with_limits(race.limits) == "eagle3:HEAD,depth=3,width=2,nodes=8"
    tried = {row.drafter for row in race.raced}
    assert "eagle3:HEAD,depth=6" in tried and "eagle3:HEAD,depth=8" not in tried, "the block is not as long"
    best = max(race.raced, key=lambda row: row.tokens_per_s)
    assert (best.mean_acceptance_length, best.nodes) == (2.0, 8.0)
    assert best.tokens_per_s == pytest.approx(2.0)


def test_far_slower_values_leave_after_a_prompt(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present value stays, for the comparison."""
    begun: list[str] = []

    class Counted(Arm):
        def begin(self, prompt: Any) -> None:
            begun.append(self.spec)
            super().begin(prompt)

    def counted(_: Any, spec: str) -> Arm:
        built = Counted(spec)
        built.spec = spec
        return built

    monkeypatch.setattr(limits, "EngineRacer", counted)
    race = LimitRace(work, "eagle3,width=2,nodes=8", MOST)
    race.run()
    assert race.limits == {"depth": 3}
    # one unmeasured block, then two prompts; three levels cost 1.0, four 1.1, one 1.2, and five, the present, 1.2;
    # three levels, the fastest of the first values, race against the next ones, too
    counts = {depth: begun.count(f"eagle3,width=2,nodes=8,depth={depth}") for depth in (1, 3, 4)}
    assert {row.drafter[-7:]: row.prompts for row in race.raced}["depth=1"] == 1
    assert counts == {1: 2, 3: 6, 4: 3} and begun.count("eagle3,width=2,nodes=8") == 3


def test_given_limits_are_kept(work: Any) -> None:
    race = LimitRace(work, "eagle3,width=3", MOST)
    race.run()
    assert race.limits == {"depth": 3, "nodes": 8} and {row.limit for row in race.raced} == {"depth", "nodes"}


def test_the_largest_values_are_kept_to(work: Any) -> None:
    race = LimitRace(work, "eagle3", {"depth": 2, "width": 1, "nodes": 4})
    race.run()
    assert race.limits == {"depth": 2, "width": 1, "nodes": 4}


@pytest.mark.parametrize(("spec", "most"), [("eagle3", 5), ("eagle3", 16), ("mtp", 2)])
def test_no_larger_tree_is_raced_or_chosen(work: Any, monkeypatch: pytest.MonkeyPatch, spec: str, most: int) -> None:
    """Neither the default, nor one with room for all levels; here more nodes are faster."""
    raced: list[str] = []

    def greedy(_: Any, spec: str) -> Arm:
        raced.append(spec)
        built = Arm(spec)
        built.nodes = int(parse_spec(spec).options.get("nodes", 60))
        built.round_s = 1.0 / built.nodes
        return built

    monkeypatch.setattr(limits, "EngineRacer", greedy)
    race = LimitRace(work, spec, {"depth": 6, "width": most, "nodes": most})
    race.run()
    assert {int(parse_spec(spec).options.get("nodes", 60)) for spec in raced} == {
        *(nodes for nodes in limits.NODES if nodes <= most),
        most,
    }
    assert race.limits == {"nodes": most}


def test_a_larger_tree_in_the_spec_is_refused(work: Any) -> None:
    with pytest.raises(ValueError, match="more nodes than --max-nodes 8: leave nodes=16 out"):
        limits.tune(work, "eagle3,nodes=16", 8, 6)


def test_a_fixed_number_of_nodes_has_room_for_a_path(work: Any) -> None:
    """``mtp`` has four by default: a deeper chain needs more."""
    race = LimitRace(work, "mtp", {"depth": 6, "width": 1, "nodes": 64})
    race.run()
    assert "mtp,depth=6,nodes=6" in {row.drafter for row in race.raced}


def test_nodes_that_no_draft_reaches_are_not_chosen(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be chosen by noise."""
    noise = iter(range(100))

    def noisy(_: Any, spec: str) -> Arm:
        built = Arm(spec)
        built.nodes, built.round_s = 8, 1.0 / (1 + next(noise))
        return built

    monkeypatch.setattr(limits, "EngineRacer", noisy)
    race = LimitRace(work, "eagle3,depth=3,width=2", MOST)
    race.run()
    assert race.limits == {} and len(race.raced) > 4


def test_a_drafter_that_cannot_be_built_as_it_is(work: Any) -> None:
    with pytest.raises(ValueError, match="a block has 6 places"):
        LimitRace(work, "eagle3,depth=9", MOST).run()


def test_which_drafters_have_limits() -> None:
    named = {row.name: limits_of(row.load()) for row in rows("drafter")}
    by_depth = {"eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark"}
    assert {name for name, limits in named.items() if limits} == by_depth | {"peagle", "pard", "uno"}
    assert all(named[name] == ("depth", "width", "nodes") for name in by_depth)
    assert named["peagle"] == named["pard"] == named["uno"] == ("k", "width", "nodes")


def test_a_tree_in_words_may_be_longer_than_a_file_s_name() -> None:
    options = {"tree": f"(sequoia,nodes=16,acceptance={'|'.join(['0.5'] * 100)})"}
    assert with_limits(EagleDrafter, options) == options
    check_target(options["tree"], None)  # type: ignore[arg-type]
