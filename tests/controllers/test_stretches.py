"""``auto`` in texts that repeat in stretches, at their beginning, and in batches of texts of one length.

Drafts of a model run on where a stretch without guesses ends, and take tokens that copying would have written as fast;
and after them texts no longer have one length, so that plain decoding is dearer.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretoken.controllers.auto import FEW, SETTLED, AutoController, is_even
from foretoken.controllers.costs import RoundCosts, TargetCost
from foretoken.controllers.hazards import Hazards, coverage, survival
from foretoken.controllers.learned import EVEN, LearnedCosts
from foretoken.controllers.plans import Option, best_of, plans_of, rounds_of
from foretoken.controllers.trials import FIRST_TRIALS, REPLAN, Batch
from foretoken.sampling import Sampler, SamplingParams
from foretoken.types import Context, Limits, Rng, StepRecord

PLAIN = Option(-1, 0, 1.0, 1.0, 0.0, 1.0)
COPY = Option(1, 1, 1.0, 2.0, 0.0, 1.0, share=0.5, stays=0.75)
MODEL = Option(0, 2, 2.4, 3.0, 0.5, 1.5, stands=(0.8, 0.6))


class Text:
    """Tokens that copying has guesses for or not: a stretch of either kind goes on with a chance of .75."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.covered = [False]

    def at(self, place: int) -> bool:
        while len(self.covered) <= place:
            self.covered.append(self.covered[-1] == (self.rng.random() < 0.75))
        return self.covered[place]

    def drafted(self) -> int:
        """Tokens of two that stand, by ``MODEL``."""
        chance = self.rng.random()
        return sum(chance < stands for stands in MODEL.stands)


def a_request(length: int = 1, number: int = 0) -> Context:
    return Context(number, [0] * length, 1, Sampler(SamplingParams()), Rng(0))  # type: ignore[arg-type]


# -- what drafts gain in a stretch -----------------------------------------------------------------------------------


def test_tokens_that_others_have_no_guess_for_by_hand() -> None:
    """With half of the text bare, .75 of it right after a bare token, and .625 of it one later."""
    assert MODEL.tokens_without(0.5, 0.75) == pytest.approx(1.0 + 0.8 * 0.75 + 0.6 * 0.625)
    assert MODEL.tokens_without(0.5, 0.2) == pytest.approx(1.0 + 1.4 * 0.5)  # the next token is as any other
    assert MODEL.tokens_without(0.5, 1.0) == MODEL.tokens_without(1.0, 0.3) == MODEL.tokens
    assert PLAIN.tokens_without(0.5, 0.75) == 1.0


def test_rounds_of_a_plan_are_those_of_a_text_in_stretches() -> None:
    """Copying one token a round where it can, else drafting: played, and reckoned."""
    text, place, rounds = Text(0), 0, [0, 0]
    while place < 200_000:
        if text.at(place):
            rounds[0], place = rounds[0] + 1, place + 1
        else:
            rounds[1], place = rounds[1] + 1, place + 1 + text.drafted()
    tokens, parts = rounds_of([COPY, MODEL, PLAIN])
    assert tokens == pytest.approx(place / sum(rounds), rel=0.01)
    assert parts[:2] == pytest.approx([part / sum(rounds) for part in rounds], rel=0.02)
    believed, _ = rounds_of([replace(COPY, stays=1.0), MODEL, PLAIN])
    assert believed < 0.93 * tokens  # as if the model's last tokens were such as copying needs more rounds for


def test_who_is_asked_after_others_drafts_less_where_stretches_are_short() -> None:
    """Four tokens are worth most alone; after copying two, where stretches end soon."""
    stands = (0.8, 0.7, 0.6, 0.5)
    lengths = [
        Option(0, depth, 1.0 + sum(stands[:depth]), 1.0 + depth, 0.3 * depth, 1.0 + 0.3 * depth, stands=stands[:depth])
        for depth in range(1, 5)
    ]
    model = best_of(iter(lengths), lambda option: option.rate)
    assert model.depth == 4 and [option.depth for option in model.shorter] == [1, 2, 3]
    found = {}
    for stays in (0.3, 1.0):
        copy = Option(1, 8, 5.0, 9.0, 0.0, 1.1, share=0.7, stays=stays)
        plan = next(plan for plan in plans_of([copy, model, PLAIN]) if len(plan) == 3)
        found[stays] = [(option.member, option.depth) for option in plan]
    assert found[1.0] == [(1, 8), (0, 4), (-1, 0)]
    assert found[0.3] == [(1, 8), (0, 2), (-1, 0)]


def test_how_stretches_go_on_by_hand() -> None:
    """Three of eight times a guess came right after a token without one; four times it goes on are believed before."""
    hazards = Hazards()
    assert hazards.stays == 1.0 and hazards.bare_tokens(5) == 5
    for answered in (True, True, True, False, False, False, False, False):
        hazards.go_on(answered)
    assert hazards.stays == pytest.approx(1 - 3 / 12)
    hazards.write(4, 3)  # and a bare token before: half of the text
    assert hazards.bare_tokens(1) == 1
    assert hazards.bare_tokens(3) == pytest.approx(1 + 0.75 + 0.625)
    hazards.fade(0.5)
    assert hazards.stays == pytest.approx(1 - 1.5 / 8)
    hazards.fade(1e-7)  # counts are put in rounds again
    assert hazards.unit == 1.0 and hazards.stays == pytest.approx(1.0, abs=1e-6)


def test_auto_learns_how_long_stretches_are_though_others_write_in_them() -> None:
    """The share of guesses is that of the text: counted by rounds it would seem the smaller, the more others draft."""
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("model", 8, 8), Limits("copy", 8, 8))))
    request, text, place = a_request(), Text(1), 0
    written = {True: 0, False: 0}
    for round_ in range(6000):
        controller.budgets([request])
        covered = text.at(place)
        stood = 0 if covered else text.drafted()
        controller.state(request).plan = [COPY, MODEL]
        request.tokens.extend([0] * (1 + stood))
        place, written[covered] = place + 1 + stood, written[covered] + 1 + stood
        depth, member = (1, 1) if covered else (2, 0)
        controller.observe(
            request, StepRecord(0, 1 + depth, depth, stood, 1, 0.1, 1.0, 0.0, 1.1, round_, 3, member, depth)
        )
        controller.finish(request)
    copying = controller.general[request.maker.greedy][1]
    assert written[True] / place < 0.41
    assert coverage(Hazards(), copying) == pytest.approx(0.5, abs=0.03)
    assert copying.stays == pytest.approx(0.75, abs=0.04)


def test_how_long_stretches_of_others_are_is_known_of_a_new_request() -> None:
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("model", 8, 8), Limits("copy", 8, 8))))
    request = a_request()
    known = controller.general[request.maker.greedy][1]
    known.covered, known.bare, known.ended, known.stayed = 4.0, 3.0, 3.0, 5.0  # as by hand above
    controller.budgets([request])
    controller.state(request).plan = [COPY, MODEL]
    request.tokens.extend([0] * 3)
    controller.observe(request, StepRecord(0, 3, 2, 2, 1, 0.1, 1.0, 0.0, 1.1, 1, 3, 0, 2))
    controller.finish(request)
    assert controller.state(request).hazards[1].in_rounds()[2:] == pytest.approx((0.625, 2.375))


# -- the first tokens of an output -------------------------------------------------------------------------------------


def draft(controller: AutoController, written: int, stood: int, number: int) -> Hazards:
    """What is known of a request after one round of two tokens."""
    request = a_request(1 + written, number)
    controller.budgets([request])
    controller.state(request).plan = [MODEL]
    request.tokens.extend([0] * (1 + stood))
    controller.observe(request, StepRecord(number, 3, 2, stood, 1, 0.1, 1.0, 0.0, 1.1, number, 3, 0, 2))
    controller.finish(request)
    return controller.state(request).hazards[0]


def test_drafts_of_the_first_tokens_say_little_of_the_rest() -> None:
    """They fall there, and stand later; where there is nothing else to learn from, they count."""
    controller = AutoController()
    controller.attach(Limits("model", 8, 8))
    known = controller.general[a_request().maker.greedy][0]
    for number in range(40):
        draft(controller, number % SETTLED, 0, number)
    assert FEW <= known.drafts < FEW + 1
    assert survival(1, Hazards(), known)[0] == pytest.approx(0.6 * 2 / (2 + known.drafts))
    for number in range(40, 80):
        draft(controller, SETTLED + number % 9, 2, number)
    assert survival(1, Hazards(), known)[0] > 0.65
    before = known.drafts
    draft(controller, SETTLED - 1, 0, 80)
    assert known.drafts < before


@pytest.mark.parametrize(("written", "tries"), [(0, False), (SETTLED, True), (16, True), (17, False)])
def test_a_model_is_tried_near_the_beginning_but_not_right_there(written: int, tries: bool) -> None:
    controller = AutoController()
    controller.attach(Limits("model", 8, 8, members=(replace(Limits("model", 8, 8), relative_cost=0.2),)))
    request = a_request(1)
    controller.state(request)  # it has read the prompt
    request.tokens.extend([0] * written)
    batch = controller._batch(1)
    batch.trials[0].left, batch.trials[0].due, batch.trials[-1].due, batch.round = 1, 0, 1000, 5
    assert (controller._due(batch, [request]) == 0) == tries


# -- plans that are about as good --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "member"), [(1.005, 0), (1.03, 1)])
def test_a_plan_is_left_for_one_that_is_clearly_better(more: float, member: int) -> None:
    controller = AutoController()
    controller.attach(Limits("router", 8, 64, members=(Limits("a", 8, 8), Limits("b", 8, 8))))
    controller.start_from(RoundCosts(TargetCost({1: 1.0, 9: 1.0})))
    mine, other = (Option(index, 2, 2.0 * rate, 3.0, 0.0, 1.0, seen=1e9) for index, rate in enumerate((1.0, more)))
    assert controller._best([other, mine, PLAIN], controller.costs, 1, current=[mine])[0].member == member
    assert controller._best([other, mine, PLAIN], controller.costs, 1)[0].member == 1


def test_how_long_a_plan_is_kept_by_hand() -> None:
    """Other lengths change nothing about it, other members do."""
    batch, found = Batch({}), []
    longer = replace(MODEL, depth=3)
    for plan in ([MODEL], [MODEL], [longer], [longer], [longer, COPY], [longer, COPY], []):
        batch.follow(plan, 64)
        found.append(batch.kept)
    assert found == [REPLAN, 2 * REPLAN, 2 * REPLAN, 4 * REPLAN, REPLAN, 2 * REPLAN, REPLAN]


# -- texts of one length -----------------------------------------------------------------------------------------------


def record(batch: int, seconds: float, round_: int) -> StepRecord:
    return StepRecord(0, 1, 0, 0, batch, 0.0, seconds, 0.0, seconds, round_, batch)


@pytest.mark.parametrize("ratio", [0.9, 1.0])
def test_what_plain_calls_cost_for_texts_of_one_length_is_learned_where_that_changes(ratio: float) -> None:
    rng, learned = random.Random(0), LearnedCosts(["model"])
    assert learned.even == EVEN
    for round_ in range(4000):
        even = round_ // 5 % 2 == 1
        seconds = (ratio if even else 1.0) * rng.lognormvariate(0.0, 0.02) * (2.0 if round_ > 2000 else 1.0)
        learned.observe(record(4, seconds, round_), None, 0, 0, even=even)
    assert learned.even == pytest.approx(ratio, abs=0.02)
    assert learned.target_s(4, 4, even=True) == learned.even * learned.target_s(4, 4)
    assert learned.speed.value * learned.target_s(4, 4) == pytest.approx(2.0, rel=0.05)


def test_texts_of_one_length() -> None:
    assert is_even([5, 5]) and not is_even([5, 6]) and not is_even([5])


@pytest.mark.parametrize(
    ("lengths", "learned", "tries"), [((9, 9), True, False), ((9, 10), True, True), ((9, 9), False, True)]
)
def test_trials_wait_where_all_texts_have_one_length(lengths: tuple[int, int], learned: bool, tries: bool) -> None:
    """But not the first ones, and not for ever."""
    controller = AutoController()
    controller.attach(Limits("copy", 8, 8))
    requests = [a_request(length, number) for number, length in enumerate(lengths)]
    batch = controller._batch(2)
    batch.trials[0].left, batch.trials[0].due, batch.trials[-1].due = 1 if learned else FIRST_TRIALS, 0, 1000
    batch.round = 5
    assert (controller._due(batch, requests) == 0) == tries
    batch.round = 300
    assert controller._due(batch, requests) == 0
