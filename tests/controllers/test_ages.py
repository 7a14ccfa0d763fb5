"""What `auto` expects of texts by how much of them is written, and of lengths that it did not ask for."""

from __future__ import annotations

import random

import pytest

from foretoken.controllers.auto import AutoController, age_of, nodes_like
from foretoken.controllers.hazards import Hazards, at_age, survival
from foretoken.controllers.plans import Option
from foretoken.controllers.trials import Mean
from foretoken.sampling import Sampler, SamplingParams
from foretoken.types import Context, Limits, Rng, StepRecord

WORTHLESS = Option(0, 6, 1.0, 7.0, 0.0, 1.0)


def a_request(written: int, number: int = 0) -> Context:
    """A sampled request with a prompt of one token that has written so many."""
    return Context(number, [0] * (1 + written), 1, Sampler(SamplingParams(temperature=1.0)), Rng(number))


def drafting(controller: AutoController, request: Context, stood: int, drafted: int = 6) -> None:
    """A round in which so many tokens of a draft of six stood."""
    controller.budgets([request])
    controller._planning_s = 0.0
    controller.state(request).plan = [WORTHLESS]
    request.tokens.extend([0] * (1 + stood))
    record = StepRecord(request.request_id, 1 + drafted, drafted, stood, 1, 0.01, 1.0, 0.0, 1.02, 1, 7, -1, drafted)
    controller.observe(request, record)


def one_drafter() -> AutoController:
    """A controller of one drafter of six tokens."""
    controller = AutoController()
    controller.attach(Limits("copy", 6, 6))
    return controller


def test_how_far_drafts_stand_at_an_age_by_hand() -> None:
    """As many drafts as in general; nothing is said of places that none reached at that age."""
    general = Hazards([20.0, 16.0, 8.0], [16.0, 8.0, 4.0])
    found = at_age(general, Hazards([16.0, 4.0], [4.0, 1.0]), weight=16.0)
    assert found.tries == general.tries
    assert found.hits == pytest.approx([20 * (4 + 16 * 0.8) / 32, 16 * (1 + 16 * 0.5) / 20, 4.0])
    assert at_age(general, Hazards()).hits == pytest.approx(general.hits)
    doubled = Hazards([32.0, 8.0], [8.0, 2.0], unit=2.0)  # the same, counted in other units
    assert at_age(general, doubled, weight=16.0).hits == pytest.approx(found.hits)
    assert at_age(Hazards(), Hazards([2.0], [1.0])).hits == []


@pytest.mark.parametrize(("early", "late"), [(1, 5), (5, 1), (3, 3)])
def test_drafts_are_expected_to_stand_as_far_as_they_did_at_that_age(early: int, late: int) -> None:
    controller = one_drafter()
    for number in range(12):
        request = a_request(0, number)
        while len(request.tokens) < 64:
            drafting(controller, request, early if len(request.tokens) <= 16 else late)
        controller.finish(request)
    young, old = (sum(survival(6, Hazards(), controller._general([a_request(w, 90)])[0])) for w in (8, 40))
    assert (young < old - 1, old < young - 1) == (early < late, late < early)


def test_a_kept_plan_ends_when_the_text_is_four_times_as_long() -> None:
    """It was made by what is usual for its age."""
    controller = one_drafter()
    request = a_request(4)
    controller.state(request).fresh = False
    batch = controller._batch(1)
    planned = []
    for written in range(4, 68):
        for trial in batch.trials.values():
            trial.due = batch.round + 1000
        before = batch.until
        controller.budgets([request])
        if batch.until != before:
            planned.append(written)
        controller._steady, batch.until = True, batch.round + 1000  # nothing else makes it plan again
        request.tokens.append(0)
    assert planned == [4, 8, 32]


@pytest.mark.parametrize(("size", "times"), [(1, 2), (2, 1)])
def test_only_a_request_that_is_alone_is_planned_for_again_at_its_beginning(size: int, times: int) -> None:
    """It drafts then, whatever is known of others; in a batch, they would wait for it."""
    controller = one_drafter()
    controller.budgets([a_request(32, 10 + number) for number in range(size)])
    requests = [a_request(32, number) for number in range(size)]
    batch, planned = controller._batch(size), 0
    batch.kept = 16  # the plan has been the same for long
    for _ in range(8):
        for trial in batch.trials.values():
            trial.due = batch.round + 1000
        before = batch.until
        controller.budgets(requests)
        planned += batch.until != before
        for request in requests:
            request.tokens.append(0)
    assert planned == times


def test_nodes_of_lengths_that_were_not_asked_for_by_hand() -> None:
    """N-grams that find five of eight tokens are not taken to find six of six."""
    assert nodes_like({}, 6) == 7.0
    known = {2: Mean(3.0, 1.0), 8: Mean(6.0, 1.0)}
    assert nodes_like(known, 6) == pytest.approx(1 + 6 * 5 / 8)
    assert nodes_like(known, 3) == pytest.approx(4.0)
    assert nodes_like(known, 16) == pytest.approx(11.0)
    assert nodes_like({2: Mean(9.0, 1.0)}, 3) == pytest.approx(13.0)  # a tree


def test_a_length_that_was_not_asked_for_is_priced_by_what_others_find() -> None:
    """It would else look dearer than a longer one that finds no more."""
    controller = one_drafter()
    for number in range(8):
        drafting(controller, a_request(20, number), 2, drafted=3)
    controller.finish(a_request(20))
    general = controller._general([a_request(20)])[0]
    nodes = {o.depth: o.nodes for o in controller._options(0, Hazards(), general, controller.costs, 1)}
    assert nodes[6] == pytest.approx(4.0) and nodes[4] == pytest.approx(3.0)


def test_a_draft_that_the_end_cut_short_did_not_fail_there() -> None:
    controller = one_drafter()
    request = a_request(8)
    request.max_length = len(request.tokens) + 3
    drafting(controller, request, 2, drafted=2)
    controller.finish(request)
    for known in (controller.general[request.maker.greedy][0], controller.ages[request.maker.greedy, 0, age_of(8)]):
        assert known.in_rounds()[:2] == ([1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("apart", "drafts"), [(0.0, True), (0.3, False)])
def test_how_alike_requests_are_decides_what_a_few_drafts_say(apart: float, drafts: bool) -> None:
    """Twenty drafts in vain: bad luck where requests were alike, one that is unlike them where they were not."""
    controller, rng = AutoController(), random.Random(0)
    controller.attach(Limits("copy", 1, 1, relative_cost=0.2))

    def play(number: int, accepts: list[float]) -> bool:
        """Whether it drafts in the end."""
        request = a_request(0, number)
        for round_, chance in enumerate(accepts):
            depth = controller.budgets([request])[0].max_depth
            controller._planning_s = 0.0
            stood, draft_s = int(depth > 0 and rng.random() < chance), 0.2 * depth
            request.tokens.extend([0] * (1 + stood))
            times = (draft_s, 1.0, 0.0, 1.0 + draft_s)
            controller.observe(request, StepRecord(number, 1 + depth, depth, stood, 1, *times, round_, 1 + depth))
        drafting = controller.budgets([request])[0].max_depth > 0
        controller.finish(request)
        return drafting

    for number in range(120):
        play(number, [0.6 + rng.choice((-apart, apart))] * 60)
    assert play(999, [0.6] * 8 + [0.0] * 20) == drafts
