"""The controllers that weigh cost against acceptance, in simulated worlds where both are known.

A world says what a target call and a draft cost and how likely a draft token is accepted; rounds are drawn from it and
shown to the controller as the engine would show them.  Seconds are the world's own: no clock is read.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from foretoken.controllers.ahead import Ahead, Own
from foretoken.controllers.auto import AutoController, age_of
from foretoken.controllers.base import Controller
from foretoken.controllers.constant import ConstantController
from foretoken.controllers.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.controllers.goodput import GoodputController
from foretoken.controllers.hazards import Hazards, at_age, coverage, survival
from foretoken.controllers.learned import Cost, Curve, LearnedCosts, bucket
from foretoken.controllers.plans import Option, best_of, error_of, plans_of, rate_of, rounds_left, rounds_of
from foretoken.controllers.trials import Batch, Mean, rounds_of_trial
from foretoken.sampling import Sampler, SamplingParams
from foretoken.types import Budget, Context, Limits, Rng, StepRecord


@dataclass(frozen=True)
class Member:
    """A drafter of a world: seconds per level, chance of every token, share of the text that it has guesses for."""

    step_s: float
    accepts: float
    answers: float = 1.0
    deepest: int = 8


@dataclass
class World:
    """What rounds cost and give."""

    members: list[Member]
    node_s: float = 0.001
    call_s: float = 0.1
    uneven_s: float = 0.0  # of a round in which requests have unlike numbers of nodes
    noise: float = 0.05
    speed: Callable[[int], float] = lambda _: 1.0
    seed: int = 0
    rounds: int = 0
    rng: random.Random = field(init=False)
    written: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def limits(self) -> Limits:
        """As a router would state them."""
        members = tuple(Limits(f"m{i}", m.deepest, m.deepest) for i, m in enumerate(self.members))
        return Limits("router", max(m.deepest for m in self.members), 64, members=members)

    def play(self, controller: Controller, contexts: list[Context], rounds: int) -> float:
        """Tokens per second over some rounds of a batch."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            self.rounds += 1
            budgets = controller.budgets(contexts)
            if isinstance(controller, AutoController):
                controller._planning_s = 0.0  # real time is no part of this world
            drafts = [self.drafted(budget, c) for budget, c in zip(budgets, contexts, strict=True)]
            nodes = sum(1 + depth for _, depth, _ in drafts)
            slow = self.speed(self.rounds) * self.rng.lognormvariate(0.0, self.noise)
            uneven = self.uneven_s if len({depth for _, depth, _ in drafts}) > 1 else 0.0
            target_s = slow * (self.call_s + self.node_s * nodes + uneven)
            asked = {member: depth for member, depth, _ in drafts if depth}
            draft_s = slow * sum(self.members[member].step_s * depth for member, depth in asked.items())
            total_s = target_s + draft_s + 0.002 * slow
            for context, (member, depth, stood) in zip(contexts, drafts, strict=True):
                record = StepRecord(
                    context.request_id, 1 + depth, depth, stood, len(contexts), draft_s, target_s, 0.0, total_s,
                    self.rounds, nodes, member if depth else -1, depth,
                )  # fmt: skip
                controller.observe(context, record)
                tokens += 1 + stood
                self.written[context.request_id] = self.written.get(context.request_id, 0) + 1 + stood
            seconds += total_s
        return tokens / seconds

    def drafted(self, budget: Budget, context: Context) -> tuple[int, int, int]:
        """Who drafts, how many tokens, how many of them stand.  A text consists of stretches of twelve tokens."""
        choice: Budget | None = budget
        stretch = self.written.get(context.request_id, 0) // 12
        while choice is not None and choice.max_depth > 0:
            index = choice.member or 0
            member = self.members[index]
            if random.Random(1000 * context.request_id + 10 * stretch + index).random() < member.answers:
                depth = min(choice.max_depth, member.deepest)
                stood = 0
                while stood < depth and self.rng.random() < member.accepts:
                    stood += 1
                return index, depth, stood
            choice = choice.otherwise
        return -1, 0, 0


def contexts(count: int, start: int = 0, written: int = 99, **options: bool) -> list[Context]:
    """Requests that sample and have ``written`` so many tokens, each one more than the last."""
    maker = Sampler(SamplingParams(temperature=1.0))
    return [Context(start + i, [0] * (1 + written + i), 1, maker, Rng(0), **options) for i in range(count)]  # type: ignore[arg-type]


class Fixed(Controller):
    """Always one member and length."""

    name = "fixed"

    def __init__(self, member: int, depth: int) -> None:
        self.member, self.depth = member, depth

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(self.depth, self.depth, member=self.member)


def best_fixed(world: Callable[[], World], batch: int, rounds: int = 600) -> float:
    """Tokens per second of the best member and length, plain decoding included."""
    members = world().members
    choices = [(0, 0), *((i, depth) for i in range(len(members)) for depth in (1, 2, 3, 4, 6, 8))]
    return max(world().play(Fixed(*choice), contexts(batch), rounds) for choice in choices)


WORLDS = {
    "good draft": [Member(0.01, 0.8)],
    "dear draft": [Member(0.2, 0.7)],
    "useless draft": [Member(0.02, 0.02)],
    "copying is best": [Member(0.03, 0.6), Member(0.0005, 0.9)],
    "copying sometimes": [Member(0.01, 0.7), Member(0.0005, 0.85, answers=0.3)],
    "two alike": [Member(0.02, 0.7), Member(0.021, 0.7)],
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_auto_finds_the_best_and_never_loses(name: str, batch: int) -> None:
    def world(seed: int = 0) -> World:
        return World(WORLDS[name], seed=seed)

    rates = []
    for seed in range(8):
        controller, played = AutoController(), world(seed)
        controller.attach(played.limits)
        for request in range(6):  # requests of 100 rounds, the first two of which are to learn from
            found = played.play(controller, contexts(batch, start=batch * request), 100)
            rates += [found] if request >= 2 else []
    rate = sum(rates) / len(rates)
    plain = world().play(Fixed(0, 0), contexts(batch), 3000)
    assert rate >= 0.97 * plain
    assert rate >= 0.95 * best_fixed(world, batch, rounds=3000)


def test_a_controller_that_only_drafts_does_lose() -> None:
    """The check above can fail."""
    world = World(WORLDS["dear draft"])
    controller = ConstantController(k=4)
    controller.attach(world.limits)
    assert world.play(controller, contexts(1), 300) < 0.9 * World(WORLDS["dear draft"]).play(
        Fixed(0, 0), contexts(1), 300
    )


@pytest.mark.parametrize("seed", range(8))
def test_auto_asks_another_member_where_the_first_has_no_guess(seed: int) -> None:
    """Whatever luck it had with that: a plan that wrote little for a while is not given up for good."""
    world = World([Member(0.01, 0.7), Member(0.0005, 0.9, answers=0.3)], seed=seed)
    controller = AutoController()
    controller.attach(world.limits)
    world.play(controller, contexts(1), 300)
    (budget,) = controller.budgets(contexts(1, start=7))
    assert budget.member == 1
    assert budget.otherwise is not None and budget.otherwise.member == 0 and budget.otherwise.otherwise is None


def test_auto_falls_back_and_comes_back() -> None:
    """A draft that stops being right, and later is right again."""
    good, bad = World([Member(0.03, 0.8)], seed=1), World([Member(0.03, 0.0)], seed=2)
    controller = AutoController()
    controller.attach(good.limits)
    request = contexts(1)
    good.play(controller, request, 200)
    bad.rounds = good.rounds
    bad.play(controller, request, 100)
    late = bad.play(controller, request, 300)
    assert late >= 0.97 * World([Member(0.03, 0.0)]).play(Fixed(0, 0), contexts(1), 300)
    good.rounds = bad.rounds
    good.play(controller, contexts(1, start=1), 300)
    again = good.play(controller, contexts(1, start=2), 600)
    assert again >= 0.9 * best_fixed(lambda: World([Member(0.03, 0.8)]), 1, rounds=3000)


def test_auto_is_not_misled_by_a_machine_that_changes_speed() -> None:
    def world() -> World:
        return World([Member(0.02, 0.75)], speed=lambda round_: 3.0 if (round_ // 80) % 2 else 1.0)

    controller, played = AutoController(), world()
    controller.attach(played.limits)
    played.play(controller, contexts(1), 160)
    assert played.play(controller, contexts(1, start=1), 640) >= 0.95 * best_fixed(world, 1, rounds=640)


@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("batch", [1, 8])
def test_goodput_finds_its_length(accepts: float, batch: int) -> None:
    def world() -> World:
        return World([Member(0.02, accepts)], node_s=0.004)

    controller, played = GoodputController(), world()
    controller.attach(played.limits.members[0])
    played.play(controller, contexts(batch), 200)
    rate = played.play(controller, contexts(batch), 400)
    assert rate >= 0.93 * best_fixed(world, batch)
    assert rate >= 0.97 * world().play(Fixed(0, 0), contexts(batch), 400)


def test_goodput_drafts_less_in_a_large_batch() -> None:
    """v(n) grows with the batch: the same acceptance pays for shorter drafts (section 8 of the specification)."""
    costs = RoundCosts(TargetCost({1: 1.0, 16: 1.05, 64: 4.0}), {"d": DrafterCost(0.0, 0.05, (0.7, 0.49, 0.34))})
    controller = GoodputController()
    controller.attach(Limits("d", 8, 8))
    controller.start_from(costs)
    lengths = [controller.best(batch) for batch in (1, 8, 64)]
    assert lengths[0] > lengths[1] >= lengths[2] == 0


# -- plans -----------------------------------------------------------------------------------------------------------

PLAIN = Option(-1, 0, 1.0, 1.0, 0.0, 1.0)
COPY = Option(1, 8, 5.0, 9.0, 0.0, 1.0, share=0.5)
MODEL = Option(0, 2, 2.0, 3.0, 0.5, 1.5)


def none(_: int) -> float:
    """A round that is all drafting and target."""
    return 0.0


def test_the_rate_of_a_plan_by_hand() -> None:
    """Half of the text five tokens a round, the other half two, a draft of .5 in every round of that half."""
    rounds = 0.5 / 5 + 0.5 / 2
    asked = (0.5 / 2) / rounds
    assert rate_of([COPY, MODEL, PLAIN], 1, lambda nodes: 1.0, none) == pytest.approx(1 / (rounds * (1 + 0.5 * asked)))
    assert rate_of([PLAIN], 4, lambda nodes: 1.0, lambda nodes: nodes / 16) == pytest.approx(1 / 1.25)


def test_how_sure_a_plan_is_by_hand() -> None:
    """Two of seven rounds are copies; tokens vary by 2 a round in 100 rounds, and by 1 in 4."""
    tokens, parts = rounds_of([COPY, MODEL, PLAIN])
    assert tokens == pytest.approx(1 / 0.35) and parts == pytest.approx([2 / 7, 5 / 7, 0.0])
    copy, model = replace(COPY, variance=4.0, seen=100.0), replace(MODEL, variance=1.0, seen=4.0)
    assert (copy.error, model.error, PLAIN.error) == pytest.approx((0.04, 0.25, 0.0))
    assert error_of([copy, model, PLAIN]) == pytest.approx((2 / 7 * 0.04**2 + 5 / 7 * 0.25**2) ** 0.5)


@pytest.mark.parametrize(("seen", "drafts"), [(4.0, False), (400.0, True)])
def test_a_small_gain_is_believed_when_it_was_seen_often(seen: float, drafts: bool) -> None:
    """A tenth more tokens a second, of which a standard error is a quarter, or a fortieth."""
    controller = AutoController()
    controller.attach(World([Member(0.02, 0.6)]).limits)
    controller.start_from(RoundCosts(TargetCost({1: 1.0, 9: 1.0})))
    model = Option(0, 2, 2.0, 3.0, 0.8, 1.8, variance=1.0, seen=seen)
    assert controller._best([model, PLAIN], controller.costs, 1) == ([model] if drafts else [])


def test_one_request_gets_the_best_of_every_stretch_and_a_batch_does_not_wait() -> None:
    """A draft for one of eight is waited for by all; the rest of the text in plain rounds is then no slower."""
    dear = replace(MODEL, draft_s=0.9, seconds=1.9)
    found = [
        max(
            plans_of([COPY, dear, PLAIN]), key=lambda plan: rate_of(plan, batch, lambda nodes: 1.0 + 0.02 * nodes, none)
        )
        for batch in (1, 8)
    ]
    assert [[option.member for option in plan] for plan in found] == [[1, 0, -1], [1, -1]]


def test_a_target_that_pads_takes_as_long_as_its_widest_request() -> None:
    """Half of the rounds have nine nodes, the others one: of two requests at least one has nine in three of four."""
    copy = replace(COPY, tokens=1.0)
    steep = lambda nodes: float(nodes)  # noqa: E731
    assert rate_of([copy, PLAIN], 2, steep, none) == pytest.approx(1 / 10)
    assert rate_of([copy, PLAIN], 2, steep, none, pads=True) == pytest.approx(1 / (0.75 * 18 + 0.25 * 2))
    assert rate_of([copy, PLAIN], 1, steep, none, pads=True) == pytest.approx(1 / 5)


def test_a_batch_that_nobody_follows_does_not_draft_for_little() -> None:
    """A gain of a twelfth is lost while the slowest request is waited for, but not where requests end at different
    times anyway, or others take the places."""
    option = Option(0, 2, 1.8, 3.0, 0.6, 1.72, variance=0.8)
    for ahead, member in ((Ahead([96] * 8), -1), (Ahead([66, 126] * 4), 0), (None, 0)):
        best = max(plans_of([option, PLAIN]), key=lambda plan: rate_of(plan, 8, lambda n: 1.0 + n / 200, none, ahead))
        assert best[0].member == member


def test_how_much_a_request_has_left_by_what_it_is_like() -> None:
    """One like all others, one that repeats more and by fewer tokens, and one of which nothing is known."""
    ahead = Ahead([60, 60, 30], [{1: Own(0.5, 1.0)}, {1: Own(0.8, 0.5)}, {}])
    usual = 0.5 / 5 + 0.5 / 2
    assert rounds_left([COPY, MODEL, PLAIN], ahead) == pytest.approx([60 * usual, 60 * (0.8 / 3 + 0.2 / 2), 30 * usual])
    assert rounds_left([PLAIN], ahead) == [60, 60, 30]


def test_a_draft_for_the_fast_ones_does_not_help_a_batch() -> None:
    """Half of the requests repeat: alike, copying pays a fifth; but the others are waited for."""
    copy = replace(COPY, tokens=1.5, nodes=2.0, share=0.5)
    alike, unlike = [{1: Own(0.5)}] * 8, [{1: Own(0.98)}, {1: Own(0.02)}] * 4
    price = lambda nodes: 1.0 + nodes / 100  # noqa: E731
    found = [
        max(plans_of([copy, PLAIN]), key=lambda plan: rate_of(plan, 8, price, none, Ahead([96] * 8, own)))[0].member
        for own in (alike, unlike)
    ]
    assert found == [1, -1]


# -- when it thinks, and when it tries -------------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "guesses"), [(1, 0), (0, 1)])
def test_a_plan_is_kept_for_a_while_but_not_for_other_requests(running: int, guesses: int) -> None:
    """A new request guesses a single token where plain decoding is the plan, if no other one would wait for it."""
    world = World([Member(0.02, 0.0)])
    controller = AutoController()
    controller.attach(world.limits)
    served = contexts(1 + running)
    world.play(controller, served, 300)
    while not keeps_its_plan(controller, served):
        world.play(controller, served, 1)
    joined = [*served[:running], *contexts(1, start=5)]
    budgets = controller.budgets(joined)
    assert [budget.max_depth for budget in budgets] == [0] * running + [guesses]
    assert keeps_its_plan(controller, joined) == (guesses == 0)


def keeps_its_plan(controller: AutoController, served: list[Context]) -> bool:
    """Whether the next round takes no planning."""
    planned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            controller, "_plan_batch", lambda *args: planned.append(type(controller)._plan_batch(controller, *args))
        )
        controller.budgets(served)
    return not planned


def test_a_plan_is_kept_when_requests_end_until_the_batch_is_half_as_large() -> None:
    """Batches of seven and of four cost nearly the same."""
    world = World([Member(0.02, 0.9)])
    controller = AutoController()
    controller.attach(world.limits)
    served = contexts(7)
    world.play(controller, served, 300)
    while not all(keeps_its_plan(controller, served) for _ in range(3)):
        world.play(controller, served, 1)
    depths = [budget.max_depth for budget in controller.budgets(served)]
    assert keeps_its_plan(controller, served[2:]) and controller.budgets(served[3:]) == controller.budgets(served)[3:]
    assert not keeps_its_plan(controller, served[4:])
    assert depths[0] > 0


@pytest.mark.parametrize(("relative_cost", "left", "tries"), [(0.0, 1000, True), (0.5, 1000, False), (0.5, 10, False)])
def test_a_model_that_is_far_behind_is_not_tried_at_once(relative_cost: float, left: int, tries: bool) -> None:
    controller = AutoController()
    member = Limits("m0", 4, 4, relative_cost=relative_cost)
    controller.attach(Limits("router", 4, 64, members=(member,)))
    (request,) = contexts(1)
    request.max_length = 1 + 200 + left
    controller.budgets([request])
    request.tokens.extend([0] * 200)  # written since it was last asked
    batch = controller.batches[1]
    for trial in batch.trials.values():
        trial.due = batch.round + (2 if trial is batch.trials[0] else 10_000)
    budgets = [controller.budgets([request])[0].max_depth for _ in range(3)]
    tried = controller._tried is not None
    assert tried == tries and len(budgets) == 3
    batch.round += 300  # no better occasion came
    controller.budgets([request])
    assert (controller._tried is not None) == (left > 200)


@pytest.mark.parametrize(("step_s", "least", "most"), [(0.03, 12, 16), (0.3, 5, 8)])
def test_a_drafter_that_may_pay_is_tried_for_longer(step_s: float, least: int, most: int) -> None:
    """A third of the tokens stand: drafting one gains a third of .1 seconds, and takes .03 or .3."""
    world = World([Member(step_s, 0.3)])
    controller = AutoController(k=1)
    controller.attach(world.limits)
    drafted = 0
    request = contexts(1)
    for _ in range(30):
        world.play(controller, request, 1)
        drafted += controller._tried == 0
    assert least <= drafted <= most


@pytest.mark.parametrize(
    ("reached", "free", "rounds"),
    [(0.3, False, 1), (0.84, False, 1), (0.91, False, 3), (0.99, False, 4), (1.0, False, 4), (0.99, True, 2)],
)
def test_the_closer_a_choice_is_the_longer_it_is_tried(reached: float, free: bool, rounds: int) -> None:
    assert rounds_of_trial(reached, free) == rounds


def test_a_price_that_was_too_high_at_first_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft gains a tenth, but its first rounds are a fourth dearer.  With trials of two rounds it is not seen."""

    def share_of_drafts(seed: int) -> float:
        dear, usual = World([Member(0.075, 0.64, deepest=1)], seed=seed), World([Member(0.045, 0.64, deepest=1)])
        controller = AutoController()
        controller.attach(usual.limits)
        dear.play(controller, contexts(2), 30)
        usual.rounds = dear.rounds
        for request in range(1, 5):
            usual.play(controller, contexts(2, start=2 * request), 100)
        found = [controller.budgets(contexts(2, start=20 + 2 * i))[0].max_depth > 0 for i in range(4)]
        return sum(found) / len(found)

    found = [share_of_drafts(seed) for seed in range(32)]
    monkeypatch.setattr("foretoken.controllers.trials.rounds_of_trial", lambda reached, free: 1)
    short = [share_of_drafts(seed) for seed in range(32)]
    assert sum(found) > sum(short)


def test_what_plans_take_over_what_is_expected_by_hand() -> None:
    """Four rounds' worth of doubt, pauses count half as much again, and nothing is cheaper than its parts."""
    batch = Batch({}, plan=[COPY], expected_s=0.1, expected_tokens=10.0)
    batch.took(0.15, 10)
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.0 + 0.5 / 5)
    batch.took(9.0, 10)
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.1 + 0.4 / 6)
    assert batch.overrun([MODEL, PLAIN]) == batch.overrun([COPY, MODEL, PLAIN]) == batch.overrun([PLAIN]) == 1.0
    for _ in range(200):
        batch.took(0.08, 10)
    assert batch.overrun([COPY, PLAIN]) == 1.0
    batch.plan = []
    batch.took(0.15, 10)
    assert set(batch.overruns) == {(1,)}


def test_what_takes_longer_because_it_writes_more_is_no_overrun_by_hand() -> None:
    """Of what rounds write twenty rounds' worth of doubt."""
    batch = Batch({}, plan=[COPY], expected_s=0.1, expected_tokens=10.0)
    batch.took(0.12, 20)
    assert batch.overrun([COPY, PLAIN]) == 1.0
    assert batch.overruns[1,].value / batch.gains[1,].value == pytest.approx((1.0 + 0.2 / 5) / (1.0 + 1.0 / 21))
    for _ in range(400):
        batch.took(0.12, 11)
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.2 / 1.1, rel=1e-3)


def test_what_a_plan_took_is_forgotten_and_bad_luck_is_not_held_against_it_by_hand() -> None:
    """128 rounds of other plans later a third of it is left; having written half of what was expected is no overrun."""
    batch = Batch({}, plan=[COPY], expected_s=0.1, expected_tokens=10.0, round=5)
    for _ in range(400):
        batch.took(0.14, 5)
    assert batch.gains[1,].value == pytest.approx(0.5, abs=1e-3)
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.4, abs=1e-3)
    batch.round += 128
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.0 + 0.4 / math.e, abs=1e-3)
    batch.took(0.14, 5)
    assert batch.overrun([COPY, PLAIN]) == pytest.approx(1.4, abs=1e-3)


@pytest.mark.parametrize(("overrun", "drafts"), [(1.0, True), (3.0, False)])
def test_a_plan_that_takes_longer_than_its_parts_is_given_up(overrun: float, drafts: bool) -> None:
    world = World([Member(0.005, 0.8, answers=0.7)])
    controller = AutoController()
    controller.attach(world.limits)
    world.play(controller, contexts(2), 60)
    (batch,) = controller.batches.values()
    assert 0.9 < batch.overruns[0,].value < 1.1 and batch.overruns[0,].seen > 10
    batch.overruns[0,].value = overrun
    assert (controller.budgets(contexts(2, start=7))[0].max_depth > 0) == drafts


@pytest.mark.parametrize(("planning_s", "drafts"), [(0.0, True), (0.2, False)])
def test_what_planning_drafts_takes_is_part_of_what_they_cost(planning_s: float, drafts: bool) -> None:
    """Rounds with drafts, of .1 seconds, are planned and learned from for longer than those without."""
    world = World([Member(0.01, 0.7)])
    controller = AutoController()
    controller.attach(world.limits)
    world.play(controller, contexts(2), 60)
    for mean, value in zip(controller._thought, (0.0, planning_s), strict=True):
        mean.value, mean.seen = value, 20.0
    assert (controller.budgets(contexts(2, start=7))[0].max_depth > 0) == drafts


def test_a_mean_takes_a_pause_for_ten_usual_ones() -> None:
    mean = Mean()
    for found in (1.0, 2.0, 3.0, 2.0, 2.0):
        mean.count(found)
    assert (mean.value, mean.seen) == (2.0, 5.0)
    mean.count(1000.0)
    assert mean.value == pytest.approx(2.0 + 18.0 / 6)


def test_rounds_are_learned_from_when_something_depends_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a plan is kept nothing does; in the end nothing was left out."""
    world = World([Member(0.01, 0.7)])
    controller = AutoController()
    controller.attach(world.limits)
    learned, most, (request,) = [], 0, contexts(1, written=0)
    learn = controller._learn_round
    monkeypatch.setattr(controller, "_learn_round", lambda seen: (learned.append(seen), learn(seen)))
    for _ in range(200):
        world.play(controller, [request], 1)
        request.tokens.append(0)
        most = max(most, len(controller._pending))
    assert 8 <= most <= 16 and controller.watches
    controller.finish(request)
    assert len(learned) == 200 and not controller._pending
    assert [seen.seen[0][2] for seen in learned] == list(range(1, 201))  # lengths as they were


def test_a_text_that_a_model_has_not_read_makes_its_drafts_dearer() -> None:
    """Where it has few tokens left to pay for."""
    learned = LearnedCosts(["model"])
    for round_ in range(12):
        learned.observe(StepRecord(0, 2, 1, 0, 1, 0.2, 1.0, 0.0, 1.3, round_, 2), 0, 1, 1)
    assert learned.reading_s(0, 10) == pytest.approx(10 * 0.03 * 0.2, rel=0.05)
    for round_ in range(40):
        learned.observe_reading(StepRecord(0, 2, 1, 0, 1, 0.9, 1.0, 0.0, 1.9, round_, 2), 0, 1, 1, 50, 0.2)
    assert learned.reading_s(0, 10) == pytest.approx(10 * 0.5 / 50, rel=0.05)
    assert LearnedCosts(["model"]).reading_s(0, 10) == 0.0
    world = World([Member(0.02, 0.6)])
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("m0", 8, 8, relative_cost=0.1),)))
    (old,) = contexts(1)
    old.max_length = 10_000
    world.play(controller, [old], 100)
    drafts = []
    for left in (100_000, 20):
        (request,) = contexts(1, start=left)
        request.max_length = 1 + 4000 + left
        controller.budgets([request])
        request.tokens.extend([0] * 4000)
        controller.batches[1].until = 0
        drafts.append(controller.budgets([request])[0].max_depth > 0)
    assert drafts == [True, False]


def test_lengths_are_weighed_until_they_fall() -> None:
    """A dip of two lengths is overlooked, a third one ends it."""
    looked: list[int] = []

    def options() -> Iterator[Option]:
        for depth in range(1, 10):
            looked.append(depth)
            yield replace(MODEL, depth=depth)

    worths = dict(enumerate([1.0, 3.0, 2.0, 2.5, 4.0, 3.9, 3.9, 3.9, 9.0], start=1))
    assert best_of(options(), lambda option: worths[option.depth]).depth == 5
    assert looked == list(range(1, 9))


def test_a_model_is_tried_at_two_lengths_and_at_none_that_it_cannot_draft() -> None:
    for deepest, long in ((8, 4), (2, 2)):
        controller = AutoController()
        controller.attach(Limits("router", deepest, 64, members=(Limits("m0", deepest, deepest, relative_cost=0.1),)))
        depths = []
        request = contexts(1)
        while len(depths) < 10:
            (budget,) = controller.budgets(request)
            if controller._tried == 0:
                depths.append(budget.max_depth)
            stood = min(budget.max_depth, 1)
            seconds = 0.1 + 0.01 * budget.max_depth
            controller.observe(
                request[0],
                StepRecord(0, 1 + budget.max_depth, budget.max_depth, stood, 1, seconds - 0.1, 0.1, 0.0, seconds, 0,
                           1 + budget.max_depth, 0 if budget.max_depth else -1, budget.max_depth),
            )  # fmt: skip
            request[0].tokens.extend([0] * (1 + stood))
        assert set(depths[:5]) == {1} and set(depths[6:]) == {long}


# -- what requests know of each other --------------------------------------------------------------------------------


def test_a_request_learns_from_others() -> None:
    world = World([Member(0.02, 0.0)])
    controller = AutoController()
    controller.attach(world.limits)
    before = controller.budgets(contexts(1))[0]
    world.play(controller, contexts(1, start=3), 400)
    fresh = contexts(1, start=9)
    controller.budgets(fresh)
    assert before.max_depth > 0 and controller.budgets(fresh)[0].max_depth == 0


def test_a_new_request_drafts_once_it_says_something_of_itself() -> None:
    """Whatever is known of others: it may be unlike them.  Its first tokens are unlike the rest, and say nothing."""
    world = World([Member(0.02, 0.0)])
    controller = AutoController()
    controller.attach(world.limits)
    world.play(controller, contexts(1), 400)
    (request,) = contexts(1, start=9, written=0)
    found = []
    for _ in range(7):
        found.append(controller.budgets([request])[0].max_depth)
        request.tokens.append(0)
    assert found == [0, 0, 0, 0, 1, 0, 0]


def test_auto_starts_from_a_profile() -> None:
    costs = RoundCosts(
        TargetCost({1: 1.0, 9: 1.1}),
        {"a": DrafterCost(0.0, 0.5, (0.5, 0.2)), "b": DrafterCost(0.0, 0.01, (0.9, 0.8, 0.7, 0.6))},
    )
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("a", 4, 4), Limits("b", 8, 8))))
    controller.start_from(costs)
    (budget,) = controller.budgets(contexts(1))
    following = budget if controller._tried is None else budget.otherwise  # behind what is on trial
    assert following is not None and following.member == 1 and following.max_depth == 8


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="auto needs k >= 1"):
        AutoController(k=0)
    with pytest.raises(ValueError, match="goodput needs k >= 1"):
        GoodputController(k=0)
    with pytest.raises(ValueError, match="goodput needs memory >= 1"):
        GoodputController(memory=0.5)


# -- what is learned -------------------------------------------------------------------------------------------------


def test_a_curve_finds_a_line() -> None:
    curve, costs = Curve(growing=0.1), {1: 1.1, 5: 1.5, 9: 1.9}
    learned = LearnedCosts(["d"])
    for round_ in range(60):
        nodes = (1, 5, 9)[round_ % 3]
        learned.observe(StepRecord(0, nodes, 0, 0, 1, 0.0, costs[nodes], 0.0, costs[nodes], round_, nodes), None, 0, 0)
    curve = learned.target
    assert [curve.at(size) / curve.at(1) for size in (5, 9, 17)] == pytest.approx(
        [1.5 / 1.1, 1.9 / 1.1, 2.7 / 1.1], rel=0.06
    )


def test_what_is_left_of_a_round_grows_with_requests_and_nodes() -> None:
    """.1 a request and .01 a node; of batches that were not seen a part is that of the nearest that was, as of two more
    requests."""
    learned = LearnedCosts(["d"])
    for round_ in range(40):
        batch, nodes = (2, 8)[round_ % 2], (8, 16, 24)[round_ % 3]
        rest = 0.1 * batch + 0.01 * nodes
        learned.observe(StepRecord(0, 1, 0, 0, batch, 0.0, 1.0, 0.0, 1.0 + rest, round_, nodes), None, 0, 0)
    found = [learned.rest_s(batch, nodes) / learned.speed.value for batch, nodes in ((2, 8), (2, 24), (8, 8), (8, 24))]
    assert found == pytest.approx([0.28, 0.44, 0.88, 1.04], rel=0.1)
    assert learned.rest_s(16, 32) == pytest.approx(18 / 10 * learned.rest_s(8, 16))


def test_one_slow_round_is_no_price() -> None:
    learned = LearnedCosts(["model"])
    for round_ in range(9):
        draft_s = 0.6 if round_ == 8 else 0.2
        learned.observe(StepRecord(0, 2, 1, 0, 1, draft_s, 1.0, 0.0, 1.0 + draft_s, round_, 2, 0, 1), 0, 1, 1)
    assert learned.draft_s(0, 1, 1) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("pauses", [0.0, 0.03, 0.1])
def test_pauses_do_not_make_what_is_not_in_use_dearer(pauses: float) -> None:
    """A pause makes a round longer, nothing makes one as much shorter: were speed and costs to learn of it unlike,
    speed would rise and the cost of what is in use fall round by round, and all other costs would look ever higher."""
    found = []
    for seed in range(8):
        rng, learned = random.Random(seed), LearnedCosts(["model"])
        for round_ in range(500):
            nodes = 16 if round_ < 100 and round_ // 6 % 2 else 8
            seconds = (1.0 + nodes / 40) * rng.lognormvariate(0.0, 0.05)
            seconds *= 1.0 + (rng.expovariate(1.0) if rng.random() < pauses else 0.0)
            learned.observe(StepRecord(0, 1, 0, 0, 8, 0.0, seconds, 0.0, seconds, round_, nodes), None, 0, 0)
        found.append(learned.target_s(16, 8) / learned.target_s(8, 8))
    assert sum(found) / len(found) == pytest.approx(1.4 / 1.2, rel=0.07)


@pytest.mark.parametrize("interrupted", [0.0, 0.05, 0.15])
def test_what_rounds_take_over_their_price_is_known(interrupted: float) -> None:
    """Prices lie below the mean where some rounds are interrupted, and that is known of plans."""
    prices, means = [], []
    for seed in range(8):
        rng, learned = random.Random(seed), LearnedCosts(["model"])
        for round_ in range(400):
            seconds = rng.lognormvariate(0.0, 0.03) * (1.25 if rng.random() < interrupted else 1.0)
            learned.observe(StepRecord(0, 1, 0, 0, 8, 0.0, seconds, 0.0, seconds, round_, 8), None, 0, 0)
        prices.append(learned.speed.value * learned.target_s(8, 8))
        means.append(prices[-1] * learned.over)
    assert sum(prices) / len(prices) == pytest.approx(0.99, abs=0.02)
    assert sum(means) / len(means) == pytest.approx(1.0 + 0.25 * interrupted, abs=0.02)


@pytest.mark.parametrize(("surprises", "least", "most"), [(8, 1.0, 1.3), (3, 1.5, 9.0)])
def test_bursts_are_not_taken_for_another_speed(
    monkeypatch: pytest.MonkeyPatch, surprises: int, least: float, most: float
) -> None:
    """A busy machine: rounds of many sizes take 1.14 times as long on average, in bursts of a few rounds.  If three
    surprises in a row were another speed, the common factor would run away."""
    monkeypatch.setattr("foretoken.controllers.learned.CHANGED", surprises)
    found = []
    for seed in range(8):
        rng, learned, burst = random.Random(seed), LearnedCosts(["model"]), 0.0
        for round_ in range(1500):
            burst = 0.8 * burst + (rng.expovariate(2.8) if round_ > 40 and rng.random() < 0.07 else 0.0)
            nodes = rng.choice((2, 3, 5, 9))
            seconds = (1.0 + 0.05 * nodes) * rng.lognormvariate(burst, 0.1)
            learned.observe(
                StepRecord(0, nodes, nodes - 1, 0, 1, 0.0, seconds, 0.0, seconds, round_, nodes), None, 0, 0
            )
        found.append(learned.speed.value)
    assert least < sum(found) / len(found) < most


def test_a_machine_that_got_slower_made_nothing_dearer() -> None:
    learned = LearnedCosts(["model"])
    for round_ in range(160):
        nodes = 16 if round_ < 60 and round_ // 6 % 2 else 8
        seconds = (1.0 + nodes / 40) * (2.0 if round_ >= 80 else 1.0)
        learned.observe(StepRecord(0, 1, 0, 0, 8, 0.0, seconds, 0.0, seconds, round_, nodes), None, 0, 0)
    assert learned.speed.value * learned.target_s(8, 8) == pytest.approx(2.4, rel=0.03)
    assert learned.target_s(16, 8) / learned.target_s(8, 8) == pytest.approx(1.4 / 1.2, rel=0.06)


def test_what_was_not_seen_for_long_is_worth_a_look() -> None:
    """The price of a size goes back to what the line through the others says."""
    curve = Curve(growing=0.1)
    for size in (1, 5, 9):
        curve.put(size, Cost(1.0 + 0.1 * size + (size == 9), 20.0))
    assert curve.at(9) > 2.5
    for _ in range(300):
        for size in (1, 5):
            curve.move(size, 1.0)
    assert curve.at(9) == pytest.approx(1.9, rel=0.03)


@pytest.mark.parametrize(("rounds", "times"), [(400, 1.2), (800, 1.4)])
def test_lengths_that_were_dear_once_are_found_out(rounds: int, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens pay most, but while lengths were first tried every node took ten times as long."""

    def length(seed: int) -> int:
        drafter = [Member(0.0005, 0.8)]
        busy, world = (World(drafter, call_s=0.1, node_s=node_s, seed=seed) for node_s in (0.006, 0.0006))
        controller = AutoController()
        controller.attach(world.limits)
        busy.play(controller, contexts(8), 24)
        world.rounds = busy.rounds
        world.play(controller, contexts(8, start=8), rounds)
        return controller.batches[(8).bit_length()].plan[0].depth

    found = [length(seed) for seed in range(24)]
    monkeypatch.setattr("foretoken.controllers.learned.AGED", math.inf)
    stuck = [length(seed) for seed in range(24)]
    assert sum(found) > times * sum(stuck)


@pytest.mark.parametrize("cold", [1, 3])
def test_the_first_calls_of_a_size_are_no_price(cold: int) -> None:
    """Kernels are made for it: neither its price nor the machine's speed is told by them, nor other sizes' prices."""
    learned = LearnedCosts(["model"])
    for round_ in range(30):
        nodes = 9 if round_ % 4 == 3 else 1
        seconds = 10.0 if nodes == 9 and round_ < 4 * cold else 1.0 + 0.02 * nodes
        learned.observe(StepRecord(0, nodes, 0, 0, 1, 0.0, seconds, 0.0, seconds, round_, nodes), None, 0, 0)
        if nodes == 9 and round_ == 4 * cold + 3:
            assert learned.target_s(9) / learned.target_s(1) < 2.0
    assert learned.target_s(9) / learned.target_s(1) == pytest.approx(1.18 / 1.02, rel=0.08)
    assert learned.speed.value * learned.target_s(1) == pytest.approx(1.02, rel=0.05)


@pytest.mark.parametrize(
    ("draft_s", "tried", "low", "high"), [(0.2, True, 0.99, 1.2), (0.2, False, 1.5, 2.5), (1.2, True, 2.0, 4.0)]
)
def test_a_price_that_was_seen_while_caches_were_cold_is_given_up_in_a_trial(
    draft_s: float, tried: bool, low: float, high: float
) -> None:
    """Drafts were seen ten times to cost .5 and are tried for three rounds long after: nothing takes less than it
    costs, but a pause may take more.  The machine is as fast as it was."""
    learned = LearnedCosts(["d"])

    def see(round_: int, drafts: float, tried: bool) -> None:
        member, depth = (0, 1) if drafts else (None, 0)
        nodes = 2 if drafts else 1
        learned.observe(
            StepRecord(0, nodes, depth, 0, 1, drafts, 1.0, 0.0, 1.1 + drafts, round_, nodes, 0, depth),
            member, depth, depth, tried=tried,
        )  # fmt: skip

    for round_ in range(10):
        see(round_, 0.5, False)
    for round_ in range(10, 60):
        see(round_, 0.0, False)
    speed = learned.speed.value
    for round_ in range(60, 63):
        see(round_, draft_s, tried)
    draft = learned.draft_s(0, 1, 1)
    assert draft is not None and low * 0.2 < learned.speed.value * draft < high * 0.2
    if tried:
        assert learned.speed.value == speed


def test_what_a_profile_says_is_not_given_up_for_one_short_call() -> None:
    """Its costs were measured many times: only of what was seen a few times the lowest sighting counts."""
    start = RoundCosts(TargetCost({1: 1.0, 8: 2.0}), {"d": DrafterCost(0.2, 0.1, (0.5,))}, rest_s=0.1)
    learned = LearnedCosts(["d"], start)
    before = learned.target_s(8) / learned.target_s(1)
    learned.observe(StepRecord(0, 8, 0, 0, 1, 0.0, 1.0, 0.0, 1.1, 0, 8), None, 0, 0)
    assert learned.target_s(8) / learned.target_s(1) > 0.85 * before


def test_old_tries_count_less_by_hand() -> None:
    hazards = Hazards()
    hazards.add(2, 1)
    hazards.write(2, 0)
    hazards.fade(0.5)
    hazards.add(1, 1)
    hazards.write(0, 1)
    assert hazards.in_rounds() == ([1.5, 0.5], [1.5, 0.0], 1.0, 1.0)
    assert survival(2, hazards, Hazards(), weight=0.0) == pytest.approx([1.0, 0.0])
    for _ in range(60):
        hazards.fade(0.5)
        hazards.add(1, 1)
    assert hazards.unit < 1e7 and hazards.in_rounds()[0][0] == pytest.approx(2.0)


def test_the_share_of_guesses_at_an_age_by_hand() -> None:
    """Sixteen tokens' worth of what is usual beside 48 tokens that tell of this age."""
    general, alike = Hazards([10.0], [5.0], 74.0, 25.0), Hazards(covered=12.0, bare=36.0)
    found = at_age(general, alike)
    assert found.tries == general.tries and found.hits == general.hits
    assert coverage(Hazards(), found) == pytest.approx((12.0 + 16.0 * 0.75) / 64.0)
    assert coverage(Hazards(), at_age(general, Hazards())) == pytest.approx(coverage(Hazards(), general))
    assert [age_of(tokens) for tokens in (-1, 0, 1, 3, 4, 63, 64)] == [0, 0, 1, 2, 3, 6, 7]


def test_guesses_that_come_late_are_not_expected_at_once() -> None:
    """A drafter that has a guess for nothing of the first 16 tokens and for everything behind them."""
    limits = Limits("router", 4, 64, members=(Limits("late", 4, 4), Limits("never", 4, 4)))
    controller = AutoController()
    controller.attach(limits)
    for number in range(12):
        (request,) = contexts(1, start=number, written=0)
        while len(request.tokens) < 64:
            budget: Budget | None = controller.budgets([request])[0]
            controller._planning_s = 0.0
            while budget is not None and (budget.member != 0 or len(request.tokens) <= 16):
                budget = budget.otherwise
            depth = budget.max_depth if budget is not None else 0
            request.tokens.extend([0] * (1 + depth))
            record = StepRecord(
                number, 1 + depth, depth, depth, 1, 0.01, 1.0, 0.0, 1.02, len(request.tokens), 1 + depth,
                0 if depth else -1, depth,
            )  # fmt: skip
            controller.observe(request, record)
        controller.finish(request)
    (new,), (old,) = contexts(1, start=90, written=0), contexts(1, start=91, written=0)
    old.tokens.extend([0] * 40)
    young, late = (coverage(Hazards(), controller._general([request])[0]) for request in (new, old))
    assert young < 0.5 < 0.9 < late


def test_drafts_that_the_end_of_a_request_cut_short_are_not_counted_as_usual() -> None:
    world = World([Member(0.02, 0.9)])
    controller = AutoController()
    controller.attach(world.limits)
    (request,) = contexts(1)
    world.play(controller, [request], 40)
    controller.finish(request)
    before = {depth: mean.value for depth, mean in controller.nodes[0].items()}
    (ending,) = contexts(1, start=1)
    controller.budgets([ending])
    state = controller.state(ending)
    state.plan = [replace(controller.batches[1].ranked[0], member=0, depth=8)]
    ending.max_length = len(ending.tokens) + 2
    ending.tokens.extend([0] * 2)
    controller.observe(ending, StepRecord(1, 2, 1, 1, 1, 0.02, 0.1, 0.0, 0.13, 99, 2, 0, 1))
    controller.finish(ending)
    assert {depth: mean.value for depth, mean in controller.nodes[0].items()} == before


def test_what_planning_takes_is_no_part_of_a_draft() -> None:
    controller = AutoController(k=1)
    controller.attach(World([Member(0.02, 0.6)]).limits)
    (request,) = contexts(1)
    for round_ in range(8):
        (budget,) = controller.budgets([request])
        controller._planning_s = 0.1
        draft_s = 0.3 if budget.max_depth else 0.1
        record = StepRecord(
            request.request_id, 1 + budget.max_depth, budget.max_depth, budget.max_depth, 1,
            draft_s, 1.0, 0.0, 1.05 + draft_s, round_, 1 + budget.max_depth, 0 if budget.max_depth else -1,
            budget.max_depth,
        )  # fmt: skip
        request.tokens.extend([0] * (1 + budget.max_depth))
        controller.observe(request, record)
    controller.finish(request)
    costs = controller.costs
    assert costs.draft_s(0, 1, 1) / costs.target_s(2) == pytest.approx(0.2, rel=0.1)
    assert costs.rest_s(1, 2) / costs.target_s(2) == pytest.approx(0.05, rel=0.1)


def test_drafts_without_a_model_cost_the_same_whatever_their_length() -> None:
    learned = LearnedCosts(["model", "ngram"], free={1})
    for round_ in range(6):
        for member in (0, 1):
            record = StepRecord(0, 3, 2, 0, 1, 0.2, 1.0, 0.0, 1.2, 2 * round_ + member, 3, member, 2)
            learned.observe(record, member, 2, 1)
    model, ngram = ([learned.draft_s(member, depth, 1) for depth in (2, 8)] for member in (0, 1))
    assert model[1] > 3 * model[0] and ngram[1] == pytest.approx(ngram[0])


def test_a_curve_never_falls() -> None:
    curve = Curve(growing=0.1)
    curve.put(1, replace_cost(2.0))
    curve.put(8, replace_cost(1.0))
    assert curve.at(40) >= curve.at(20) > 0


def replace_cost(value: float) -> object:
    from foretoken.controllers.learned import Cost

    return Cost(value, 10.0)


def test_hazards_by_hand() -> None:
    """Drafts of three: one stood whole, one fell at the second place, one had no guess."""
    hazards = Hazards()
    for depth, stood in ((3, 3), (3, 1), (0, 0)):
        hazards.add(depth, stood)
    assert hazards.tries == [2, 2, 1] and hazards.hits == [2, 1, 1]
    hazards.write(4, 0)
    hazards.write(0, 2)
    assert coverage(hazards, Hazards(), weight=0.0) == pytest.approx(4 / 6)
    assert survival(3, hazards, Hazards(), weight=0.0) == pytest.approx([1.0, 0.5, 0.5])
    first = (2 + 2 * 0.6) / (2 + 2)
    second = (1 + 4 * first) / (2 + 4)
    assert survival(2, Hazards(), hazards) == pytest.approx([first, first * second])


def test_calls_for_many_requests_have_a_price_of_their_own() -> None:
    """Eight nodes of eight requests cost more than eight of one, as eight texts are read; at first nobody knows."""
    costs = LearnedCosts(["d"])
    for round_ in range(60):
        batch, target_s = ((1, 1.0), (8, 2.0))[round_ % 2 if round_ < 50 else 1]
        record = StepRecord(0, 8 // batch, 0, 0, batch, 0.0, target_s, 0.0, target_s + 0.1, round_, 8)
        costs.observe(record, None, 0, 0)
        if round_ == 4:  # the first two rounds are skipped, and the first call of each kind is cold
            assert costs.target_s(8, 1) == costs.target_s(8, 8) == costs.target_s(8)
    assert costs.target_s(8, 8) / costs.target_s(8, 1) == pytest.approx(2.0, rel=0.1)
    assert costs.target_s(8, 3) == costs.target_s(8)


def test_drafts_for_batches_that_were_not_seen_cost_as_much_more_as_plain_calls_do() -> None:
    """A first sighting, which finds cold caches, is no price while another size has one."""
    costs = LearnedCosts(["d"])
    for nodes, seconds in ((1, 1.0), (8, 2.0)):
        costs.target.put(nodes, Cost(seconds, 20.0))
    assert costs.draft_s(0, 1, 8) is None
    costs.drafts[0, 8] = Curve(0.7)
    costs.drafts[0, 8].put(1, Cost(0.5, 20.0))
    scale = costs.target_s(1) / costs.target_s(8)
    assert costs.draft_s(0, 1, 8) == pytest.approx(0.5) and costs.draft_s(0, 1, 1) == pytest.approx(0.5 * scale)
    costs.drafts[0, 1] = Curve(0.7)
    costs.drafts[0, 1].put(1, Cost(9.0, 0.1))
    assert costs.draft_s(0, 1, 1) == pytest.approx(0.5 * scale) and scale < 0.7
    costs.drafts[0, 1].put(1, Cost(0.4, 1.1))
    assert costs.draft_s(0, 1, 1) == pytest.approx(0.4)


@pytest.mark.parametrize(("size", "found"), [(1, 1), (16, 16), (17, 18), (31, 32), (33, 36), (100, 104)])
def test_buckets(size: int, found: int) -> None:
    assert bucket(size) == found


def test_costs_survive_json() -> None:
    costs = RoundCosts(TargetCost({1: 0.5, 4: 0.6}), {"d": DrafterCost(0.1, 0.2, (0.5,), 0.9)}, 0.01)
    assert RoundCosts.from_dict(costs.as_dict()) == replace(costs, drafters={"d": DrafterCost(0.1, 0.2, [0.5], 0.9)})
    with pytest.raises(ValueError, match="no measured costs"):
        RoundCosts.from_dict({"target_s": {}})


def test_costs_between_and_beyond_what_was_measured() -> None:
    target = TargetCost({1: 1.0, 3: 2.0, 5: 2.0})
    assert [target.of(n) for n in (1, 2, 3, 4, 9)] == [1.0, 1.5, 2.0, 2.0, 2.0]
    drafter = DrafterCost(0.1, 0.2, (0.8, 0.4))
    assert drafter.expected_tokens(2) == pytest.approx(2.2)
    assert drafter.expected_tokens(4) == pytest.approx(2.2 + 0.2 + 0.1)
    assert (drafter.seconds(0), drafter.seconds(3)) == (0.0, pytest.approx(0.7))
    with pytest.raises(ValueError, match="positive seconds"):
        TargetCost({1: 0.0})
