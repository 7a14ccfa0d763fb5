"""The draft model that learns while it serves: what it learns from, when, and what is served meanwhile."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.learning.divergences import divergence
from foretoken.methods.drafters.learning.learner import LearnConfig, Learner
from foretoken.methods.drafters.learning.lessons import Lesson, Mistake, stored_distribution
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.online import OnlineDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models.base import CapabilityError, LanguageModel
from foretoken.models.huggingface import HuggingFaceModel
from toys import MarkovTable, engine, llama, llamas, next_logits, outputs, serve, tables

T1 = SamplingParams(temperature=1.0)
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3], [9, 1, 2, 3, 4, 9, 1, 2, 30, 17, 12], [0, 0]]
TREES: list[dict[str, Any]] = [
    {"k": 3},
    {"k": 3, "draw": "greedy"},
    {"tree": "3x2x1"},
    {"tree": "3x2x1", "draw": "iid"},
]


def online(draft: LanguageModel, **options: Any) -> OnlineDrafter:
    """One that learns between rounds, so that a run is the same every time."""
    return OnlineDrafter(draft, **{"thread": False, **options})


def weights_of(model: LanguageModel) -> list[torch.Tensor]:
    assert isinstance(model, HuggingFaceModel)
    return [weight.detach().clone() for weight in model.model.parameters()]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def learner_of(drafter: OnlineDrafter) -> Learner:
    assert drafter.learner is not None
    return drafter.learner


def collecting(drafter: OnlineDrafter) -> list[Lesson]:
    """All lessons that the drafter's learner gets, in order."""
    lessons: list[Lesson] = []
    learner = learner_of(drafter)
    finished = learner.finished

    def record(tokens: Sequence[int], mistakes: Sequence[Mistake]) -> None:
        lessons.append(Lesson(tokens, list(mistakes)))
        finished(tokens, mistakes)

    learner.finished = record  # type: ignore[method-assign]
    return lessons


def distribution_at(model: LanguageModel, tokens: Sequence[int]) -> torch.Tensor:
    return torch.softmax(next_logits(model, tokens).float(), -1)


# -- what is learnt from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", TREES)
@pytest.mark.parametrize("params", [SamplingParams(), T1, SamplingParams(temperature=0.7, top_k=5)])
def test_mistakes_are_the_recovered_tokens_with_the_distribution_before_them(
    options: dict[str, Any], params: SamplingParams
) -> None:
    """Bonus tokens are none, and the distribution is the target's own: no temperature, no filter."""
    target, draft = llamas()
    drafter = online(draft, target=target, every=100, top=0, **options)
    lessons = collecting(drafter)
    requests = [Request(prompt, params, 30, seed=i) for i, prompt in enumerate(PROMPTS)]
    runs = serve(engine(target, drafter, max_batch=3), requests)
    origins: set[str] = set()
    distances: list[float] = []
    for run in runs:
        (lesson,) = [lesson for lesson in lessons if list(lesson.tokens) == run.context.tokens]
        start = run.context.prompt_length
        recovered = [start + i for i, origin in enumerate(run.origins[:-1]) if origin == "recovered"]
        assert [mistake.position for mistake in lesson.mistakes] == recovered
        origins |= set(run.origins)
        for mistake in lesson.mistakes:
            distribution = distribution_at(target, lesson.tokens[: mistake.position])
            torch.testing.assert_close(stored_distribution(mistake), distribution, atol=2e-3, rtol=0)
            late = distribution_at(target, lesson.tokens[: mistake.position + 1])
            distances.append(float((stored_distribution(mistake) - late).abs().sum()))
    assert origins >= {"recovered", "accepted"}
    assert statistics.median(distances) > 0.2  # one position off is another distribution


def test_only_the_most_likely_tokens_are_stored() -> None:
    target, draft = llamas()
    learner = Learner(draft, LearnConfig(top=4))
    logits = next_logits(target, [1, 2, 3])
    mistake, distribution = learner.mistake(3, logits), torch.softmax(logits.float(), -1)
    kept = distribution.topk(4)
    assert mistake.tokens.tolist() == kept.indices.tolist() and mistake.probabilities.dtype == torch.half
    stored = stored_distribution(mistake)
    assert float(stored.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(stored[kept.indices], kept.values, atol=1e-3, rtol=0)
    others = torch.ones(32, dtype=torch.bool).index_fill(0, kept.indices, False)
    torch.testing.assert_close(stored[others], (1 - kept.values.sum()).expand(28) / 28, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("window", "first"), [(100, 0), (3, 4)])
def test_the_student_is_asked_before_the_token(window: int, first: int) -> None:
    """Its logits at t - 1 against the distribution for t, from the first tokens on or from a window of them."""
    target, draft = llamas()
    learner = Learner(draft, LearnConfig(window=window, top=0))
    tokens = [5, 6, 7, 8, 5, 6, 7, 8, 1, 2, 3, 4]
    places = (8, 9, 11)
    lesson = Lesson(tokens, [learner.mistake(t, next_logits(target, tokens[:t])) for t in places])
    losses = learner.losses(lesson).detach()

    def expected(shift: int) -> torch.Tensor:
        rows = [next_logits(draft, tokens[first : t + shift]).float() for t in places]
        distributions = [distribution_at(target, tokens[:t]).log() for t in places]
        return divergence("fkl", torch.stack(distributions), torch.stack(rows))

    torch.testing.assert_close(losses, expected(0), atol=5e-3, rtol=0)
    assert (losses - expected(1)).abs().max() > 0.1 and (losses - expected(-1)).abs().max() > 0.1


@pytest.mark.parametrize(("wide", "narrow"), [(40, 32), (32, 40)])
def test_other_widths_of_one_vocabulary(wide: int, narrow: int) -> None:
    """The tokens that both have are compared."""
    target, draft = HuggingFaceModel(llama(wide)), HuggingFaceModel(llama(narrow, seed=1))
    drafter = online(draft, k=3, target=target, every=1, budget=1.0)
    assert outputs(engine(target, drafter), [Request([1, 2, 3], max_new_tokens=20)] * 3) == outputs(
        engine(target), [Request([1, 2, 3], max_new_tokens=20)] * 3
    )
    assert drafter.report()["updates"] == 3 and drafter.report()["dropped"] == 0


@pytest.mark.parametrize("group", ["router", "ensemble"])
def test_in_a_group_the_positions_are_its_own(group: str) -> None:
    target, draft = llamas()
    drafter = online(draft, k=3, target=target, every=100, top=0)
    members = [NgramDrafter(n=2, k=3), drafter]
    whole = RouterDrafter(members) if group == "router" else EnsembleDrafter(members)
    lessons = collecting(drafter)
    serve(engine(target, whole), [Request(prompt, T1, 40, seed=i) for i, prompt in enumerate(PROMPTS)])
    mistakes = [(lesson.tokens[: m.position], m) for lesson in lessons for m in lesson.mistakes]
    assert len(mistakes) > 10
    for prefix, mistake in mistakes:
        torch.testing.assert_close(stored_distribution(mistake), distribution_at(target, prefix), atol=2e-3, rtol=0)


def test_inside_a_cascade_it_learns_from_the_model_that_it_drafts_for() -> None:
    target, draft = llamas()
    drafter = online(HuggingFaceModel(llama(noise=0.6)), k=2, target=target, every=100, top=0)
    lessons = collecting(drafter)
    serve(
        engine(target, CascadeDrafter(draft, drafter, inner_rule, k=4)),
        [Request(prompt, T1, 30, seed=i) for i, prompt in enumerate(PROMPTS)],
    )
    mistakes = [(lesson.tokens[: m.position], m) for lesson in lessons for m in lesson.mistakes]
    assert len(mistakes) > 5 and all(len(prefix) == m.position for prefix, m in mistakes)
    for prefix, mistake in mistakes:
        torch.testing.assert_close(stored_distribution(mistake), distribution_at(draft, prefix), atol=2e-3, rtol=0)


# -- it learns -------------------------------------------------------------------------------------------------------


def stream(count: int) -> Iterator[Request]:
    """Prompts of one domain: rotations of a few words."""
    chooser = random.Random(0)
    words = [[5, 6, 7], [1, 2], [3, 4, 0, 7], [3]]
    for seed in range(count):
        prompt = list(itertools.chain(*(chooser.choice(words) for _ in range(3))))
        yield Request(prompt, T1, 24, seed=seed)


def counting() -> MarkovTable:
    """A target of eight tokens that goes on in steps of three, four times in five: easy to learn."""
    return MarkovTable(lambda prefix: [0.79 if t == (prefix[-1] + 3) % 8 else 0.03 for t in range(8)], 8)


def toy(**options: Any) -> OnlineDrafter:
    """A random network of eight tokens that drafts chains."""
    draft = HuggingFaceModel(llama(8))
    return online(draft, **{"k": 3, "every": 2, "lr": 1e-2, "budget": 1.0, **options})


def acceptance(drafter: OnlineDrafter, count: int = 40) -> float:
    """The accepted share in the last third of a stream."""
    runs = serve(engine(counting(), drafter, max_batch=2), stream(count))[-count // 3 :]
    return sum(run.stats.num_accepted_tokens for run in runs) / sum(run.stats.num_draft_tokens for run in runs)


@cache
def without_learning() -> float:
    return acceptance(toy(every=0))


@cache
def with_learning() -> float:
    return acceptance(toy())


@pytest.mark.parametrize("loss", ["fkl", "rkl", "jsd", "tvd"])
def test_acceptance_rises_on_a_stationary_stream(loss: str) -> None:
    rate = with_learning() if loss == "fkl" else acceptance(toy(loss=loss))
    assert rate > without_learning() + 0.15


def test_labels_one_position_off_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the published code asks the student at the correction token instead of before it."""
    gained = with_learning() - without_learning()  # before the mistake is made: the rates are kept
    mistake = Learner.mistake
    monkeypatch.setattr(Learner, "mistake", lambda self, position, logits: mistake(self, position + 1, logits))
    drafter = toy()
    wrong = acceptance(drafter)
    assert drafter.report()["updates"] == 20
    assert wrong - without_learning() < 0.3 * gained


# -- what is served --------------------------------------------------------------------------------------------------


def test_the_learnt_weights_are_served_and_the_given_model_stays() -> None:
    target, draft = llamas(torch.float32)
    before, goal = weights_of(draft), weights_of(target)
    drafter = online(draft, k=3, target=target, every=4, budget=1.0)
    learner = learner_of(drafter)
    served = learner.served
    assert drafter.model is served and served is not draft and served.is_lean
    serve(engine(target, drafter, max_batch=1), itertools.islice(stream(4), 3))
    assert same(weights_of(served), before) and drafter.report()["updates"] == 0
    serve(engine(target, drafter), stream(1))
    assert drafter.report()["updates"] == 1
    assert not same(weights_of(served), before)
    assert same(weights_of(served), [weight.detach() for weight in learner.student.parameters()])
    assert same(weights_of(draft), before) and same(weights_of(target), goal)
    # What runs is the lean forward: its fused copies are the new weights too.
    public = HuggingFaceModel(served.model, lean=False)
    text = [5, 6, 7, 1, 2]
    torch.testing.assert_close(next_logits(served, text), next_logits(public, text), atol=1e-4, rtol=0)
    assert (next_logits(served, text) - next_logits(draft, text)).abs().max() > 1e-3


def test_the_distribution_of_a_draft_is_that_of_the_weights_it_was_drawn_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run on while weights change; the recorded q is what the served model says in that very round."""
    target, draft = llamas()
    drafter = online(draft, k=2, target=target, every=1, lr=1e-2, budget=1.0)
    changed: list[int] = []
    observe = OnlineDrafter.observe

    def checked(self: OnlineDrafter, context: Any, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        assert tree.q is not None
        changed.append(self.report()["updates"])
        observe(self, context, tree, scores, verdict)

    monkeypatch.setattr(OnlineDrafter, "observe", checked)
    requests = [Request(prompt, T1, 8 + 8 * i, seed=i) for i, prompt in enumerate(PROMPTS)]
    serve(engine(target, drafter, BlockVerifier(), max_batch=4), requests)
    assert len(set(changed)) >= 3  # updates fell between rounds of running requests


def test_an_update_that_is_not_finite_is_dropped() -> None:
    target, draft = llamas(torch.float32)
    drafter = online(draft, k=3, target=target, every=1, budget=1.0)
    learner = learner_of(drafter)
    before = weights_of(learner.served)
    good = learner.mistake(3, next_logits(target, [5, 6, 7]))
    broken = Mistake(3, 32, good.tokens, torch.full_like(good.probabilities, math.nan))
    learner.lessons.append(Lesson([5, 6, 7], [good]))
    learner.lessons.append(Lesson([5, 6, 7], [broken]))
    assert learner.update() is False
    assert same(weights_of(learner.served), before) and not learner.lessons
    assert same([w.detach() for w in learner.student.parameters()], before)
    assert all(weight.grad is None for weight in learner.student.parameters())
    learner.lessons.append(Lesson([5, 6, 7], [good]))
    assert learner.update() is True
    assert not same(weights_of(learner.served), before)
    report = drafter.report()
    assert (report["updates"], report["dropped"], report["positions"]) == (1, 1, 1)


def failing_behind_the_first(losses: Callable[[Lesson], torch.Tensor]) -> Callable[[Lesson], torch.Tensor]:
    """The first lesson has left its gradients when memory is full."""
    lessons: list[Lesson] = []

    def some(lesson: Lesson) -> torch.Tensor:
        lessons.append(lesson)
        if len(lessons) > 1:
            raise MemoryError
        return losses(lesson)

    return some


def test_an_update_that_fails_half_way_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas(torch.float32)
    lost_text, kept_text = ([5, 6, 7], [9, 1, 2])
    changed = []
    for fails in (False, True):
        learner = Learner(draft, LearnConfig())
        first, second = (
            Lesson(text, [learner.mistake(3, next_logits(target, text))]) for text in (lost_text, kept_text)
        )
        if fails:
            losses = learner.losses
            monkeypatch.setattr(learner, "losses", failing_behind_the_first(losses))
            with pytest.raises(MemoryError):
                learner._learned([first, second])
            monkeypatch.setattr(learner, "losses", losses)
        learner.lessons.append(second)
        assert learner.update() is True
        changed.append(weights_of(learner.served))
    assert same(*changed)


def test_weights_that_became_not_finite_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas(torch.float32)
    learner = Learner(draft, LearnConfig())
    before = weights_of(learner.served)

    def explode() -> None:
        with torch.no_grad():
            next(learner.student.parameters()).fill_(math.inf)

    monkeypatch.setattr(learner.optimizer, "step", explode)
    for result in (False, True):  # the second one has a new optimizer
        learner.lessons.append(Lesson([5, 6, 7], [learner.mistake(3, next_logits(target, [5, 6, 7]))]))
        assert learner.update() is result
        assert same([w.detach() for w in learner.student.parameters()], weights_of(learner.served))
        assert same(weights_of(learner.served), before) is not result


# -- when it learns --------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(monkeypatch: pytest.MonkeyPatch, cost_s: float, **config: Any) -> tuple[Learner, Clock, list[float]]:
    """A learner on a clock of its own, whose updates take ``cost_s``; and when they happened."""
    clock, happened = Clock(), []
    learner = Learner(llamas()[1], LearnConfig(thread=False, **config), clock=clock)

    def update() -> bool:
        happened.append(clock.now)
        learner.lessons.clear()
        learner._since = 0
        clock.now += cost_s
        return True

    monkeypatch.setattr(learner, "update", update)
    return learner, clock, happened


def serve_one(learner: Learner, clock: Clock, seconds: float) -> None:
    learner.joined()
    clock.now += seconds
    learner.finished([1, 2, 3], [learner.mistake(2, torch.zeros(32))])
    learner.left()


def test_updates_come_every_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, clock, happened = timed(monkeypatch, 0.0, every=3)
    for _ in range(10):
        serve_one(learner, clock, 1.0)
    assert happened == [3.0, 6.0, 9.0]
    assert learner.report()["requests"] == learner.report()["mistakes"] == 10


def test_the_budget_postpones_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of 5 s every 2 requests of 10 s would be a fifth; the budget is a tenth of all serving time."""
    learner, clock, happened = timed(monkeypatch, 5.0, every=2, budget=0.1)
    for _ in range(40):
        serve_one(learner, clock, 10.0)
        report = learner.report()
        assert report["serving_s"] == clock.now
        assert len(happened) == 1 or report["learning_s"] <= 0.1 * report["serving_s"]
    # The first one is tried: nobody knows yet what it costs.  Then another one fits when a tenth of the time is enough
    # for both, at 100 s, and so on.
    assert happened == [20.0, 105.0, 150.0, 205.0, 250.0, 305.0, 350.0, 405.0]
    assert learner.report()["postponed"] > 10


def test_time_without_requests_buys_no_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, clock, happened = timed(monkeypatch, 5.0, every=1, budget=0.1)
    serve_one(learner, clock, 10.0)
    clock.now += 10_000.0  # idle
    serve_one(learner, clock, 10.0)
    assert happened == [10.0] and learner.report()["serving_s"] == 25.0


def test_overlapping_requests_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, clock, _ = timed(monkeypatch, 0.0, every=9)
    learner.joined()
    clock.now += 2.0
    learner.joined()
    clock.now += 3.0
    assert learner.serving_s == 5.0
    learner.left()
    clock.now += 1.0
    learner.left()
    clock.now += 50.0
    assert learner.serving_s == 6.0


def test_a_budget_of_one_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, clock, happened = timed(monkeypatch, 500.0, every=1, budget=1.0)
    for _ in range(5):
        serve_one(learner, clock, 1.0)
    assert len(happened) == 5


def test_old_requests_fall_out() -> None:
    learner = Learner(llamas()[1], LearnConfig(every=100, keep=3))
    for i in range(7):
        learner.finished([i, 2, 3], [learner.mistake(2, torch.zeros(32))])
    assert [lesson.tokens[0] for lesson in learner.lessons] == [4, 5, 6]
    learner.finished([9, 9, 9], [])  # nothing went wrong: nothing to learn
    assert len(learner.lessons) == 3


# -- in a thread of its own -------------------------------------------------------------------------------------------


class Held:
    """A learner whose updates begin when they are asked for and end when they are let go."""

    def __init__(self, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.free = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        backward = learner._backward

        def held(lessons: Sequence[Lesson]) -> float:
            self.threads.add(threading.current_thread().name)
            self.began.set()
            assert self.free.wait(60)
            return backward(lessons)

        monkeypatch.setattr(learner, "_backward", held)


def test_serving_goes_on_while_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is served from the next draft on, all of it at once; the text stays the same."""
    target, draft = llamas(torch.float32)
    drafter = OnlineDrafter(draft, k=3, target=target, every=1, lr=1e-2, budget=1.0)
    learner = learner_of(drafter)
    held, before = Held(learner, monkeypatch), weights_of(drafter.model)
    plain = [outputs(engine(target), [request])[0] for request in stream(4)]
    serving, requests = engine(target, drafter), list(stream(4))
    for request, expected in zip(requests[:3], plain, strict=False):
        assert outputs(serving, [request])[0] == expected
        assert held.began.wait(60)
        assert same(weights_of(drafter.model), before) and drafter.report()["updates"] == 0
    held.free.set()
    concurrent.futures.wait([learner._coming] if learner._coming else [])
    assert same(weights_of(drafter.model), before), "it is taken between two rounds, not whenever it is done"
    assert outputs(serving, [requests[3]])[0] == plain[3]
    assert drafter.report()["updates"] >= 1 and not same(weights_of(drafter.model), before)
    learner.take(wait=True)
    text = [5, 6, 7, 1, 2]
    public = HuggingFaceModel(learner.served.model, lean=False)
    torch.testing.assert_close(next_logits(drafter.model, text), next_logits(public, text), atol=1e-4, rtol=0)
    assert same(weights_of(drafter.model), [weight.detach() for weight in learner.student.parameters()])
    assert held.threads == {"foretoken-online_0"}


def test_its_thread_uses_one_processor_and_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas(torch.float32)
    drafter = OnlineDrafter(draft, k=3, target=target, every=1, budget=1.0)
    learner, threads = learner_of(drafter), dict[str, int]()
    backward = learner._backward
    monkeypatch.setattr(
        learner, "_backward", lambda lessons: threads.update(learning=torch.get_num_threads()) or backward(lessons)
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        serve(engine(target, drafter), stream(1))
        learner.take(wait=True)
        later = threading.Thread(target=lambda: threads.update(later=torch.get_num_threads()))
        later.start()
        later.join()
        assert threads == {"learning": 1, "later": 3} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_update_that_fails_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas(torch.float32)
    drafter = OnlineDrafter(draft, k=3, target=target, every=1, budget=1.0)
    learner, before = learner_of(drafter), weights_of(drafter.model)

    def full(lessons: Sequence[Lesson]) -> float:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_backward", full)
        serve(engine(target, drafter), stream(1))
        with pytest.warns(UserWarning, match="could not be updated: planted"):
            learner.take(wait=True)
    assert drafter.report()["dropped"] == 1 and same(weights_of(drafter.model), before)
    serve(engine(target, drafter), stream(2))
    learner.take(wait=True)
    assert drafter.report()["updates"] >= 1 and not same(weights_of(drafter.model), before)


# -- seeds and verifiers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["greedy", "iid"])
def test_a_seed_fixes_the_output_whatever_was_learnt(draw: str) -> None:
    target, draft = llamas()
    request = Request(PROMPTS[0], T1, 30, seed=7)
    learning = online(draft, k=3, draw=draw, target=target, every=1, lr=1e-2, budget=1.0)
    speculative = engine(target, learning)
    texts = {tuple(outputs(speculative, [request])[0]) for _ in range(6)}
    assert learning.traits.shares_state and learning.report()["updates"] == 6
    assert texts == {tuple(outputs(engine(target), [request])[0])}


def test_switched_off_it_is_the_drafter_model() -> None:
    target, draft = llamas()
    off = online(draft, k=3, target=target, every=0)
    assert off.model is draft and not off.traits.shares_state and off.report() == {} and off.learner is None
    requests = [Request(prompt, T1, 20, seed=i) for i, prompt in enumerate(PROMPTS)]
    assert outputs(engine(target, off), requests) == outputs(engine(target, ModelDrafter(draft, k=3)), requests)
    with pytest.raises(ValueError, match="nothing was learnt with every=0"):
        off.save("anywhere")


# -- saving ----------------------------------------------------------------------------------------------------------


def test_every_update_is_saved_and_loads_as_a_draft_model(tmp_path: Path) -> None:
    target, draft = llamas(torch.float32)
    folder = tmp_path / "learnt"
    drafter = online(draft, k=3, target=target, every=2, budget=1.0, save=str(folder))
    assert folder.is_dir() and not list(folder.iterdir())  # a wrong path would have failed before any work
    serve(engine(target, drafter), stream(2))
    assert not list(folder.glob(".*"))
    loaded = load_model(folder, role="draft")
    text = [5, 6, 7, 1, 2]
    torch.testing.assert_close(next_logits(loaded, text), next_logits(drafter.model, text), atol=1e-4, rtol=0)
    first = load_file(folder / "model.safetensors")
    serve(engine(target, drafter), stream(2))
    second = load_file(folder / "model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)
    drafter.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "llama"


def test_a_full_disk_does_not_stop_the_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = llamas(torch.float32)
    drafter = online(draft, k=3, target=target, every=1, budget=1.0, save=str(tmp_path))
    served = learner_of(drafter).served

    def fail(network: Any, folder: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(type(served.model), "save_pretrained", fail)
    with pytest.warns(UserWarning, match="not saved: no space left"):
        serve(engine(target, drafter), stream(1))
    assert drafter.report()["updates"] == 1 and not list(tmp_path.iterdir())


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": -1}, "every >= 0"),
        ({"lr": 0.0}, "lr > 0"),
        ({"loss": "mse"}, "unknown loss 'mse': choose one of fkl, rkl, jsd, tvd"),
        ({"beta": 0.0}, "beta must be between 0 and 1"),
        ({"budget": 0.0}, "budget in"),
        ({"budget": 1.5}, "budget in"),
        ({"keep": 0}, "keep >= 1"),
        ({"window": 0}, "window >= 1"),
        ({"top": -1}, "top >= 0"),
        ({"k": 0}, "k >= 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    target, draft = llamas()
    with pytest.raises(ValueError, match=words) as error:
        online(draft, target=target, **options)
    assert "\n" not in str(error.value)


def test_what_has_no_weights_cannot_learn() -> None:
    with pytest.raises(CapabilityError, match="weights"):
        online(tables()[1])
    online(tables()[1], every=0)


def test_from_a_spec() -> None:
    target = load_model("builtin", dtype="float32")
    drafter = build_drafter("online,k=3,every=2,lr=1e-3,loss=jsd,beta=.3,budget=.2,window=64", target)
    assert isinstance(drafter, OnlineDrafter) and drafter.max_depth == 3
    assert learner_of(drafter).config == LearnConfig(2, 1e-3, "jsd", 0.3, 0.2, window=64)
    with pytest.raises(ValueError, match="unknown option 'evry' of drafter 'online'"):
        build_drafter("online,evry=2", target)
    with pytest.raises(ValueError, match="needs a path for this target: online:PATH"):
        build_drafter("online", target, target_source="elsewhere")
