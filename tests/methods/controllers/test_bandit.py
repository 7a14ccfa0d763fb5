"""The bandit: its bound by hand, its arms, its regret against the best fixed arm, and the output's distribution."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from foretoken import registry
from foretoken.core import Budget, Context, Limits, Rng, StepRecord
from foretoken.core.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.methods.controllers.bandit import BanditController, BudgetArm, Table, bonus, parse_costs, parse_lengths
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from toys import FALSE_ALARM, engine, joint_distribution, outputs, sampled_p_value, tables

PROMPT = [0, 1, 2, 3, 0, 1]
EIGHT = Limits("toy", 8, 64)


def context(number: int = 0) -> Context:
    return Context(number, [0], 1, Sampler(SamplingParams()), Rng(0))


def record(depth: int, accepted: int, seconds: float = 1.0, batch: int = 1) -> StepRecord:
    return StepRecord(0, depth + 1, depth, accepted, batch, 0.0, 0.0, 0.0, seconds, depth=depth)


# -- the bound -------------------------------------------------------------------------------------------------------


def test_the_paper_s_confidence_term() -> None:
    """(L/2) sqrt((1+n)/n^2 (1 + 2 ln(K t^2 sqrt(1+n) / delta))), L = 4, K = 4, delta = .05."""
    assert bonus(1, 5, 4, 4, 0.05) == pytest.approx(11.626, abs=1e-3)  # ln 2828.4 = 7.9475
    assert bonus(8, 20, 4, 4, 0.05) == pytest.approx(3.6699, abs=1e-3)  # ln 96000 = 11.472


def test_scores_by_hand() -> None:
    """Plain wrote 1 token a second; the others' rates count in its rounds."""
    plain = BudgetArm(Budget(0, 0), 2, 2, 4.0)  # half a token a second
    short = BudgetArm(Budget(2, 9), 1, 3, 3.0)
    table = Table([plain, short])
    assert table.scores(0.0, 0.05) == [1.0, 2.0]
    expected = [1.0 + bonus(2, 4, 2, 2, 0.05), 2.0 + bonus(1, 4, 2, 2, 0.05)]
    assert table.scores(1.0, 0.05) == pytest.approx(expected)
    table.arms.append(BudgetArm(Budget(4, 9)))
    assert table.scores(0.0, 0.05)[2] == math.inf


def test_rates_are_of_sums_not_means_of_rates() -> None:
    """1 token in 1 s and 9 in 3 s are 10 in 4; the mean of 1 and 3 would be 2."""
    controller, request = BanditController("4", explore=0.0), context()
    controller.attach(EIGHT)
    table = controller._table(request, 1)
    table.playing = 1
    controller.observe(request, record(4, 0, 1.0))
    controller.observe(request, record(4, 8, 3.0))
    assert table.arms[1].rate == 2.5


# -- arms ------------------------------------------------------------------------------------------------------------


def test_arms_are_plain_and_powers_of_two() -> None:
    controller = BanditController()
    for longest, lengths in [(8, [0, 1, 2, 4, 8]), (5, [0, 1, 2, 4, 5]), (1, [0, 1])]:
        controller.attach(Limits("toy", longest, 33))
        assert [arm.max_depth for arm in controller.arms] == lengths
        assert all(arm.max_nodes == 33 and arm.member is None for arm in controller.arms[1:])


def test_lengths_that_a_drafter_cannot_reach_are_one_arm() -> None:
    controller = BanditController("0|2|9|12|2")
    controller.attach(EIGHT)
    assert [arm.max_depth for arm in controller.arms] == [0, 2, 8]


def test_members_of_a_group_are_arms() -> None:
    controller = BanditController("2|4|16")
    controller.attach(Limits("router", 16, 64, members=(Limits("a", 4, 10), Limits("b", 16, 20))))
    arms = [(arm.member, arm.max_depth, arm.max_nodes) for arm in controller.arms]
    assert arms == [(None, 0, 0), (0, 2, 10), (0, 4, 10), (1, 2, 20), (1, 4, 20), (1, 16, 20)]


@pytest.mark.parametrize(("lengths", "drafts"), [("0", False), ("0|1", True), ("", True)])
def test_only_plain_drafts_nothing(lengths: str, drafts: bool) -> None:
    assert BanditController(lengths).drafts is drafts


@pytest.mark.parametrize(
    "options",
    [
        "lengths=1|x",
        "lengths=-1",
        "lengths=1||2",
        "explore=-1",
        "explore=nan",
        "delta=0",
        "delta=1",
        "c=-0.1",
        "c=a",
        "c=nan",
    ],
)
def test_bad_options_of_the_bandit(options: str) -> None:
    with pytest.raises(ValueError, match=r"^bandit needs"):
        registry.make("controller", f"bandit,{options}")


def test_costs_must_fit_the_members() -> None:
    controller = BanditController(c="0.1|0")
    with pytest.raises(ValueError, match="2 costs for 1 drafters"):
        controller.attach(EIGHT)
    controller.attach(Limits("router", 8, 64, members=(EIGHT, EIGHT)))


def test_texts() -> None:
    assert (parse_lengths(""), parse_lengths("1|2 | 8")) == (None, (1, 2, 8))
    assert (parse_costs(""), parse_costs("0.5|0")) == ((), (0.5, 0.0))


# -- rounds ----------------------------------------------------------------------------------------------------------


def test_every_arm_is_tried_once_first() -> None:
    controller, request = BanditController(), context()
    controller.attach(EIGHT)
    tried = []
    for _ in range(5):
        tried.append(controller.budget(request, 1).max_depth)
        controller.observe(request, record(tried[-1], 0))
    assert tried == [0, 1, 2, 4, 8]


def test_a_batch_plays_one_arm_and_shares_its_time() -> None:
    controller, requests = BanditController("4"), [context(i) for i in range(4)]
    controller.attach(EIGHT)
    for depth in (0, 4):
        assert [budget.max_depth for budget in controller.budgets(requests)] == [depth] * 4
        for request in requests:
            controller.observe(request, record(depth, depth // 2, 2.0, batch=4))
    plain, four = controller._table(requests[0], 4).arms
    assert (plain.rounds, plain.tokens, plain.cost, four.tokens, four.cost) == (4, 4, 2.0, 12, 2.0)


def test_batch_sizes_are_told_apart_within_a_factor_of_two() -> None:
    controller, request = BanditController("4"), context()
    controller.attach(EIGHT)
    assert controller._table(request, 2) is controller._table(request, 3)
    assert controller._table(request, 4) is not controller._table(request, 3)


@pytest.mark.parametrize("share", [True, False])
def test_rounds_that_allow_no_draft_of_its_length_teach_an_arm_nothing(share: bool) -> None:
    """A request without drafts once taught every arm that its drafts are wrong, and the end of each text did."""
    controller, requests = BanditController("4", c="0.1", share=share), [context(0), context(1)]
    controller.attach(EIGHT)
    for _ in range(20):
        for request, budget, allowed in zip(requests, controller.budgets(requests), (0, 9), strict=True):
            depth = min(budget.max_depth, allowed)
            controller.observe(request, record(depth, depth, batch=2)._replace(allowed=allowed))
    first, second = (controller._table(request, 2).arms for request in requests)
    assert second[1].rate == pytest.approx(5 / 1.4) and second[1].rounds > 10
    assert first[1].rounds == (second[1].rounds if share else 0)


@pytest.mark.parametrize("share", [True, False])
def test_arms_that_a_request_always_cuts_short_are_not_played_for_ever(share: bool) -> None:
    """Of useless drafts a request allows two: plain decoding is best, although longer arms were never played."""
    controller, request, played = BanditController(c="0.3", share=share), context(), Counter[int]()
    controller.attach(EIGHT)
    for _ in range(300):
        depth = controller.budget(request, 1).max_depth
        played[depth] += 1
        controller.observe(request, record(min(depth, 2), 0)._replace(allowed=2))
    assert played[0] > 150 and played[4] + played[8] <= 1
    assert controller.budget(request, 1).max_depth <= 2
    controller.observe(request, record(0, 0)._replace(allowed=9))  # past a length that the target treats apart
    assert controller.budget(request, 1).max_depth == 4


def test_short_texts_do_not_play_arms_for_which_they_have_no_room() -> None:
    """Otherwise the first round of every text would play the one that is never finished."""
    controller, played = BanditController(c="0.1"), list[int]()
    controller.attach(EIGHT)
    for number in range(20):
        request = context(number)
        request.max_length = 4  # one token is there, and one is the target's
        played.append(controller.budget(request, 1).max_depth)
        controller.observe(request, record(played[-1], 0)._replace(allowed=2))
    assert played[:3] == [0, 1, 2] and max(played) == 2
    request.tokens = [0] * 4
    assert controller.budget(request, 1).max_depth == 0


@pytest.mark.parametrize("share", [True, False])
def test_an_arm_is_paid_for_its_own_round_where_others_of_the_batch_were_not_asked_about(share: bool) -> None:
    """One of the two requests of a round brings its own tree; the other once kept its first arm to the end."""
    controller, request = BanditController("4", explore=0.0, c="0.1", share=share), context()
    controller.attach(EIGHT)
    played = []
    for _ in range(4):
        (budget,) = controller.budgets([request])
        played.append(budget.max_depth)
        controller.observe(request, record(budget.max_depth, budget.max_depth, batch=2))
    assert played == [0, 4, 4, 4]
    (arms,) = [table.arms for table in (controller._tables if share else request.state[controller]).values()]
    assert [(arm.rounds, arm.tokens) for arm in arms] == [(1, 1), (3, 15)]


def test_sharing_is_a_choice() -> None:
    first, second = context(0), context(1)
    for share in (True, False):
        controller = BanditController("4", share=share)
        controller.attach(EIGHT)
        assert controller.budget(first, 1).max_depth == 0
        controller.observe(first, record(0, 0))
        assert controller.budget(second, 1).max_depth == (4 if share else 0)


def test_given_costs_replace_the_clock() -> None:
    """0.1 a level: 4 levels cost 1.4 steps; a draft that ended early costs what it had."""
    controller = BanditController("4", c="0.1")
    controller.attach(EIGHT)
    assert controller._cost(Budget(4, 64), record(4, 0, 99.0)) == pytest.approx(1.4)
    assert controller._cost(Budget(4, 64), record(1, 0, 99.0)) == pytest.approx(1.1)
    assert controller._cost(Budget(0, 0), record(0, 0, 99.0)) == 1.0
    both = BanditController(c="0.5|0")
    both.attach(Limits("router", 8, 64, members=(EIGHT, EIGHT)))
    assert [both._cost(Budget(2, 64, member=m), record(2, 0)) for m in (0, 1)] == [2.0, 1.0]


def test_measured_costs_replace_the_clock_where_they_know_all() -> None:
    controller = BanditController("2")
    controller.attach(EIGHT)
    target = TargetCost({1: 0.10, 9: 0.18})
    controller.start_from(RoundCosts(target, {"other": DrafterCost(0.0, 0.1)}))
    assert controller._cost(Budget(2, 64), record(2, 0, 0.7, batch=2)) == 0.35
    controller.start_from(RoundCosts(target, {"toy": DrafterCost(0.02, 0.01)}, rest_s=0.01))
    # Two requests with three nodes each: .15, drafting .04, rest .01.
    assert controller._cost(Budget(2, 64), record(2, 0, 0.7, batch=2)) == pytest.approx(0.10)
    assert controller._cost(Budget(0, 0), record(0, 0, 0.7)) == pytest.approx(0.11)


# -- regret ----------------------------------------------------------------------------------------------------------

Survival = Callable[[int], float]


def simulate(
    controller: BanditController, survive: list[Survival], c: list[float], rounds: int, seed: int
) -> tuple[float, Counter[Budget]]:
    """Tokens per target step when draft token d of a member is accepted with ``survive[member](d)``, and what was
    played."""
    rng, request, played = random.Random(seed), context(), Counter[Budget]()
    tokens = cost = 0.0
    for _ in range(rounds):
        budget = controller.budget(request, 1)
        member, depth, accepted = budget.member or 0, budget.max_depth, 0
        while accepted < depth and rng.random() < survive[member](accepted + 1):
            accepted += 1
        tokens, cost = tokens + 1 + accepted, cost + 1 + c[member] * depth
        played[budget] += 1
        controller.observe(request, record(depth, accepted))
    return tokens / cost, played


def rate(survive: Survival, c: float, depth: int) -> float:
    """Tokens per target step of a fixed length."""
    stands, tokens = 1.0, 1.0
    for d in range(1, depth + 1):
        stands *= survive(d)
        tokens += stands
    return tokens / (1 + c * depth)


CURVES: dict[str, tuple[Survival, float, int]] = {
    "good": (lambda d: 0.9, 0.05, 8),
    "middling": (lambda d: 0.6, 0.1, 2),
    "falling": (lambda d: 0.95 if d <= 2 else 0.1, 0.1, 2),
    "useless": (lambda d: 0.1, 0.3, 0),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_regret_against_the_best_length_shrinks(name: str) -> None:
    survive, c, _ = CURVES[name]
    rates = [rate(survive, c, depth) for depth in (0, 1, 2, 4, 8)]
    shares = []
    for rounds in (100, 3000):
        runs = []
        for seed in range(4):
            controller = BanditController(c=str(c))
            controller.attach(EIGHT)
            runs.append(simulate(controller, [survive], [c], rounds, seed)[0])
        shares.append(1 - sum(runs) / len(runs) / max(rates))
    assert shares[1] < 0.05 and shares[1] < shares[0] < 0.4


def test_the_best_length_is_played_most() -> None:
    for name, (survive, c, best) in CURVES.items():
        if name == "middling":
            continue  # 2 and 4 are within 2 %
        controller = BanditController(c=str(c))
        controller.attach(EIGHT)
        _, played = simulate(controller, [survive], [c], 4000, seed=1)
        assert played.most_common(1)[0][0].max_depth == best, name


def test_the_paper_s_bound_is_never_below_the_truth() -> None:
    """With explore=1 the best arm's bound stays above its rate: that is what the proof needs."""
    survive, c, best = CURVES["good"]
    controller = BanditController(explore=1.0, c=str(c))
    controller.attach(EIGHT)
    truth = rate(survive, c, best)
    for seed in range(3):
        simulate(controller, [survive], [c], 300, seed)
        table = controller._tables[1]
        index = [arm.budget.max_depth for arm in table.arms].index(best)
        assert table.scores(1.0, 0.05)[index] > truth


def test_the_better_member_drafts() -> None:
    """Member 1 is right more often at the same cost; with a cost of one step a token nobody should draft."""
    members = (Limits("a", 4, 64), Limits("b", 4, 64))
    survive: list[Survival] = [lambda d: 0.3, lambda d: 0.85]
    for cost, member in [("0.1|0.1", 1), ("1|1", None)]:
        controller = BanditController("4", c=cost)
        controller.attach(Limits("router", 4, 64, members=members))
        _, played = simulate(controller, survive, [float(cost.split("|")[0])] * 2, 2000, seed=2)
        assert played.most_common(1)[0][0].member == member


# -- in the engine ---------------------------------------------------------------------------------------------------

SPECS = ("bandit", "bandit,c=0.1,share=false", "bandit,c=0.2,lengths=1|3,explore=1")


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_the_bandit_keeps_greedy_outputs(spec: str, group: bool) -> None:
    target, draft = tables()
    requests = [Request(prompt, max_new_tokens=30) for prompt in (PROMPT, [3], [2, 2, 2, 2], [1, 0])]
    model = ModelDrafter(draft, k=4)
    drafter = RouterDrafter([model, NgramDrafter(n=2, k=6)]) if group else model
    speculative = engine(target, drafter, None, registry.make("controller", spec), max_batch=3)
    assert outputs(speculative, requests) == outputs(engine(target), requests)


@pytest.mark.parametrize("group", [False, True])
def test_the_bandit_keeps_the_distribution(group: bool) -> None:
    """False alarm 1e-4."""
    target, draft = tables()
    modes = {"T=1": SamplingParams(temperature=1.0)}
    model = ModelDrafter(draft, k=3)
    drafter = RouterDrafter([model, NgramDrafter(n=2, k=4)]) if group else model
    controller = registry.make("controller", "bandit,c=0.1,explore=1")
    speculative = engine(target, drafter, None, controller, max_batch=4)
    distributions = {mode: joint_distribution(target, params, PROMPT, 4) for mode, params in modes.items()}
    assert sampled_p_value(speculative, modes, distributions, PROMPT, 4, 300) > FALSE_ALARM
    arms = [arm for table in controller._tables.values() for arm in table.arms]
    assert {arm.budget.member for arm in arms if arm.rounds > 5} >= ({None, 0, 1} if group else {None})


def test_without_clock_and_sharing_a_seed_fixes_the_output() -> None:
    target, draft = tables()
    requests = [Request(PROMPT, SamplingParams(temperature=1.0), 25, seed=seed) for seed in range(4)]

    def written(several: list[Request]) -> list[list[int]]:
        controller = registry.make("controller", "bandit,c=0.1,share=false")
        return outputs(engine(target, ModelDrafter(draft, k=3), None, controller), several)

    assert written(requests[:1]) + written(requests[1:2]) == written(requests[:2])
