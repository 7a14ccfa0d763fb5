"""Rules that end a draft early: signals and updates by hand, what drafters show them, and the output's distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from foretoken.core import Budget, Context, Limits, Rng, Scores, StepRecord, TokenTree, Verdict
from foretoken.core.budget import MovingThreshold
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_controller
from foretoken.methods.controllers.adaedl import AdaedlController
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.draft_verify import DraftVerifyController
from foretoken.methods.controllers.stopping import entropy, levels, margin, top
from foretoken.methods.controllers.svip import SvipController
from foretoken.methods.controllers.tapout import RULES, Played, Rules, TapoutController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.drafters.swift import SwiftDrafter
from foretoken.methods.verifiers.compatibility import auto_verifier
from foretoken.models.base import LanguageModel
from toys import (  # fmt: skip
    CAUGHT,
    FALSE_ALARM,
    Distribution,
    MarkovTable,
    engine,
    fixed_tables,
    joint_distribution,
    llamas,
    outputs,
    sampled_p_value,
    serve,
    tables,
)

PROMPT = [0, 1, 2, 3, 0, 1]
MODES = {"T=1": SamplingParams(temperature=1.0), "T=0.6": SamplingParams(temperature=0.6)}
NAMES = ("draft_verify", "adaedl", "svip", "tapout")


def context(temperature: float = 0.0) -> Context:
    return Context(0, [0], 1, Sampler(SamplingParams(temperature=temperature)), Rng(0))


def record(drafted: int, accepted: int, nodes: int | None = None) -> StepRecord:
    drafts = drafted if nodes is None else nodes
    return StepRecord(0, drafts + 1, drafts, accepted, 1, 0.0, 0.0, 0.0, 0.0, depth=drafted)


def distribution(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64)


def build(spec: str) -> Controller:
    controller: Controller = build_controller(spec)
    return controller


# -- signals ---------------------------------------------------------------------------------------------------------


def test_signals_of_a_distribution() -> None:
    half = distribution(0.5, 0.25, 0.25, 0.0)
    assert entropy(half, 0.25) == pytest.approx(1.5 * math.log(2))
    assert (top(half, 0.25), margin(half, 0.25)) == (0.5, 0.25)
    sure = distribution(0.0, 1.0)
    assert (entropy(sure, 1.0), top(sure, 1.0), margin(sure, 1.0)) == (0.0, 1.0, 1.0)


def test_signals_without_a_distribution_come_from_the_token() -> None:
    assert entropy(None, 0.25) == pytest.approx(math.log(4))
    assert (top(None, 0.25), margin(None, 0.25), margin(None, 0.75)) == (0.25, 0.0, 0.5)
    assert entropy(None, 1.0) == 0.0 and math.isfinite(entropy(None, 0.0))
    assert margin(distribution(1.0), 1.0) == 1.0


def test_the_surprise_is_the_entropy_on_average() -> None:
    chances = distribution(0.6, 0.3, 0.1)
    mean = sum(float(q) * entropy(None, float(q)) for q in chances)
    assert mean == pytest.approx(entropy(chances, 0.6))


@pytest.mark.parametrize(("shape", "drafted"), [((3, 3), 3), ((3, 14), 3), ((4, 2), 2), ((2, 0), 0)])
def test_trees_count_by_their_depth_and_probes_not(shape: tuple[int, int], drafted: int) -> None:
    depth, nodes = shape
    assert levels(record(depth, 0, nodes)) == drafted


# -- draft_verify ----------------------------------------------------------------------------------------------------


def test_the_bar_by_hand() -> None:
    bar = MovingThreshold(0.5)
    bar.update(4, 2, cap=8)  # rate .25, below the aim
    assert (bar.rate, bar.value) == pytest.approx((0.25, 0.501))
    for _ in range(3):
        bar.update(4, 4, cap=8)  # .625, .8125, .90625
    assert (bar.rate, bar.value) == pytest.approx((0.90625, 0.502))
    bar.update(8, 8, cap=8)  # nothing stopped this draft
    assert (bar.rate, bar.value) == pytest.approx((0.953125, 0.502))


def test_the_bar_stays_where_signals_are() -> None:
    high, low = MovingThreshold(0.9995), MovingThreshold(0.0005, rate=1.0)
    for _ in range(9):
        high.update(2, 0, cap=8)
        low.update(2, 2, cap=8)
    assert (high.value, low.value) == (1.0, 0.0)


def test_draft_verify_holds_greedy_requests_to_more() -> None:
    controller = DraftVerifyController()
    controller.attach(Limits("toy", 6, 40))
    greedy, sampled = controller.budget(context(), 1), controller.budget(context(1.0), 1)
    assert (greedy.max_depth, greedy.max_nodes) == (6, 40)
    seven = distribution(0.7, 0.2, 0.1)
    # The token's own probability does not matter where there is a distribution.
    assert greedy.stops_after(seven, 0.7) and not sampled.stops_after(seven, 0.1)
    assert sampled.stops_after(None, 0.1) and not sampled.stops_after(None, 0.7)


def test_draft_verify_learns_per_request() -> None:
    controller, first, second = DraftVerifyController(threshold=0.5, k=4), context(), context()
    controller.attach(Limits("toy", 8, 64))
    controller.observe(first, record(4, 0))
    controller.observe(first, record(0, 0))
    assert (controller.bar(first).value, controller.bar(second).value) == pytest.approx((0.501, 0.5))
    edge = distribution(0.5005, 0.4995)
    assert controller.budget(first, 2).stops_after(edge, 0.5) and not controller.budget(second, 2).stops_after(
        edge, 0.5
    )


@pytest.mark.parametrize(("k", "limit", "cap"), [(None, 6, 6), (4, 6, 4), (9, 6, 6)])
def test_the_cap_is_what_the_drafter_reaches(k: int | None, limit: int, cap: int) -> None:
    controller = DraftVerifyController(k=k)
    controller.attach(Limits("toy", limit, 64))
    assert controller.budget(context(), 1).max_depth == cap
    request = context()
    controller.bar(request).rate = 1.0
    controller.observe(request, record(cap, cap))
    assert controller.bar(request).value == 0.8  # the cap ended the draft, not the bar


# -- adaedl and svip -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "stops"), [(1, False), (6, False), (7, True)])
def test_adaedl_by_hand(words: int, stops: bool) -> None:
    """1 - sqrt(.2 ln 6) = .401 and 1 - sqrt(.2 ln 7) = .376, on both sides of the first bar of .4."""
    uniform = torch.full((words,), 1.0 / words, dtype=torch.float64)
    budget = AdaedlController().budget(context(), 1)
    assert budget.stops_after(uniform, 1.0 / words) is stops
    assert budget.stops_after(None, 1.0 / words) is stops


def test_adaedl_moves_its_bar() -> None:
    controller, request = AdaedlController(), context()
    for _ in range(3):
        controller.observe(request, record(5, 1))
    six = torch.full((6,), 1 / 6, dtype=torch.float64)
    assert controller.bar(request).value == pytest.approx(0.403)
    assert controller.budget(request, 1).stops_after(six, 1 / 6)  # .401 is below the bar by now


@pytest.mark.parametrize(("chance", "stops"), [(0.72, False), (0.70, True)])
def test_svip_by_hand(chance: float, stops: bool) -> None:
    """Entropies .593 and .611 nats: the bar of .3 with coefficient .15 is at .6."""
    budget = SvipController().budget(context(), 1)
    assert budget.stops_after(distribution(chance, 1 - chance), chance) is stops


def test_svip_never_changes() -> None:
    controller, request = SvipController(), context()
    controller.attach(Limits("toy", 50, 99))
    controller.observe(request, record(40, 0))
    assert controller.budget(request, 1).max_depth == 50
    assert controller.highest == pytest.approx(0.6)


# -- tapout ----------------------------------------------------------------------------------------------------------


def test_the_five_rules_disagree() -> None:
    uniform7 = torch.full((7,), 1 / 7, dtype=torch.float64)
    for q, stops in [
        (distribution(0.96, 0.04), (False, False, False, False, False)),
        (distribution(0.7, 0.3), (False, False, False, True, False)),
        (distribution(0.55, 0.45), (False, False, False, True, True)),
        (distribution(0.65, 0.1, 0.1, 0.1, 0.05), (False, True, False, True, False)),
        (distribution(0.45, 0.35, 0.2), (True, True, False, True, True)),
        (uniform7, (True, True, True, True, True)),
    ]:
        assert tuple(rule(q, float(q.max())) for rule in RULES) == stops


def test_ucb1_by_hand() -> None:
    """t = 8: means .5, .7, .6 after 4, 2, 2 rounds; bounds 1.52, 2.14, 2.04."""
    rules = Rules([Played(4, 2.0), Played(2, 1.4), Played(2, 1.2)])
    assert rules.best() == 1
    rules.played[1] = Played(6, 4.2)  # t = 12: 1.61, 1.61, 2.18
    assert rules.best() == 2
    rules.played.append(Played())
    assert rules.best() == 3


def test_tapout_plays_every_rule_once_and_then_the_best() -> None:
    controller, request = TapoutController(k=8), context()
    controller.attach(Limits("toy", 8, 64))
    order = []
    for _ in range(60):
        controller.budget(request, 1)
        playing = controller.rules(request).playing
        order.append(playing)
        controller.observe(request, record(6, 6) if playing == 3 else record(6, 1))
    assert order[:5] == [0, 1, 2, 3, 4]
    assert order[30:].count(3) > 15
    assert controller.rules(request).played[3].reward == pytest.approx(order.count(3) * (6 / 8 + 1) / 2)
    assert all(not played.rounds for played in controller.rules(context()).played)


def test_tapout_ignores_rounds_without_drafts() -> None:
    controller, request = TapoutController(), context()
    controller.budget(request, 1)
    controller.observe(request, record(0, 0))
    assert all(not played.rounds for played in controller.rules(request).played)


# -- bad options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "draft_verify,threshold=1.1",
        "draft_verify,aim=-0.1",
        "draft_verify,step=2",
        "draft_verify,k=0",
        "draft_verify,threshold=nan",
        "adaedl,gamma=-1",
        "adaedl,gamma=inf",
        "adaedl,threshold=-0.1",
        "adaedl,k=-2",
        "svip,threshold=-1",
        "svip,coefficient=0",
        "svip,coefficient=nan",
        "svip,k=0",
        "tapout,k=0",
        "tapout,blend=1.5",
    ],
)
def test_bad_options_of_stop_rules(spec: str) -> None:
    with pytest.raises(ValueError, match=rf"^{spec.partition(',')[0]} needs"):
        build(spec)


# -- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_as_long_as_the_draft_is_sure(name: str, temperature: float) -> None:
    """The same distribution everywhere: a sharp one is drafted to the end, a flat one gives one token a round."""
    for chances, length in [((0.965, *(0.005,) * 7), 4), ((0.125,) * 8, 1)]:
        target, draft = fixed_tables(chances, chances)
        controller = build(f"{name},threshold=0.6" if name == "adaedl" else name)
        request = Request([1], SamplingParams(temperature=temperature), max_new_tokens=40)
        (run,) = serve(engine(target, ModelDrafter(draft, k=4), None, controller), [request])
        drafted, rounds = run.stats.num_draft_tokens, run.stats.num_drafts
        assert (drafted, rounds) == (length * rounds, 40 // (length + 1))  # p = q: all of it is accepted


class Watching:
    """A stop rule that never stops and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor | None, float]] = []

    def __call__(self, distribution: Tensor | None, probability: float) -> bool:
        self.seen.append((distribution, probability))
        return False


def shown(
    target: LanguageModel, drafter: Drafter, tokens: list[int], params: SamplingParams, seed: int | None = None
) -> list[tuple[Tensor | None, float]]:
    """The distributions and chances that a drafter shows a stop rule in its first round."""
    watching = Watching()

    class Once(SvipController):
        def rule(self, context: Context) -> Watching:  # type: ignore[override]
            return watching

    serving = engine(target, drafter, None, Once())
    serving.add(Request(tokens, params, max_new_tokens=20, seed=seed))
    serving.step()
    return watching.seen


@pytest.mark.parametrize("draw", ["iid", "greedy"])
def test_a_draft_model_shows_the_distribution_of_the_request(draw: str) -> None:
    target, draft = tables()
    plain, cool = SamplingParams(temperature=1.0), SamplingParams(temperature=0.5)
    q = draft.distribution([0, 1]).double()
    for params, expected in [(SamplingParams(), q), (plain, q), (cool, q**2 / (q**2).sum())]:
        shown_q, chance = shown(target, ModelDrafter(draft, k=1, draw=draw), [0, 1], params)[0]
        assert shown_q is not None
        torch.testing.assert_close(shown_q.double(), expected, atol=1e-6, rtol=0)
        assert min(abs(chance - other) for other in expected.tolist()) < 1e-6


def test_a_request_with_noise_shows_how_sure_the_race_is() -> None:
    """q times 1 / E, made to sum to one: as the softmax of the logits is shown for a greedy request."""
    target, draft = tables()
    q, chance = shown(target, ModelDrafter(draft, k=1), [0, 1], SamplingParams(temperature=1.0), seed=6)[0]
    weights = draft.distribution([0, 1]).double() / Noise(6).exponentials(0, 4)
    assert q is not None
    torch.testing.assert_close(q, weights / weights.sum(), atol=1e-6, rtol=0)
    assert chance == pytest.approx(float((weights / weights.sum()).max()), abs=1e-6)


def by_auto(tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
    """How a cascade's inner engine judges."""
    return auto_verifier(tree.kind, not tree.is_chain, scores.sampler.greedy, False).verify(tree, scores, rng)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["model", "cascade", "layer_skip", "swift"])
def test_drafters_with_a_network_show_whole_distributions(name: str, temperature: float) -> None:
    target, draft = llamas()
    drafters = {
        "model": lambda: ModelDrafter(draft, k=3),
        "cascade": lambda: CascadeDrafter(draft, NgramDrafter(), by_auto, k=3),
        "layer_skip": lambda: LayerSkipDrafter(target, attention="1", mlp="1", k=3, adaptive=False),
        "swift": lambda: SwiftDrafter(target, k=3, threshold=0.0, keep=0),
    }
    seen = shown(target, drafters[name](), PROMPT, SamplingParams(temperature=temperature))
    assert len(seen) == 3
    for q, chance in seen:
        assert q is not None and q.shape == (32,)
        assert float(q.sum()) == pytest.approx(1.0, abs=1e-5)
        assert 0.0 < chance < 1.0 and float((q - chance).abs().min()) < 1e-9


def test_counting_drafters_show_frequencies_and_no_distribution() -> None:
    """The tokens 1 2 are followed by 3 twice and by 4 once: 3 is shown with 2/3."""
    target = MarkovTable(lambda _: (0.2,) * 5, 5)
    tokens = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 0, 1, 2]
    seen = shown(target, SuffixDrafter(), tokens, SamplingParams())
    assert seen and all(q is None for q, _ in seen)
    assert seen[0][1] == pytest.approx(2 / 3, abs=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_rules_work_with_counted_drafts(name: str) -> None:
    """No distribution is needed, and the output is accepted."""
    target = MarkovTable(tables()[0].distribution, 4)
    requests = [Request(PROMPT * 3, max_new_tokens=30), Request([2, 1] * 6, max_new_tokens=30)]
    speculative = engine(target, SuffixDrafter(), None, build(name))
    assert outputs(speculative, requests) == outputs(engine(target), requests)


# -- exactness: rules that decide often ------------------------------------------------------------------------------

DECIDING = (
    "draft_verify,threshold=0.6,step=1",
    "adaedl,threshold=0.55,step=1",
    "svip,threshold=0.35",
    "tapout,blend=0.2",
)


@cache
def distributions() -> dict[str, Distribution]:
    return {mode: joint_distribution(tables()[0], params, PROMPT, 4) for mode, params in MODES.items()}


@pytest.mark.parametrize(("spec", "batch"), [(DECIDING[0], 1), *((spec, 5) for spec in DECIDING)])
def test_rules_keep_the_distribution(spec: str, batch: int) -> None:
    """False alarm 1e-4."""
    target, draft = tables()
    speculative = engine(target, ModelDrafter(draft, k=3), None, build(spec), max_batch=batch)
    assert sampled_p_value(speculative, MODES, distributions(), PROMPT, 4, 200) > FALSE_ALARM


@pytest.mark.parametrize("spec", DECIDING)
def test_rules_keep_greedy_outputs_in_a_batch(spec: str) -> None:
    target, draft = tables()
    requests = [Request(prompt, max_new_tokens=30) for prompt in (PROMPT, [3], [2, 2, 2], [1, 0])]
    for shape in ({"k": 4}, {"tree": "2x2x1"}):
        speculative = engine(target, ModelDrafter(draft, **shape), None, build(spec), max_batch=3)  # type: ignore[arg-type]
        assert outputs(speculative, requests) == outputs(engine(target), requests)


@pytest.mark.parametrize("spec", DECIDING)
def test_a_seed_fixes_the_output_in_any_company(spec: str) -> None:
    target, draft = tables()
    requests = [Request(PROMPT, SamplingParams(temperature=1.0), 25, seed=seed) for seed in range(4)]
    alone = [outputs(engine(target, ModelDrafter(draft, k=3), None, build(spec)), [r])[0] for r in requests]
    assert outputs(engine(target, ModelDrafter(draft, k=3), None, build(spec)), requests) == alone


class Dropping(ModelDrafter):
    """Takes an unlikely token out of the draft, as a stop must not."""

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        trees = super().propose_batch(contexts, budgets)
        return [dropped(tree, budget) for tree, budget in zip(trees, budgets, strict=True)]


def dropped(tree: TokenTree, budget: Budget) -> TokenTree:
    """A drawn chain up to the first token whose own probability makes the rule stop, that one left out."""
    if tree.q is None:
        return tree
    for node in range(1, len(tree)):
        if budget.stops_after(None, float(tree.q[node - 1][tree.tokens[node]])):
            return TokenTree.chain(tree.tokens[0], tree.tokens[1:node], tree.q[: node - 1])
    return tree


def test_a_rule_that_drops_the_token_is_caught() -> None:
    target, draft = tables()
    wrong = engine(target, Dropping(draft, k=3), None, build("svip,threshold=0.35"), max_batch=8)
    assert sampled_p_value(wrong, MODES, distributions(), PROMPT, 4, 450) < CAUGHT
