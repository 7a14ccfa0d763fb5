"""Controllers: their update rules, and that none of them changes the output's distribution."""

from __future__ import annotations

import random
import tracemalloc
from functools import cache

import pytest
import torch

from foretoken import registry
from foretoken.core import Budget, Context, Limits, Rng, StepRecord
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_controller
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.confidence import ConfidenceController, best_threshold
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.controllers.heuristic import HeuristicController
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.router import RouterDrafter
from toys import FALSE_ALARM, Distribution, engine, joint_distribution, outputs, sampled_p_value, tables

PROMPT = [0, 1, 2, 3, 0, 1]
MODES = {"T=1": SamplingParams(temperature=1.0), "T=0.6": SamplingParams(temperature=0.6)}


def context(request_id: int = 0) -> Context:
    return Context(request_id, [0], 1, Sampler(SamplingParams()), Rng(0))


def record(drafted: int, accepted: int, depth: int | None = None) -> StepRecord:
    """A round with a chain, or with a tree of ``depth`` levels."""
    depth = drafted if depth is None else depth
    return StepRecord(0, drafted + 1, drafted, accepted, 1, 0.0, 0.0, 0.0, 0.0, depth=depth)


# -- update rules ----------------------------------------------------------------------------------------------------


def test_constant_takes_its_length_from_the_drafter() -> None:
    controller = ConstantController()
    controller.attach(Limits("toy", 7, 33))
    assert controller.budget(context(), 1) == Budget(7, 33)


def test_constant_keeps_what_it_was_given() -> None:
    controller = ConstantController(k=3, nodes=9)
    controller.attach(Limits("toy", 7, 33))
    controller.observe(context(), record(3, 0))
    assert controller.budget(context(), 1) == controller.budget(context(), 8) == Budget(3, 9)


@pytest.mark.parametrize(
    ("options", "drafts"), [({}, True), ({"k": 1}, True), ({"k": 0}, False), ({"nodes": 0}, False)]
)
def test_constant_says_whether_it_drafts(options: dict[str, int], drafts: bool) -> None:
    assert ConstantController(**options).drafts is drafts


def test_heuristic_two_up_one_down() -> None:
    controller, request = HeuristicController(start=5), context()
    controller.attach(Limits("toy", 8, 64))
    lengths = []
    for drafted, accepted in [(5, 5), (7, 6), (6, 6), (8, 0), (7, 1), (6, 0)]:
        lengths.append(controller.budget(request, 1).max_depth)
        controller.observe(request, record(drafted, accepted))
    assert lengths == [5, 7, 6, 8, 7, 6]
    assert controller.budget(request, 1).max_depth == 5


def test_heuristic_grows_when_the_deepest_path_of_a_tree_was_accepted() -> None:
    """At most 3 of 14 nodes on 3 levels can be accepted."""
    controller, request = HeuristicController(start=3), context()
    controller.observe(request, record(14, 3, depth=3))
    assert controller.budget(request, 1).max_depth == 5
    controller.observe(request, record(14, 2, depth=3))
    assert controller.budget(request, 1).max_depth == 4


def test_heuristic_keeps_within_its_limits() -> None:
    controller, request = HeuristicController(start=4, low=2, high=7), context()
    for _ in range(5):
        controller.observe(request, record(4, 4))
    assert controller.budget(request, 1).max_depth == 7
    for _ in range(9):
        controller.observe(request, record(4, 3))
    assert controller.budget(request, 1).max_depth == 2


@pytest.mark.parametrize(("low", "high", "first"), [(1, 4, 4), (11, 20, 11), (1, 20, 9)])
def test_heuristic_begins_within_its_limits(low: int, high: int, first: int) -> None:
    """Also where the drafter's own length lies outside."""
    controller = HeuristicController(low=low, high=high)
    controller.attach(Limits("toy", 9, 64))
    assert controller.budget(context(), 1).max_depth == first


def test_heuristic_ignores_rounds_without_drafts() -> None:
    controller, request = HeuristicController(start=4), context()
    controller.observe(request, record(0, 0))
    assert controller.budget(request, 1).max_depth == 4


def test_heuristic_counts_every_request_for_itself() -> None:
    controller, first, second = HeuristicController(start=4), context(0), context(1)
    controller.observe(first, record(4, 4))
    assert (controller.budget(first, 2).max_depth, controller.budget(second, 2).max_depth) == (6, 4)


def test_heuristic_starts_from_the_drafter() -> None:
    controller = HeuristicController()
    controller.attach(Limits("toy", 9, 5))
    budget = controller.budget(context(), 1)
    assert budget.max_depth == 9 and budget.max_nodes >= 20
    controller.attach(Limits("another", 2, 5))
    assert controller.budget(context(), 1).max_depth == 2


def test_heuristic_persists_where_asked() -> None:
    controller, request = HeuristicController(start=4, persist=True), context(0)
    controller.observe(request, record(4, 4))
    controller.observe(request, record(6, 6))
    assert controller.budget(context(1), 1).max_depth == 8
    transient = HeuristicController(start=4)
    transient.observe(request, record(4, 4))
    assert transient.budget(context(1), 1).max_depth == 4
    controller.attach(Limits("another", 9, 5))
    assert controller.budget(context(2), 1).max_depth == 4


def test_confidence_stops_below_its_threshold() -> None:
    controller = ConfidenceController(0.25)
    controller.attach(Limits("toy", 6, 40))
    budget = controller.budget(context(), 1)
    assert (budget.max_depth, budget.max_nodes) == (6, 40)
    assert [budget.stops_after(None, chance) for chance in (0.24, 0.25)] == [True, False]
    fixed = ConfidenceController(0.25, k=3)
    fixed.attach(Limits("toy", 6, 40))
    assert fixed.budget(context(), 1).max_depth == 3


def test_the_threshold_that_separates_best() -> None:
    """By hand: accepted at .9, .8, .3, rejected at .7, .2, .1.  At .3 one of three rejected reaches it and no accepted
    one is missed: 1/3.  At .8 none reaches it and one of three is missed: 1."""
    seen = [(0.9, True), (0.8, True), (0.3, True), (0.7, False), (0.2, False), (0.1, False)]
    assert best_threshold(seen) == 0.3
    assert best_threshold([*seen[:2], (0.3, True), (0.35, False)]) == 0.8, "of equals (1 both) the larger one"
    assert best_threshold([(0.9, True), (0.2, False)]) == 0.9


def test_the_best_threshold_is_that_of_a_search_and_takes_memory_for_each_outcome_only() -> None:
    """A matrix of thresholds and outcomes took 10 ms after every round."""

    def errors(threshold: float) -> float:
        reached = [accepted for probability, accepted in seen if probability >= threshold]
        hits, accepts = sum(reached), sum(accepted for _, accepted in seen)
        return (len(reached) - hits) / (len(seen) - accepts) + 3.0 * ((accepts - hits) / accepts)

    rng = random.Random(0)
    for count in (2, 9, 40, 200):
        chances = [rng.choice([rng.random(), round(rng.random(), 1)]) for _ in range(count)]
        seen = [(0.5, True), (0.6, False), *((chance, rng.random() < chance) for chance in chances)]
        thresholds = sorted({probability for probability, _ in seen}, reverse=True)
        assert best_threshold(seen) == min(thresholds, key=errors)
    seen = [(rng.random(), bool(i % 2)) for i in range(1000)]
    tracemalloc.start()
    best_threshold(seen)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * len(seen)


def test_the_threshold_follows_what_is_accepted() -> None:
    controller, request = ConfidenceController(0.4), context()
    controller.attach(Limits("toy", 6, 40))

    def round_of(chances: list[float], accepted: int) -> None:
        budget = controller.budget(request, 1)
        for chance in chances:
            budget.stops_after(None, chance)
        controller.observe(request, record(len(chances), accepted)._replace(depth=len(chances)))

    round_of([0.9, 0.8, 0.7], 3)
    round_of([0.95, 0.5, 0.4], 1)  # .4 was never verified
    assert controller.threshold == 0.4, "five tokens are not enough"
    round_of([0.85, 0.2], 1)
    assert controller.threshold == 0.7
    controller.attach(Limits("another", 6, 40))
    round_of([0.9, 0.2], 1)
    assert controller.threshold == 0.4, "what was learned of the first drafter says nothing of another"
    fixed = ConfidenceController(0.4, adapt=False)
    fixed.attach(Limits("toy", 6, 40))
    controller = fixed
    for _ in range(5):
        round_of([0.9, 0.2], 1)
    assert fixed.threshold == 0.4


def test_a_budget_stops_after_the_unlikely_token() -> None:
    budget = Budget(5, 64, min_confidence=0.4)
    assert [budget.stops_after(None, chance) for chance in (0.39, 0.4, 0.41)] == [True, False, False]
    ruled = Budget(
        5, 64, stop=lambda distribution, chance: distribution is not None and float(distribution.max()) < 0.5
    )
    assert ruled.stops_after(torch.tensor([0.4, 0.3, 0.3]), 0.4) and not ruled.stops_after(
        torch.tensor([0.6, 0.4]), 0.4
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("constant", "k=-1"),
        ("constant", "nodes=-1"),
        ("heuristic", "start=0"),
        ("heuristic", "start=9,high=8"),
        ("heuristic", "start=2,low=3"),
        ("heuristic", "low=0"),
        ("heuristic", "low=5,high=4"),
        ("heuristic", "up=-1"),
        ("heuristic", "down=-1"),
        ("confidence", "threshold=1.5"),
        ("confidence", "threshold=-0.1"),
        ("confidence", "k=0"),
    ],
)
def test_bad_options(name: str, options: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} needs"):
        build_controller(f"{name},{options}")


# -- exactness: every controller of the registry ---------------------------------------------------------------------

CONTROLLERS = [row.example for row in registry.rows("controller") if not row.needs_training]
DRAFTERS = {"chain": {"k": 4}, "iid-tree": {"tree": "2x2x1", "draw": "iid"}, "wor-tree": {"tree": "2x2x1"}}


@cache
def distributions() -> dict[str, Distribution]:
    return {mode: joint_distribution(tables()[0], params, PROMPT, 4) for mode, params in MODES.items()}


def build(spec: str) -> Controller:
    controller: Controller = build_controller(spec)
    return controller


@pytest.mark.parametrize("shape", DRAFTERS)
@pytest.mark.parametrize(
    "spec", [*CONTROLLERS, "confidence,threshold=0.8,adapt=false", "heuristic,start=1,persist=true"]
)
def test_controllers_keep_the_distribution(spec: str, shape: str) -> None:
    """False alarm 1e-4."""
    target, draft = tables()
    speculative = engine(target, ModelDrafter(draft, **DRAFTERS[shape]), None, build(spec), max_batch=4)  # type: ignore[arg-type]
    assert sampled_p_value(speculative, MODES, distributions(), PROMPT, 4, 300) > FALSE_ALARM


@pytest.mark.parametrize("spec", CONTROLLERS)
def test_controllers_keep_greedy_outputs(spec: str) -> None:
    target, draft = tables()
    requests = [Request(prompt, max_new_tokens=40) for prompt in (PROMPT, [3], [2, 2, 2])]
    speculative = engine(target, ModelDrafter(draft, k=4), None, build(spec))
    assert outputs(speculative, requests) == outputs(engine(target), requests)


def group() -> RouterDrafter:
    """Like the default: a draft model and n-grams, of which the controller picks."""
    return RouterDrafter([ModelDrafter(tables()[1], k=4), NgramDrafter(n=2, k=3)])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spec", ["auto", "bandit,c=0.1"])
def test_a_controller_that_picks_drafters_keeps_the_distribution(spec: str, batch: int) -> None:
    """False alarm 1e-4."""
    picking = engine(tables()[0], group(), None, build(spec), max_batch=batch)
    assert sampled_p_value(picking, MODES, distributions(), PROMPT, 4, 300) > FALSE_ALARM


def test_auto_over_a_group_keeps_greedy_outputs_and_seeds() -> None:
    target = tables()[0]
    prompts = (PROMPT, [3], [2, 2, 2])
    greedy = [Request(prompt, max_new_tokens=40) for prompt in prompts]
    assert outputs(engine(target, group(), None, build("auto")), greedy) == outputs(engine(target), greedy)
    seeded = [Request(prompt, MODES["T=1"], 40, seed=i) for i, prompt in enumerate(prompts)]
    used = engine(target, group(), None, build("auto"))
    outputs(used, [Request(prompt, MODES["T=1"], 40) for prompt in prompts])  # it has learned from others
    alone = [outputs(engine(target, group(), None, build("auto")), [request])[0] for request in seeded]
    assert outputs(used, seeded) == alone


def test_a_controller_is_told_of_every_round() -> None:
    controller = build("constant")
    records: list[StepRecord] = []
    controller.observe = lambda context, record: records.append(record)  # type: ignore[method-assign]
    runner = engine(tables()[0], group(), None, controller)
    outputs(runner, [Request(PROMPT, max_new_tokens=20)])
    assert len(records) == runner.rounds > 0


def test_auto_keeps_nothing_of_a_finished_request() -> None:
    controller = build("auto")
    outputs(engine(tables()[0], group(), None, controller), [Request(PROMPT, max_new_tokens=20)])
    assert not controller._records  # type: ignore[attr-defined]
