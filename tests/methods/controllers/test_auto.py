"""``auto`` and ``goodput`` in simulated worlds, and what they say of their decisions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from worlds import Fixed, Member, World, best_fixed, contexts

from foretoken.core import Context, Limits, StepRecord
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.controllers.acceptance_model import DraftCounts
from foretoken.methods.controllers.auto import CREDIT, EARNED, ENDING, KEPT, AutoController
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.controllers.goodput import GoodputController
from foretoken.methods.controllers.plan import RoundPlan
from foretoken.methods.controllers.prefix import PrefixController

WORLDS = {
    "good draft": [Member(0.01, 0.8)],
    "expensive draft": [Member(0.2, 0.7)],
    "useless draft": [Member(0.02, 0.02)],
    "copying is best": [Member(0.03, 0.6), Member(0.0005, 0.9)],
    "copying sometimes": [Member(0.01, 0.7), Member(0.0005, 0.85, answers=0.3)],
    "two alike": [Member(0.02, 0.7), Member(0.021, 0.7)],
    "only long drafts pay": [Member(0.002, 0.6, call_s=0.09, further=0.95)],
}


def attached(world: World, k: int | None = None) -> AutoController:
    controller = AutoController(k)
    controller.attach(world.limits)
    return controller


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_auto_finds_the_best_and_never_loses(name: str, batch: int) -> None:
    def world(seed: int = 0) -> World:
        return World(WORLDS[name], seed=seed)

    rates = []
    for seed in range(8):
        controller, played = attached(world()), world(seed)
        for request in range(6):  # requests of 100 rounds, the first two of which are to learn from
            run_rate = played.play(controller, contexts(batch, start=batch * request), 100)
            rates += [run_rate] if request >= 2 else []
    rate = sum(rates) / len(rates)
    plain = world().play(Fixed(0, 0), contexts(batch), 3000)
    assert rate >= 0.97 * plain
    assert rate >= 0.95 * best_fixed(world, batch, rounds=3000)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("accepts", [0.3, 0.45, 0.6, 0.75])
def test_auto_knows_what_plain_decoding_costs_when_nothing_evicts_the_target(accepts: float, batch: int) -> None:
    """Plain rounds beside drafts take 1.5 times as long: compared with those, a loss of a fifth would be a gain."""

    def world(seed: int = 0) -> World:
        return World([Member(0.03, accepts, deepest=4)], seed=seed, evicted=1.5)

    rates = []
    for seed in range(4):
        controller, played = attached(world()), world(seed)
        for request in range(6):
            run_rate = played.play(controller, contexts(batch, start=batch * request), 100)
            rates += [run_rate] if request >= 2 else []
    rate = sum(rates) / len(rates)
    assert rate >= 0.97 * world().play(Fixed(0, 0), contexts(batch), 3000)
    assert rate >= 0.95 * best_fixed(world, batch, rounds=3000)


@pytest.mark.parametrize("shows", [True, False])
def test_auto_changes_to_copying_where_a_text_repeats_itself(shows: bool) -> None:
    """A network pays, and copying seven times as much in every fourth text: guesses beside the network's show
    it in a few rounds, and trials later."""
    members = [Member(0.04, 0.85), Member(0.0005, 0.05, is_free=True, copied=0.97, deepest=10)]
    rates: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(6):
        played = World(members, seed=seed, shows=shows)
        controller = attached(played)
        for request in range(16):
            run_rate = played.play(controller, contexts(1, start=request), 30)
            rates[request % 4 == 3] += [run_rate] if request >= 4 else []
    network = World(members).play(Fixed(0, 8), contexts(1), 3000)
    prose, copied = (sum(rates[copies]) / len(rates[copies]) for copies in (False, True))
    assert prose >= 0.93 * network
    assert (copied >= 6.0 * network) is shows, copied / network


def test_a_controller_that_only_drafts_does_lose() -> None:
    """The check above can fail."""
    world = World(WORLDS["expensive draft"])
    controller = ConstantController(k=4)
    controller.attach(world.limits)
    plain = World(WORLDS["expensive draft"]).play(Fixed(0, 0), contexts(1), 300)
    assert world.play(controller, contexts(1), 300) < 0.9 * plain


def test_drafts_of_one_token_do_not_pay_where_only_long_ones_do() -> None:
    """The world above is what it is called."""
    rates = [World(WORLDS["only long drafts pay"]).play(Fixed(0, depth), contexts(1), 3000) for depth in (0, 1, 8)]
    assert rates[1] < 0.9 * rates[0] < rates[0] < 0.8 * rates[2]


@pytest.mark.parametrize("seed", range(8))
def test_auto_asks_another_member_where_the_first_has_no_guess(seed: int) -> None:
    world = World([Member(0.01, 0.7), Member(0.0005, 0.9, answers=0.3, is_free=True)], seed=seed)
    controller = attached(world)
    world.play(controller, contexts(1), 300)
    (budget,) = controller.budgets(contexts(1, start=7))
    assert budget.member == 1
    assert budget.otherwise is not None and budget.otherwise.member == 0 and budget.otherwise.otherwise is None


def test_auto_falls_back_and_comes_back() -> None:
    """A draft that stops being right, and later is right again."""
    good, bad = World([Member(0.03, 0.8)], seed=1), World([Member(0.03, 0.0)], seed=2)
    controller = attached(good)
    request = contexts(1)
    good.play(controller, request, 200)
    bad.rounds = good.rounds
    bad.play(controller, request, 100)
    late = bad.play(controller, request, 300)
    assert late >= 0.97 * World([Member(0.03, 0.0)]).play(Fixed(0, 0), contexts(1), 300)
    good.rounds = bad.rounds
    for start in range(1, 9):
        good.play(controller, contexts(1, start=start), 300)
    again = good.play(controller, contexts(1, start=20), 600)
    assert again >= 0.9 * best_fixed(lambda: World([Member(0.03, 0.8)]), 1, rounds=3000)


@pytest.mark.parametrize("accepts", [0.45, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_auto_drafts_beside_requests_that_it_is_not_asked_about(accepts: float, seed: int) -> None:
    """Nothing is learned of plain rounds of this batch then, which once was a reason to try them for ever."""
    played = World([Member(0.02, accepts)], others=1, seed=seed)
    controller = attached(played)
    played.play(controller, contexts(1), 200)
    rate = played.play(controller, contexts(1, start=1), 600)
    assert rate >= 0.93 * best_fixed(lambda: World([Member(0.02, accepts)], others=1), 1, rounds=2000)


def test_auto_is_not_misled_by_a_machine_that_changes_speed() -> None:
    def world() -> World:
        return World([Member(0.02, 0.75)], speed=lambda round_: 3.0 if (round_ // 80) % 2 else 1.0)

    played = world()
    controller = attached(played)
    played.play(controller, contexts(1), 160)
    assert played.play(controller, contexts(1, start=1), 640) >= 0.95 * best_fixed(world, 1, rounds=640)


def test_requests_that_come_and_go_are_served_as_well_as_a_closed_batch() -> None:
    """A server's batch: requests of different lengths, and now one, now up to six of them."""

    def served(controller: AutoController | Fixed, seed: int) -> float:
        world, running, begun, tokens, seconds = World([Member(0.01, 0.75)], seed=seed), list[Context](), 0, 0, 0.0
        for round_ in range(700):
            while len(running) < (1, 6, 3, 5)[round_ // 40 % 4]:
                running += contexts(1, start=begun, written=0, max_length=1 + 20 + 17 * (begun % 5))
                begun += 1
            gained, took = world.round(controller, running, grows=True)
            for request in [request for request in running if len(request.tokens) >= request.max_length]:
                controller.finish(request)
                running.remove(request)
            tokens, seconds = tokens + gained * (round_ > 100), seconds + took * (round_ > 100)
        return tokens / seconds

    rates = [served(attached(World([Member(0.01, 0.75)])), seed) for seed in range(4)]
    best = max(served(Fixed(0, depth), 0) for depth in (0, 1, 2, 3, 4, 6, 8))
    assert sum(rates) / len(rates) >= 0.95 * best


def test_a_request_learns_from_others() -> None:
    world = World([Member(0.02, 0.0)])
    controller = attached(world)
    world.play(controller, contexts(1, start=3), 400)
    depths = [controller.budgets(contexts(1, start=start))[0].max_depth for start in range(9, 19)]
    assert max(depths) <= 1 and len(set(depths)) == 1


class GreedyAcceptsAll(World):
    """Requests from 1000 on are greedy and accept whole drafts; the others sample and accept nothing."""

    def accepted(self, member: Member, request: int, depth: int) -> int:
        return depth if request >= 1000 else 0


def mixed_batch(sampled: int, greedy: int, greedy_first: bool) -> list[Context]:
    some, others = contexts(sampled), contexts(greedy, start=1000)
    for context in others:
        context.sampler = Sampler(SamplingParams())
    return [*others, *some] if greedy_first else [*some, *others]


@pytest.mark.parametrize("kind", [AutoController, GoodputController, PrefixController])
@pytest.mark.parametrize("greedy_first", [True, False])
@pytest.mark.parametrize(("sampled", "greedy", "least", "most"), [(7, 1, 0.0, 0.2), (1, 7, 7.5, 8.0)])
def test_a_batch_of_greedy_and_sampled_requests_is_weighed_as_a_whole(
    sampled: int, greedy: int, least: float, most: float, greedy_first: bool, kind: type[AutoController]
) -> None:
    """Once its first request decided for all."""
    world = GreedyAcceptsAll([Member(0.01, 0.0)], node_s=0.004, noise=0.0)
    controller = kind()
    controller.attach(world.limits.members[0])
    running = mixed_batch(sampled, greedy, greedy_first)
    depths_of(controller, world, running, 200)
    depths = depths_of(controller, world, running, 200)
    assert least <= sum(depths) / len(depths) <= most


# -- first answers ---------------------------------------------------------------------------------------------------


CHAT = [Member(0.0082, 0.93, deepest=5), Member(0.0002, 0.45, answers=0.5, is_free=True, further=0.75)]
"""A bfloat16 target of 135M parameters, whose further rows cost nothing, with itself in four bits and n-grams."""
GROWS = {"node_s": 0.0058, "call_s": 0.0029}
"""A GGUF file of it: five rows cost three times one."""
FIRST_ANSWERS = {
    "chat, with itself in four bits": (CHAT, {"node_s": 0.0002, "call_s": 0.0143}),
    "sampled": (
        [Member(0.009, 0.75, deepest=5), Member(0.0002, 0.2, answers=0.5, is_free=True, further=0.4)],
        {"node_s": 2e-4, "call_s": 0.0143},
    ),
    "a GGUF file, prose": ([Member(0.0002, 0.15, answers=0.4, is_free=True, further=0.5)], GROWS),
    "a GGUF file, copies": ([Member(0.0002, 0.9, answers=0.8, is_free=True, further=0.95)], GROWS),
    "a draft model that does not pay": ([Member(0.039, 0.3)], {"node_s": 0.002}),
}


def answered(world: World, controller: AutoController | Fixed, tokens: int, seed: int) -> float:
    """Tokens per second of one answer."""
    request, gained, seconds = contexts(1, start=seed, written=0, max_length=2 + tokens), 0, 0.0
    while gained < tokens:
        more, took = world.round(controller, request, grows=True)
        gained, seconds = gained + more, seconds + took
    return gained / seconds


def calibrated(world: World, wrong: float = 1.0) -> AutoController:
    """Starts from what the world costs, and knows nothing of what is accepted.  More than one row seemed to cost
    ``wrong`` times as much."""
    controller = attached(world)
    seconds = {n: world.call_s + world.node_s * n + 0.002 for n in (1, 2, 5, 9)}
    curve = TargetCost({n: s if n == 1 else wrong * s for n, s in seconds.items()})
    members = zip(world.limits.members, world.members, strict=True)
    costs = {
        limits.name: DrafterCost(member.call_s, member.step_s) for limits, member in members if limits.relative_cost
    }
    controller.start_from(RoundCosts(curve, costs))
    return controller


@pytest.mark.parametrize("name", FIRST_ANSWERS)
def test_a_first_answer_loses_next_to_nothing(name: str) -> None:
    members, costs = FIRST_ANSWERS[name]

    def world(seed: int = 0) -> World:
        return World(members, seed=seed, **costs)

    def mean(rates: Iterable[float]) -> float:
        values = list(rates)
        return sum(values) / len(values)

    seeds = range(16)
    plain = mean(answered(world(seed), Fixed(0, 0), 256, seed) for seed in seeds)
    fixed = [Fixed(member, depth) for member in range(len(members)) for depth in (1, 2, 4, 8)]
    best = max(mean(answered(world(seed), controller, 256, seed) for seed in seeds) for controller in fixed)
    assert mean(answered(world(seed), calibrated(world(seed)), 64, seed) for seed in seeds) >= 0.97 * plain
    assert mean(answered(world(seed), calibrated(world(seed)), 256, seed) for seed in seeds) >= 0.95 * max(plain, best)


@pytest.mark.parametrize("wrong", [2.0, 8.0])
@pytest.mark.parametrize(
    "members",
    [
        [Member(0.02, 0.75)],
        [Member(0.0005, 0.85, answers=0.3, is_free=True)],
        [Member(0.0005, 0.9, answers=0.6, deepest=1, is_free=True)],
    ],
    ids=["a draft model", "copying sometimes", "copies of one token, a width that was timed"],
)
def test_costs_that_were_wrong_at_load_do_not_last(members: list[Member], wrong: float) -> None:
    """Another process ran while several rows were timed: plain rounds would never show it."""

    def rate(controller: AutoController | Fixed, seed: int) -> float:
        world = World(members, seed=seed)
        return sum(answered(world, controller, 256, 10 * seed + text) for text in range(4)) / 4

    seeds = range(8)
    right, misled = (sum(rate(calibrated(World(members), by), seed) for seed in seeds) for by in (1.0, wrong))
    plain = sum(rate(Fixed(0, 0), seed) for seed in seeds)
    assert right >= 1.2 * plain
    assert misled >= 0.93 * right


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_costs_that_were_right_are_not_tried_for_ever(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that would pay if many rows cost no more than one, which they do: eight times as much.  Not every request
    has a guess, so that rounds are seldom as wide as planned."""
    members = [Member(0.0005, 0.8, answers=0.5, is_free=True)]
    world = World(members, seed=1, node_s=0.4)
    controller, drafting = calibrated(world), list[bool]()
    budgets = controller.budgets

    def counted(running: Any) -> Any:
        granted = budgets(running)
        drafting.append(granted[0].max_depth > 0)
        return granted

    monkeypatch.setattr(controller, "budgets", counted)
    rate = world.play(controller, contexts(batch), 2000)
    plain = World(members, seed=1, node_s=0.4).play(Fixed(0, 0), contexts(batch), 2000)
    assert rate >= 0.98 * plain
    assert 0 < sum(drafting[:1000]) <= 20 and sum(drafting[1000:]) <= 10


def test_without_measured_costs_a_first_answer_does_lose() -> None:
    """The check above can fail: this is what a GGUF file's first answer was like."""
    members, costs = FIRST_ANSWERS["a GGUF file, prose"]
    worlds = [World(members, seed=seed, **costs) for seed in range(16)]
    plain = sum(answered(World(members, seed=seed, **costs), Fixed(0, 0), 64, seed) for seed in range(16))
    assert sum(answered(world, attached(world), 64, seed) for seed, world in enumerate(worlds)) < 0.97 * plain


def test_what_may_be_lost_by_trying_is_bounded() -> None:
    """Drafts that are never right, and that seem worth trying: the credit ends that, and comes back slowly."""
    world = World([Member(0.05, 0.0)])
    controller = calibrated(world)
    running = contexts(1)
    plain_s = world.call_s + world.node_s + 0.002
    for rounds in (64, 256, 1024):
        started = world.rounds
        seconds = sum(world.round(controller, running)[1] for _ in range(rounds))
        allowed = rounds * (1 + EARNED) + CREDIT + 1.0  # one round more, which was begun with credit left
        assert world.rounds - started == rounds and seconds <= 1.02 * allowed * plain_s
    assert controller._credit <= CREDIT


def test_only_what_was_not_measured_before_is_calibrated() -> None:
    world = World([Member(0.02, 0.0), Member(0.03, 0.0)])
    controller = attached(world)
    measured = {"m0": DrafterCost(0.0, 0.02)}
    controller.start_from(RoundCosts(TargetCost({1: 0.103, 9: 0.111}), measured))
    running, plans = contexts(1), []
    for _ in range(6):
        world.round(controller, running)
        plans.append([(draft.member, draft.depth) for draft in controller.plan.drafts])
    assert plans == [[(1, 1)], [(1, 4)]] * 3


# -- calibration and exploration -------------------------------------------------------------------------------------


def depths_of(controller: AutoController, world: World, running: list[Context], rounds: int) -> list[int]:
    depths = []
    for _ in range(rounds):
        world.play(controller, running, 1)
        depths.append(controller.plan.drafts[0].depth if controller.plan.drafts else 0)
    return depths


@pytest.mark.parametrize(("deepest", "long"), [(8, 4), (2, 2)])
def test_what_costs_is_measured_first_at_two_lengths(deepest: int, long: int) -> None:
    world = World([Member(0.02, 0.0, deepest=deepest)])
    controller = attached(world)
    assert depths_of(controller, world, contexts(1), 11) == [0] * 5 + [1, long] * 3  # two to warm up
    assert depths_of(controller, world, contexts(4, start=5), 4) == [0, 0, 1, long]  # another size: once
    assert depths_of(controller, world, contexts(5, start=15), 4) != [0, 0, 1, long]


@pytest.mark.parametrize("kind", [AutoController, PrefixController])
def test_drafts_are_still_to_be_measured_after_a_request_that_wants_none(kind: type[AutoController]) -> None:
    """``max_draft_tokens=0`` once used up the calibration; plain decoding is measured in its rounds."""
    world = World([Member(0.02, 0.9)])
    controller = kind()
    controller.attach(world.limits.members[0])
    (request,) = contexts(1)
    for _ in range(20):
        controller.budgets([request])
        controller.observe(request, StepRecord(0, 1, 0, 0, 1, 0.0, 0.1, 0.0, 0.1, 1, -1, 0)._replace(allowed=0))
    controller.finish(request)
    assert controller._to_measure[1] == [(0, 1), (0, 4)] * 3
    assert [controller.budgets(contexts(1, start=7))[0].max_depth for _ in range(3)] == [1, 4, 1]


@pytest.mark.parametrize("again", [True, False])
def test_plain_decoding_is_measured_again_where_its_first_rounds_were_slow(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise drafts that do not pay would seem to pay for ever."""
    world = World([Member(0.03, 0.25, deepest=1)], speed=lambda number: 1.6 if number in (3, 5, 7) else 1.0)
    controller = attached(world)
    if not again:
        monkeypatch.setattr("foretoken.methods.controllers.auto.CLOSE", 0.0)
    for start in range(5):
        world.play(controller, contexts(1, start=start), 100)
    drafted = sum(depth > 0 for depth in depths_of(controller, world, contexts(1, start=9), 200))
    assert (drafted < 60) is again, drafted


def test_nothing_is_measured_at_the_end_or_with_a_profile() -> None:
    world = World([Member(0.02, 0.0)])
    controller = attached(world)
    depths_of(controller, world, contexts(1, max_length=100 + ENDING), 3)
    assert [len(todo) for todo in controller._to_measure.values()] == [2 + 3 * 3]  # all of it is still to come
    profiled = attached(world)
    profiled.start_from(RoundCosts(TargetCost({1: 0.1, 9: 0.11}), {"m0": DrafterCost(0.0, 0.02, (0.0, 0.0))}))
    assert depths_of(profiled, world, contexts(1, start=3), 9)[1:] == [0] * 8


def test_what_is_not_in_use_is_explored_again_and_again_but_seldom() -> None:
    """Upper confidence bounds: the fewer drafts count still, the more a drafter may be better than it seems."""
    world = World([Member(0.02, 0.02)])
    controller = attached(world)
    world.play(controller, contexts(1), 100)
    drafted = [depth > 0 for depth in depths_of(controller, world, contexts(1, start=2), 6000)]
    assert 0 < sum(drafted[:3000]) < 180 and 0 < sum(drafted[3000:]) < 180


def test_a_plan_is_kept_for_some_rounds_but_not_for_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([Member(0.02, 0.9)])
    controller = attached(world)
    served, chosen = contexts(4), []
    for some in (served[:2], served):
        world.play(controller, some, 50)
    choose = AutoController._choose

    def choosing(self: AutoController, some: list[Context]) -> RoundPlan:
        chosen.append(len(some))
        return choose(self, some)

    monkeypatch.setattr(AutoController, "_choose", choosing)
    world.play(controller, served, 4 * KEPT)
    assert chosen == [4] * 4
    for some, anew in ((served[:4], 0), (served[:3], 1), (served[:2], 0), ([*served[:2], *contexts(1, start=9)], 1)):
        chosen.clear()
        controller._keep = KEPT
        controller.budgets(some)
        assert len(chosen) == anew


# -- profiles, options, telling --------------------------------------------------------------------------------------


def profiled() -> AutoController:
    costs = RoundCosts(
        TargetCost({1: 1.0, 9: 1.1}),
        {"a": DrafterCost(0.0, 0.5, (0.5, 0.2)), "b": DrafterCost(0.0, 0.01, (0.9, 0.8, 0.7, 0.6))},
    )
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("a", 4, 4), Limits("b", 8, 8))))
    controller.start_from(costs)
    return controller


def test_auto_starts_from_a_profile() -> None:
    (budget,) = profiled().budgets(contexts(1))
    assert budget.member == 1 and budget.max_depth == 8


def test_it_says_in_one_line_what_drafts_cost_and_bring() -> None:
    controller = profiled()
    (request,) = contexts(1)
    controller.budgets([request])
    assert controller.explain(request).startswith("drafts: a round with 8 drafts of b")
    assert controller.explain(request).endswith(" tokens") and "\n" not in controller.explain(request)
    bad = World([Member(0.08, 0.3)], seed=3)
    plain = attached(bad)
    bad.play(plain, contexts(1), 300)
    reason = plain.explain(request)
    assert re.fullmatch(
        r"plain: a round with 1 draft of m0 costs 1\.[789]\d plain rounds and brings 1\.[1234]\d tokens", reason
    )
    report = json.loads(json.dumps(plain.report()))
    assert (report["plan"], report["predicted_speedup"], report["why"]) == ([], 1.0, reason)
    assert [(row["drafter"], row["depth"]) for row in report["options"]] == [("m0", 1)]


def test_it_says_something_before_anything_was_seen() -> None:
    controller = AutoController()
    assert "\n" not in controller.explain(contexts(1)[0]) and controller.report()["drift"] == 1.0


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    world = World([Member(0.02, 0.5)])
    controller = attached(world)
    request = contexts(1)
    world.play(controller, request, 5)
    controller.finish(request[0])
    assert not controller._records and controller.plan != RoundPlan(tokens=9.0)


def test_k_is_the_longest_draft() -> None:
    world = World([Member(0.001, 0.99)])
    controller = attached(world, k=3)
    world.play(controller, contexts(1), 60)
    assert max(depths_of(controller, world, contexts(1, start=3), 40)) == 3


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="auto needs k >= 1"):
        AutoController(k=0)
    with pytest.raises(ValueError, match="goodput needs k >= 1"):
        GoodputController(k=0)
    with pytest.raises(ValueError, match="goodput needs memory >= 1"):
        GoodputController(memory=0.5)


# -- goodput ---------------------------------------------------------------------------------------------------------


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
    """v(n) grows with the batch: the same acceptance pays for shorter drafts (docs/theory.md)."""
    costs = RoundCosts(TargetCost({1: 1.0, 16: 1.05, 64: 4.0}), {"d": DrafterCost(0.0, 0.05, (0.7, 0.49, 0.34))})
    controller = GoodputController()
    controller.attach(Limits("d", 8, 8))
    controller.start_from(costs)
    lengths = [controller.budgets(contexts(batch, start=100 * batch))[0].max_depth for batch in (1, 8, 64)]
    assert lengths[0] > lengths[1] >= lengths[2]


def test_goodput_takes_a_group_for_one_drafter() -> None:
    controller = GoodputController()
    controller.attach(World([Member(0.02, 0.5), Member(0.0, 0.5)]).limits)
    controller.budgets(contexts(1))
    assert len(controller.members) == 1 and controller.budgets(contexts(1))[0].member is None


@pytest.mark.parametrize(("max_length", "deepest"), [(200, 99), (102, 32)])
def test_drafts_longer_than_what_is_left_of_the_text_are_not_weighed(
    max_length: int, deepest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ngram,k=100000000`` asked for a chance at each of a hundred million depths, before the first token."""
    controller, depths = AutoController(), []
    controller.attach(Limits("far", 10**8, 64, 0.0))
    outlook = controller.acceptance.outlook

    def noted(greedy: bool, member: int, own: DraftCounts, depth: int, requests: int = 1) -> Any:
        depths.append(depth)
        assert depth < 1000, "this takes a while"
        return outlook(greedy, member, own, depth, requests)

    monkeypatch.setattr(controller.acceptance, "outlook", noted)
    plan = controller._choose(contexts(1, max_length=max_length))
    assert depths == [deepest] and all(draft.depth <= deepest for draft in plan.drafts)


def test_a_short_text_changes_no_lengths_up_to_the_usual_ones() -> None:
    controller = AutoController()
    controller.attach(Limits("near", 10, 64, 0.0))
    assert controller._open_depths(0, contexts(1, max_length=103)) == controller.depths[0]
