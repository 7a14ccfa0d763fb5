"""Races and searches in made-up worlds with a clock of their own: no test depends on a real one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest

from foretoken.core.costs import RoundCosts, TargetCost
from foretoken.core.outside import OutsideError
from foretoken.lab.tune import search
from foretoken.lab.tune.race import BLOCK, EngineRacer, RaceRound, Standing, heat, steady_s, tokens_per_s
from foretoken.lab.tune.search import LATE, Search, tune
from foretoken.lab.tune.tuned import TuneJob, Way
from foretoken.lab.workload import Subject, Workload
from foretoken.loading import load_model
from foretoken.methods.drafters.base import Drafter
from foretoken.models.huggingface import HuggingFaceModel
from toys import llama

PLAIN_S = 0.012
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 6, 4, 5, 6, 4], [7, 8, 7, 8, 7, 8], [9, 1, 9, 1], [2, 2, 3], [5, 6]]


@dataclass
class World:
    """What drafters bring: name -> (chance of a token, seconds of a draft); those that are missing do not fit."""

    drafters: dict[str, tuple[float, float]]
    now: float = 0.0
    slow_from: float = 1e9
    pause: dict[str, float] = field(default_factory=dict)
    stop_at: str = ""
    build_s: float = 0.0
    answer: int = 48
    short: tuple[tuple[int, ...], ...] = ()
    broken: dict[str, float] = field(default_factory=dict)
    fails_on: tuple[tuple[int, ...], ...] = ()
    seen: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


@dataclass
class FakeArm:
    """An arm of a made-up world."""

    world: World
    name: str
    controller: str
    depth: int = 0
    left: int = 0
    fails: bool = False
    fault: OutsideError | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def begin(self, prompt: Sequence[int]) -> None:
        self.world.seen.append((self.name, self.controller, tuple(prompt)))
        self.left = 1 if tuple(prompt) in self.world.short else self.world.answer
        self.fails = tuple(prompt) in self.world.fails_on

    def advance(self) -> RaceRound | None:
        if self.left <= 0:
            return None
        if self.name == self.world.stop_at:
            raise KeyboardInterrupt
        if self.world.now >= self.world.broken.get(self.name, inf):
            raise OutsideError(f"{self.name} raised KeyError")
        alpha, draft_s = self.world.drafters.get(self.name, (0.0, 0.0))
        accepted = 0
        while not self.fails and accepted < self.depth and self.rng.random() < alpha:
            accepted += 1
        room, written = self.left, min(1 + accepted, self.left)
        self.left -= written
        seconds = (PLAIN_S + draft_s) * (10.0 if self.world.now > self.world.slow_from else 1.0)
        seconds += self.world.pause.pop(self.name, 0.0)
        self.world.now += seconds
        self.world.steps.append(self.name)
        return RaceRound(written, 1 + self.depth, self.depth, accepted, draft_s, seconds, room)

    def cancel(self) -> None:
        self.left = 0


@dataclass(frozen=True)
class FakeJob(TuneJob):
    """A job in a made-up world."""

    world: World = field(default_factory=lambda: World({}))

    def build(self, spec: str) -> Drafter:
        self.world.now += self.world.build_s
        name = spec.split(",")[0].split(":")[0]
        if name not in self.world.drafters:
            raise ValueError(f"{name} does not fit this target")
        built = super().build(spec if name in ("ngram", "suffix") else "jacobi,m=8")
        built.spec = spec
        return built

    def racer(self, drafter: Drafter | None, controller: str, costs: RoundCosts | None = None) -> Any:
        if drafter is None:
            return FakeArm(self.world, "plain", controller)
        if controller == "auto":
            assert costs is not None and costs.drafters
        name = drafter.spec.split(",")[0].split(":")[0]
        depth = 4 if controller == "auto" else int(controller.split("=")[1])
        return FakeArm(self.world, name, controller, depth)


@pytest.fixture(autouse=True)
def curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "measured_target", lambda *args, **more: TargetCost({1: 0.010, 64: 0.011}))


TARGET = HuggingFaceModel(llama())
GOOD = {"ngram": (0.5, 0.0001), "suffix": (0.8, 0.0001), "quantized": (0.9, 0.04), "router": (0.8, 0.001)}


def job(world: World, **more: Any) -> FakeJob:
    more.setdefault("minutes", 1.0)
    return FakeJob(Workload(Subject(TARGET, "./x"), PROMPTS, 48), world=world, clock=world.clock, **more)


# -- races -----------------------------------------------------------------------------------------------------------


def test_arms_of_a_heat_come_equally_far_in_turns() -> None:
    world = World(GOOD)
    arms = [FakeArm(world, "plain", ""), FakeArm(world, "suffix", "", 4)]
    plain, drafted = heat(arms, [1, 2], world.clock, 1e9)
    assert sum(round_.new_tokens for round_ in plain) == sum(round_.new_tokens for round_ in drafted) == world.answer
    assert len(drafted) < len(plain) == world.answer
    turns = sum(step != other for step, other in zip(world.steps, world.steps[1:], strict=False))
    assert turns >= world.answer // BLOCK


def test_a_heat_ends_in_time_and_drops_its_answers() -> None:
    world = World(GOOD)
    arms = [FakeArm(world, "plain", ""), FakeArm(world, "suffix", "", 4)]
    heat(arms, [1, 2], world.clock, 0.2)
    assert 0.2 <= world.now < 0.2 + 2 * PLAIN_S and all(arm.left == 0 for arm in arms)
    written = [sum(round_.new_tokens for round_ in lap) for lap in heat(arms, [1], world.clock, 1e9, 16)]
    assert all(16 <= count < 16 + 5 for count in written)


def test_a_machine_that_slows_down_is_no_gain() -> None:
    """Ten times slower from the middle on: measured prompt by prompt, an arm would seem to gain or lose as much."""
    world = World({"useless": (0.0, 0.0)}, slow_from=0.3)
    arms = [FakeArm(world, "plain", ""), FakeArm(world, "useless", "", 4)]
    standing = Standing()
    plain, own = heat(arms, [1], world.clock, 1e9)
    standing.add(own, plain)
    assert standing.speedup == pytest.approx(1.0, abs=0.25) and standing.tokens_per_round == 1.0


def test_a_pause_is_no_cost() -> None:
    rounds = [RaceRound(1, 1, 0, 0, 0.0, 0.01)] * 20 + [RaceRound(1, 1, 0, 0, 0.0, 3.0)]
    assert max(steady_s(rounds)) == pytest.approx(0.04)
    assert tokens_per_s(rounds) == pytest.approx(21 / 0.24) and tokens_per_s([]) == 0.0


def test_texts_are_compared() -> None:
    """Texts are compared up to the end of the shorter one: a cut text is no different text."""
    standing = Standing()
    for own, plain in (((1, 2, 3), (1, 2)), ((1, 2), (1, 2, 3)), ((1, 3), (1, 2))):
        laps = [[RaceRound(len(ids), 1, 0, 0, 0.0, 0.1, tokens=ids)] for ids in (own, plain)]
        standing.add(*laps)
    assert (standing.texts, standing.differing) == (3, 1)


def test_impossible_figures_are_seen() -> None:
    """1.00 tokens a round and 1.38 times plain decoding's speed."""
    own, plain = [RaceRound(1, 1, 0, 0, 0.0, 0.010)] * 20, [RaceRound(1, 1, 0, 0, 0.0, 0.0138)] * 20
    assert not Standing(own, plain).is_possible and Standing(own, own).is_possible
    assert Standing([round_._replace(new_tokens=2) for round_ in own], own).is_possible
    assert not Standing(own[:3], plain).is_known
    noisy = Standing([round_._replace(total_s=0.0098) for round_ in own], own)
    assert noisy.is_possible and noisy.measured > 1.02 and noisy.speedup == 1.0  # never more than can be


# -- searches --------------------------------------------------------------------------------------------------------


def test_the_best_is_found_and_likely_winners_come_first() -> None:
    world = World(GOOD)
    outcome = tune(job(world, offers=("medusa:./head",)))
    first = [name for name, _, _ in world.seen if name != "plain"]
    assert list(dict.fromkeys(first))[:3] == ["ngram", "suffix", "quantized"]
    assert outcome.chosen is not None and outcome.chosen.drafter.split(",")[0] in ("suffix", "router")
    best = next(row for row in outcome.rows if row.way == outcome.chosen)
    assert best.compared and 2.0 < outcome.speedup <= best.tokens_per_round
    assert "does not fit" in outcome.skipped["medusa:./head"]
    assert all(row.speedup <= row.tokens_per_round for row in outcome.rows)
    slow = next(row for row in outcome.rows if row.way.drafter.startswith("quantized"))
    assert slow.speedup < 1.2
    assert set(outcome.profile()["costs"]["drafters"]) >= {"ngram,k=16", "suffix,share=false"}


def test_a_profile_has_the_acceptance_of_the_race() -> None:
    """The drafter is believed in the texts that it is tried on, and not in the others."""
    world = World({"suffix": (1.0, 0.0001)}, fails_on=tuple(tuple(prompt) for prompt in PROMPTS[2:]))
    outcome = tune(job(world, drafters=("suffix",)))
    assert any(row.compared for row in outcome.rows)
    (cost,) = outcome.profile()["costs"]["drafters"].values()
    assert 0.0 < cost["survival"][0] < 0.2


@pytest.mark.parametrize("minutes", [0.05, 0.1, 0.5, 2.0, 30.0])
@pytest.mark.parametrize("build_s", [0.0, 0.2])
def test_a_search_keeps_to_its_budget(minutes: float, build_s: float) -> None:
    world = World(GOOD, build_s=build_s)
    outcome = tune(job(world, minutes=minutes))
    assert world.now <= 1.1 * 60 * minutes and outcome.rows
    assert outcome.spent_s == world.now


def test_loading_counts() -> None:
    world = World(GOOD, now=50.0)
    outcome = tune(job(world, began_s=0.0))
    assert world.now <= 66.0 and outcome.before_s == 50.0 and outcome.rows


def test_an_expensive_drafter_is_cut_when_its_share_is_used_up() -> None:
    world = World({**GOOD, "ngram": (0.5, 8.0)}, answer=10**6)
    outcome = tune(job(world, drafters=("suffix", "ngram"), minutes=1.5))
    assert "share" in outcome.skipped["ngram"] and world.now < 1.1 * 90
    assert outcome.chosen is not None and outcome.chosen.drafter.startswith("suffix")


def test_half_of_the_best_go_on() -> None:
    world = World({**GOOD, "jacobi": (0.3, 0.001), "sam": (0.2, 0.001)})
    tune(job(world))
    final = [(name, controller, prompt) for name, controller, prompt in world.seen if prompt == tuple(PROMPTS[2])]
    last = [(name, controller) for name, controller, prompt in world.seen if prompt == tuple(PROMPTS[1])][-3:]
    assert len({arm[:2] for arm in final}) == 5  # plain decoding, three fixed ways, auto
    assert len(set(last)) == 3 and any(name == "plain" for name, _ in last)


def test_an_arm_that_left_the_race_is_not_chosen() -> None:
    """Its figure is of the first prompts only, and the others are harder."""
    world = World({"ngram": (0.80, 0.0001), "suffix": (0.81, 0.0001)}, fails_on=(tuple(PROMPTS[5]),))
    outcome = tune(job(world, drafters=("ngram", "suffix")))
    hard = {(name, controller) for name, controller, prompt in world.seen if prompt == tuple(PROMPTS[5])}
    raced = [row for row in outcome.rows if row.compared]
    stayed = [row for row in raced if (row.way.drafter.split(",")[0], row.way.controller) in hard]
    assert raced[: len(stayed)] == stayed and outcome.chosen in [row.way for row in stayed]
    assert max(raced, key=lambda row: row.speedup) not in stayed


def test_plain_decoding_is_chosen_where_nothing_pays() -> None:
    outcome = tune(job(World({"ngram": (0.01, 0.004), "suffix": (0.0, 0.001)})))
    assert outcome.chosen is None and outcome.speedup == 1.0 and outcome.profile()["drafter"] is None
    assert all("rarely" in row.why or row.way.controller == "auto" for row in outcome.rows)


def test_auto_is_chosen_when_it_keeps_up() -> None:
    fixed, auto = Way("ngram", "constant,k=3"), Way("ngram", "auto")

    def chosen(fixed_speed: float, auto_speed: float) -> Way | None:
        rows = [search.TunedRow(way, speed, 3.0, 99, True) for way, speed in ((fixed, fixed_speed), (auto, auto_speed))]
        return search._chosen(rows)

    assert [chosen(*pair) for pair in ((1.5, 1.47), (1.5, 1.4), (1.01, 1.0))] == [auto, fixed, None]


def test_a_network_and_a_copier_make_a_router() -> None:
    world = World(GOOD)
    outcome = tune(job(world))
    (grouped,) = {way.drafter for way in (row.way for row in outcome.rows) if way.controller == "auto"}
    assert grouped.startswith("router,drafters=(quantized,bits=4|")
    members = {"quantized,bits=4", "suffix,share=false"}
    assert members <= set(outcome.costs.drafters)


def test_a_broken_measurement_is_made_again_and_else_told() -> None:
    """Plain decoding pauses beside the drafter's first rounds, which seem to gain the impossible."""
    world = World({"ngram": (0.0, 0.0), "suffix": (0.8, 0.0001)})
    once = job(world, drafters=("ngram", "suffix"))
    outcome = tune(once)
    assert {row.way.drafter for row in outcome.rows} >= {"ngram,k=16", "suffix"}
    broken = Search(once, lambda *args: None, lambda row: None)
    own, plain = [RaceRound(1, 1, 0, 0, 0.0, 0.010)] * 20, [RaceRound(1, 1, 0, 0, 0.0, 0.0138)] * 20
    broken._heat = lambda *args: [own, plain]  # type: ignore[method-assign, assignment]
    broken._token_s = 0.01
    broken._scout("ngram", 1.0, 1e9)
    assert not broken.scouted and "contradict" in broken.skipped["ngram"] and "1.38" in broken.skipped["ngram"]


def test_a_reason_that_mentions_the_time_limit_is_not_taken_for_lack_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("it knows no --minutes")

    refused = Search(job(World(GOOD)), lambda *args: None, lambda row: None)
    refused._token_s = 0.01
    monkeypatch.setattr(refused, "_tried", refuse)
    refused._scout("ngram", 1.0, 1e9)
    assert refused.why_nothing() == "no drafter could be measured: ngram: it knows no --minutes"
    refused._scout("suffix", 1.0, 0.0)
    assert refused.skipped["suffix"] == LATE and "too little to measure anything" in refused.why_nothing()


def test_no_tree_is_looked_for_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeing which choices of a draft model are accepted cannot be cut: 32 of its rounds must fit."""
    calls: list[str] = []
    monkeypatch.setattr(search, "can_fill", lambda spec: spec.startswith("quantized"))
    monkeypatch.setattr(search, "measured_shape", lambda *args: calls.append("shape") or {})
    monkeypatch.setattr(search, "sequoia_spec", lambda *args: None)
    tune(job(World({**GOOD, "quantized": (0.95, 0.01)}), drafters=("quantized,bits=4,k=4",), minutes=0.05))
    assert calls == []
    tune(job(World({**GOOD, "quantized": (0.95, 0.01)}), drafters=("quantized,bits=4,k=4",), minutes=3.0))
    assert calls == ["shape"]


def test_a_prompt_that_is_answered_by_one_token_ends_no_search() -> None:
    """SmolLM2's answer to the first prompt of the first hour was its end of text, and the budget was blamed."""
    outcome = tune(job(World(GOOD, short=(tuple(PROMPTS[0]),))))
    assert outcome.chosen is not None and outcome.chosen.drafter == "suffix,share=false"


def test_prompts_that_are_all_answered_by_one_token_are_named() -> None:
    with pytest.raises(ValueError, match="outputs for all prompts end after a token or two") as error:
        tune(job(World(GOOD, short=tuple(map(tuple, PROMPTS)))))
    assert "--minutes" not in str(error.value) and "chat template" in str(error.value)


# -- interrupts, and too little of everything ------------------------------------------------------------------------


def test_an_interrupt_gives_the_answer_so_far() -> None:
    outcome = tune(job(World(GOOD, stop_at="quantized")))
    assert outcome.interrupted and {row.way.drafter for row in outcome.rows} == {"ngram,k=16", "suffix,share=false"}
    assert outcome.chosen is not None and outcome.chosen.drafter == "suffix,share=false"
    assert outcome.profile()["complete"] is False
    with pytest.raises(KeyboardInterrupt):
        tune(job(World(GOOD, stop_at="ngram")))


@pytest.mark.parametrize(("began_s", "words"), [(-59.9, "loading took 59.9 s"), (-500.0, "loading took 500.0 s")])
def test_a_budget_too_small_to_measure_anything(began_s: float, words: str) -> None:
    with pytest.raises(ValueError, match="too little to measure anything") as error:
        tune(job(World(GOOD), began_s=began_s))
    text = str(error.value)
    assert words in text and "give --minutes" in text and "\n" not in text
    minutes = float(text.split("give --minutes ")[1].split()[0])
    world = World(GOOD)
    assert minutes > 1 and tune(job(world, began_s=began_s, minutes=minutes)).rows


def test_a_slow_machine_gives_an_answer_from_few_tokens() -> None:
    """A share is too short for eight tokens of anything: the first drafter goes on, up to half of what is left."""
    outcome = tune(job(World(GOOD), drafters=("ngram", "suffix", "quantized,bits=4"), minutes=0.015))
    assert outcome.rows and outcome.spent_s <= 1.1 * 0.9


def test_the_answers_to_the_first_prompts_are_too_short_to_measure_on() -> None:
    """Other prompts are left, and time for them."""
    short = (tuple(PROMPTS[0]), tuple(PROMPTS[1]))
    outcome = tune(job(World(GOOD, short=short), drafters=("ngram", "suffix")))
    assert {row.way.drafter for row in outcome.rows} >= {"ngram,k=16", "suffix"} and not outcome.skipped


def test_answers_that_are_too_short_are_no_lack_of_time() -> None:
    world = World(GOOD, answer=3, short=(tuple(PROMPTS[1]),))
    work = Workload(Subject(TARGET, "./x"), PROMPTS[:2], 48)
    with pytest.raises(ValueError, match="no drafter could be measured: ngram: the outputs for all prompts together"):
        tune(replace(job(world, drafters=("ngram",)), work=work))


def test_what_there_was_no_time_for_is_told() -> None:
    outcome = tune(job(World({**GOOD, "jacobi": (0.1, 0.0)}, build_s=1.0), minutes=0.1))
    assert LATE in outcome.skipped.values() and outcome.rows


@pytest.mark.parametrize("since_s", [0.0, 5.0])
def test_a_drafter_whose_code_fails_is_left_out(since_s: float) -> None:
    """At once, or while the best race each other: the others' figures stay."""
    asked = ("ngram", "suffix", "quantized,bits=4")
    outcome = tune(job(World({**GOOD, "suffix": (0.95, 0.0001)}, broken={"suffix": since_s}), drafters=asked))
    assert outcome.failed == ["suffix"] and "suffix raised KeyError" in outcome.skipped["suffix"]
    assert outcome.chosen is not None and "suffix" not in {row.way.drafter for row in outcome.rows}
    assert any(row.compared for row in outcome.rows)
    found = tune(job(World(GOOD, broken={"suffix": since_s})))
    assert found.chosen is not None and not found.failed, "nobody has asked for it"
    with pytest.raises(ValueError, match="no drafter could be measured: suffix: suffix raised KeyError"):
        tune(job(World(GOOD, broken={"suffix": since_s}), drafters=("suffix",)))


def test_drafters_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        tune(job(World(GOOD), drafters=("medusa",)))
    with pytest.raises(ValueError, match=r"no drafter could be measured: .*ngram"):
        tune(job(World({})))
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="minutes"):
            tune(job(World(GOOD), minutes=minutes))


# -- real arms -------------------------------------------------------------------------------------------------------


def test_a_real_arm_writes_what_plain_decoding_writes_and_ends_at_the_models_end() -> None:
    target = load_model("builtin")
    prompt = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
    work = Workload(Subject(target), [], 24)
    first = EngineRacer(work, None)
    plain, drafted = heat([first, EngineRacer(work, _ngram(), "constant,k=4")], prompt, lambda: 0.0, 1.0)
    assert sum(round_.new_tokens for round_ in plain) == sum(round_.new_tokens for round_ in drafted) == 24
    assert all(round_.depth == 0 for round_ in plain) and any(round_.depth for round_ in drafted)
    assert [round_.room for round_ in plain] == list(range(24, 0, -1))
    first.begin(prompt)
    words = [first._engine.step()[0][1].token_ids[0] for _ in range(6)]
    first.cancel()
    target.eos_token_ids = frozenset({words[5]})
    ended = heat([EngineRacer(work, None)], prompt, lambda: 0.0, 1.0)[0]
    assert len(ended) == words.index(words[5]) + 1


def _ngram() -> Drafter:
    from foretoken.methods.drafters.ngram import NgramDrafter

    return NgramDrafter()
