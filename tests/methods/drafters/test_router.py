"""The router: which member drafts, what that costs, and that those left out follow the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretoken import registry
from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter, parse_costs
from foretoken.methods.drafters.sam import SamDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.sources import NgramSource, SourceDraft, SourceDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.models.base import LanguageModel
from toys import MarkovTable, engine, llamas, outputs, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def cycle(length: int = 4) -> MarkovTable:
    """A target that repeats 0 1 2 ... for ever: n-grams are always right."""
    distributions = [
        [0.97 if t == (last + 1) % length else 0.03 / (length - 1) for t in range(length)] for last in range(length)
    ]
    return MarkovTable(lambda prefix: distributions[prefix[-1]], length)


class Logged(RouterDrafter):
    """Notes which member drafted in every round (``None`` for nobody)."""

    def __init__(self, drafters: Sequence[Drafter], **options: object) -> None:
        super().__init__(drafters, **options)  # type: ignore[arg-type]
        self.chosen: list[int | None] = []

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        self.chosen.append(tree.drafters[1] if len(tree) > 1 else None)
        super().observe(context, tree, scores, verdict)


def rounds(router: Logged, target: LanguageModel, tokens: int = 120, **more: object) -> list[int | None]:
    (run,) = serve(engine(target, router), [Request(PROMPT, max_new_tokens=tokens, **more)])  # type: ignore[arg-type]
    assert run.output == outputs(engine(target), [Request(PROMPT, max_new_tokens=tokens)])[0]
    return router.chosen


class Naming(ConstantController):
    """Says who drafts."""

    def __init__(self, member: int) -> None:
        super().__init__(k=3)
        self.member = member

    def budget(self, context: Context, batch_size: int) -> Budget:
        return Budget(3, 64, member=self.member)


# -- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [(0.2, 0.0), (0.0, 0.2), (0.1, 0.1)])
def test_the_cheapest_member_comes_first_where_nobody_is_named(costs: tuple[float, float]) -> None:
    target, _ = tables()
    router = Logged([ModelDrafter(target, k=2), ModelDrafter(target, k=2)], costs=costs)
    assert set(rounds(router, target)[:-1]) == {costs.index(min(costs))}


def test_a_member_with_nothing_to_say_passes() -> None:
    target, _ = tables()

    def seldom(context: Context, budget: Budget) -> TokenTree:
        says = len(context.tokens) % 7 == 0
        truth = outputs(engine(target), [Request(context.tokens, max_new_tokens=4)])[0] if says else []
        return TokenTree.chain(context.root, truth[: budget.max_depth])

    router = Logged([ScriptedDrafter(propose=seldom), ModelDrafter(target, k=1)], costs=(0.0, 0.1))
    chosen = rounds(router, target, tokens=100)
    at = len(PROMPT)
    for index in chosen:
        assert index == (0 if at % 7 == 0 else 1) or at > len(PROMPT) + 95
        at += 5 if index == 0 else 2


def test_nobody_has_anything_to_say() -> None:
    target, _ = tables()
    silent = [ScriptedDrafter(), ScriptedDrafter()]
    assert set(rounds(Logged(silent), target, tokens=10)) == {None}


@pytest.mark.parametrize("member", [0, 1])
def test_the_member_that_is_named_drafts(member: int) -> None:
    target, draft = tables()
    router = Logged([ModelDrafter(target, k=2), ModelDrafter(draft, k=2)])
    serve(engine(target, router, None, Naming(member)), [Request(PROMPT, max_new_tokens=20)])
    assert set(router.chosen[:-1]) == {member}


@pytest.mark.parametrize("member", [0, 1, None])
def test_what_copies_is_noted_beside_a_network_that_was_named(member: int | None) -> None:
    """Nothing is noted if the copying member drafts itself or if nobody chooses: then nobody learns from it."""
    target, draft = tables()
    router = RouterDrafter([ModelDrafter(draft, k=2), NgramDrafter(n=2, k=4)])
    context = Context(0, [0, 1, 2, 3, 0, 1], 6, Sampler(SamplingParams()), Rng(0), sequence=target.open())
    budget = Budget(3, 64, member=member, otherwise=Budget(3, 64, member=1) if member == 0 else None)
    (tree,) = router.propose_batch([context], [budget])
    assert len(tree) > 1
    assert {index: list(proposal.tokens) for index, proposal in context.beside.items()} == (
        {1: [1, 2, 3, 0, 1]} if member == 0 else {}
    )


# -- rules over guesses ----------------------------------------------------------------------------------------------


class Copying(SourceDrafter):
    """Makes the guesses of a function of the text."""

    name = "copying"

    def __init__(self, guess: Callable[[list[int]], SourceDraft]) -> None:
        self.guess_of, self.max_depth, self.max_nodes = guess, 4, 4

    def open(self, context: Context) -> NgramSource:
        guess = self.guess_of

        class Source(NgramSource):
            def propose(self, budget: Budget) -> SourceDraft:
                return guess(self.text)

        return Source()


def chain(scores: Sequence[float], match: int = 1) -> SourceDraft:
    return SourceDraft([1] * len(scores), range(-1, len(scores) - 1), scores, match)


@pytest.mark.parametrize(
    ("options", "guesses", "chosen"),
    [
        ({"rule": "expected"}, [chain([0.9]), chain([0.8, 0.3])], 1),
        ({"rule": "expected"}, [chain([0.9, 0.2]), chain([0.8, 0.3])], 0),  # a tie: the first one
        ({"rule": "expected", "least": 1.2}, [chain([0.9]), chain([0.8, 0.3])], 2),
        ({"rule": "expected", "least": 1.0}, [chain([0.9]), chain([0.8, 0.3])], 1),
        ({"rule": "match"}, [chain([0.9], 2), chain([0.1], 3)], 1),
        ({"rule": "match", "bias": (0, 2, 0)}, [chain([0.9], 2), chain([0.1], 3)], 0),
        ({"rule": "match", "least": 5}, [chain([0.9], 4), chain([0.1], 3)], 2),
        ({"rule": "match", "least": 5}, [chain([0.9], 4), chain([0.1], 5)], 1),
        ({"rule": "match"}, [SourceDraft(), SourceDraft()], 2),
        ({"rule": "match"}, [SourceDraft(match=9), chain([0.1], 1)], 1),
    ],
)
def test_a_rule_chooses_by_the_guesses(options: dict[str, Any], guesses: list[SourceDraft], chosen: int) -> None:
    target, draft = tables()
    members: list[Drafter] = [Copying(lambda text, guess=guess: guess) for guess in guesses]  # type: ignore[misc]
    router = Logged([*members, ModelDrafter(draft, k=2)], **options)
    assert set(rounds(router, target, tokens=20)[:-1]) == {chosen}


def test_the_best_guess_drafts_where_the_fallback_is_silent() -> None:
    target, _ = tables()
    copying = [Copying(lambda text: chain([0.5])), Copying(lambda text: chain([0.6]))]
    router = Logged([*copying, ScriptedDrafter()], rule="expected", least=2.0)
    assert set(rounds(router, target, tokens=20)[:-1]) == {1}


def test_members_that_copy_need_no_fallback() -> None:
    target, _ = tables()
    router = Logged([Copying(lambda text: SourceDraft()), Copying(lambda text: chain([0.6]))], rule="match")
    assert router.rule is not None and router.rule.fallback is None
    assert set(rounds(router, target, tokens=20)[:-1]) == {1}


def test_a_rule_hides_the_members_from_controllers() -> None:
    """And one that names a member all the same gets that one."""
    target, draft = tables()
    members = [NgramDrafter(n=2), ModelDrafter(draft, k=2)]
    router = Logged(members, rule="expected", least=1e9)
    assert router.limits.members == () and len(Logged(members).limits.members) == 2
    serve(engine(target, router, None, Naming(0)), [Request(PROMPT * 3, max_new_tokens=12)])
    assert 1 not in router.chosen


def test_a_long_match_copies_and_a_short_one_leaves_it_to_the_table() -> None:
    """SAM-Decoding with Token Recycling: on a text that repeats nothing the automaton is not asked for drafts."""
    router = Logged([SamDrafter(), RecyclingDrafter(nodes=8, share=False)], rule="match", least=5)
    assert set(rounds(router, cycle(), tokens=60)[1:-1]) == {0}
    target, _ = tables()
    router = Logged([SamDrafter(), RecyclingDrafter(nodes=8, share=False)], rule="match", least=99)
    assert 0 not in rounds(router, target, tokens=60)[2:-1]


# -- determinism -----------------------------------------------------------------------------------------------------


def build(target: LanguageModel, draft: LanguageModel) -> RouterDrafter:
    return RouterDrafter([ModelDrafter(draft, k=3), NgramDrafter(n=2), JacobiDrafter(m=4)])


@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_seed_gives_the_same_output_in_any_company(batch: int) -> None:
    target, draft = llamas()
    params = SamplingParams(temperature=1.0)
    requests = [Request(PROMPT, params, 40, seed=seed) for seed in (3, 4, 5)]
    first = outputs(engine(target, build(target, draft), max_batch=batch), requests)
    again = build(target, draft)
    assert [outputs(engine(target, again), [request])[0] for request in requests] == first
    assert len(set(map(tuple, first))) == 3


# -- those left out --------------------------------------------------------------------------------------------------


def test_a_model_that_was_left_out_for_long_catches_up() -> None:
    """Hundreds of tokens later it drafts as if it had never paused: it is the target itself, so all is accepted."""
    target, _ = llamas()
    long_away = 90

    class Turns(ConstantController):
        def budget(self, context: Context, batch_size: int) -> Budget:
            return Budget(3, 64, member=1 if len(context.tokens) < long_away else 0)

    router = RouterDrafter([ModelDrafter(target, k=3), NgramDrafter(n=2, k=2)])
    speculative: Engine = engine(target, router, None, Turns())
    speculative.add(Request(PROMPT, SamplingParams(), 110, ignore_eos=True))
    accepted = drafted = 0
    while speculative.busy:
        (run,) = speculative.requests.running or [None]  # type: ignore[list-item]
        start = len(run.context.tokens) if run else 0
        ((run, _),) = speculative.step()
        if start >= long_away:
            drafted += 1
            accepted += len(run.context.tokens) - start - 1
    assert drafted > 5 and accepted >= 3 * (drafted - 1)


@pytest.mark.parametrize("controller", [ConstantController(), Naming(0), Naming(1)], ids=["chosen", "first", "second"])
@pytest.mark.parametrize(
    "member", [lambda: RecyclingDrafter(nodes=8, share=False), lambda: JacobiDrafter(m=4), lambda: NgramDrafter()]
)
def test_learners_see_the_rounds_of_others(member: Callable[[], Drafter], controller: Controller) -> None:
    """Every written token is shown to a member, whoever drafted and chose it, with the target's row before it."""
    target, draft = llamas()
    seen: list[int] = []

    class Seeing(type(member())):  # type: ignore[misc]
        def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
            assert len(scores.logits) == len(tree)
            seen.extend([*(tree.tokens[node] for node in verdict.path), verdict.next_token])
            super().observe(context, tree, scores, verdict)

    learner = member()
    learner.__class__ = Seeing
    learner.traits = replace(learner.traits, learns=True)
    router = RouterDrafter([learner, ModelDrafter(draft, k=3)], costs=(0.0, 0.0))
    (run,) = serve(engine(target, router, None, controller), [Request(PROMPT, SamplingParams(), 60)])
    assert seen == run.output[: len(seen)] and len(seen) >= 50


def test_members_that_do_not_look_are_shown_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams of one request read its text when they are asked; of several, they read along for the others."""
    target, draft = llamas()
    calls: list[str] = []
    monkeypatch.setattr(SourceDrafter, "observe", lambda self, *_: calls.append(self.name))
    alone, along = NgramDrafter(), SuffixDrafter(share=True)
    assert tuple(drafter.traits.learns for drafter in (alone, along, ModelDrafter(draft, k=2))) == (False, True, False)
    router = RouterDrafter([alone, along, ModelDrafter(draft, k=3)], costs=(0.0, 0.0, 0.0))
    serve(engine(target, router), [Request(PROMPT, SamplingParams(), 20)])
    assert set(calls) == {"suffix"}


def test_nothing_is_left_behind() -> None:
    target, draft = llamas()
    speculative = engine(target, build(target, draft))
    speculative.add(Request(PROMPT, SamplingParams(temperature=1.0), 30, seed=0))
    state = None
    while speculative.busy:
        speculative.step()
        state = speculative.requests.running[0].context.state if speculative.requests.running else state
    assert state == {} and not draft._sequences


# -- verifiers and costs ---------------------------------------------------------------------------------------------


def test_verifiers_are_right_for_every_member() -> None:
    target, draft = tables()
    chains = RouterDrafter([ModelDrafter(draft, k=2), NgramDrafter()])
    assert chains.traits.proposals == {(Kind.IID, False), (Kind.POINT, False)} and not chains.traits.draws_trees
    mixed = RouterDrafter([ModelDrafter(draft, k=2), ModelDrafter(draft, tree="2x1"), NgramDrafter()])
    assert (mixed.traits.kind, mixed.traits.draws_trees) == (Kind.WITHOUT_REPLACEMENT, True)
    for router, right in (
        (chains, ["match", "rejection", "block", "coupled", "multi_round", "without_replacement", "traversal"]),
        (mixed, ["match", "coupled", "without_replacement", "traversal"]),
    ):
        for row in registry.rows("verifier"):
            if not row.lossless or row.name == "greedy":
                continue
            verifier = registry.make("verifier", row.name)
            if row.name in right:
                params = SamplingParams(temperature=1.0)
                serve(engine(target, router, verifier), [Request(PROMPT, params, 40, seed=1)])
            else:
                with pytest.raises(ValueError, match=f"Use {', '.join(right)}\\."):
                    engine(target, router, verifier)


def test_default_costs_come_from_the_weights() -> None:
    target, draft = llamas()
    assert draft.weight_bytes == target.weight_bytes > 1000
    router = RouterDrafter([ModelDrafter(draft), NgramDrafter()], target=target)
    assert router.costs == (1.0, 0.0)
    table, other = tables()
    assert ModelDrafter(other).cost_beside(table.weight_bytes) == 0.1  # of unknown size
    assert ModelDrafter(draft).cost_beside(0) == 0.1
    assert EnsembleDrafter([ModelDrafter(draft), NgramDrafter()]).cost_beside(target.weight_bytes) == 1.0

    class Stated(NgramDrafter):
        def cost_beside(self, target_bytes: int) -> float:
            return 0.25

    assert RouterDrafter([Stated()], target=target).costs == (0.25,)


@pytest.mark.parametrize(
    ("spec", "cost"), [("early_exit", 0.5), ("layer_skip,attention=1", 0.75), ("recycling", 0.0), ("ngram", 0.0)]
)
def test_a_drafter_costs_the_same_alone_as_in_a_group(spec: str, cost: float) -> None:
    target, _ = llamas()
    alone, group = build_drafter(spec, target), build_drafter(f"router,drafters=({spec}|suffix)", target)
    assert alone is not None and group is not None
    assert alone.limits.relative_cost == group.limits.members[0].relative_cost == cost


def test_a_draft_model_costs_its_share_of_the_target_alone_as_in_a_group() -> None:
    target, draft = llamas()
    alone = ModelDrafter(draft, target=target)
    assert alone.limits.relative_cost == RouterDrafter([alone]).limits.members[0].relative_cost == 1.0


def test_costs_of_a_spec() -> None:
    assert parse_costs("0.1|0") == (0.1, 0.0) and parse_costs("") == ()
    target, _ = tables()
    built = build_drafter("router,drafters=(ngram|suffix,share=false),costs=0.1|0", target)
    assert isinstance(built, RouterDrafter)
    assert built.costs == (0.1, 0.0)
    plain = build_drafter("router", target, target_source=target)
    assert isinstance(plain, RouterDrafter) and [m.name for m in plain.drafters] == ["ngram", "suffix"]
    assert not plain.traits.shares_state


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("router,drafters=(ngram|suffix),costs=0.1", "1 costs for 2 drafters"),
        ("router,drafters=(ngram|suffix),costs=a|b", "one number per drafter joined by"),
        ("router,drafters=(ngram|suffix),costs=-1|0", "costs >= 0"),
        ("router,drafters=(ngram|suffix),costs=nan|0", "costs >= 0"),
        (
            "router,explore=1",
            "unknown option 'explore' of drafter 'router': valid ones: rule, least, drafters, costs, bias",
        ),
        ("router,drafters=(ngram|nonsense)", "unknown drafter 'nonsense': choose one of"),
        ("router,k=4", "unknown option 'k' of drafter 'router': valid ones: rule, least, drafters, costs, bias"),
        ("router:./path", "takes no path"),
        ("router,rule=best", "router needs rule=cost, expected or match, not 'best'"),
        ("router,drafters=(ngram|suffix),rule=match,least=-1", "router needs least >= 0, not -1"),
        (
            "router,drafters=(ngram|suffix),least=1",
            "ignores least and bias with rule=cost: they need rule=expected or match",
        ),
        ("router,drafters=(ngram|suffix),rule=expected,bias=0|1", "router needs rule=match for bias"),
        ("router,drafters=(ngram|suffix),rule=match,bias=1", "a bias >= 0 for each of its 2 drafters"),
        ("router,drafters=(ngram|suffix),rule=match,bias=a|b", "bias='a|b' must be one number per drafter"),
        ("router,drafters=(recycling|ngram),rule=expected", "not recycling, ngram: for example"),
        ("router,drafters=(ngram),rule=expected,least=1", "not ngram: for example drafters="),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target, _ = tables()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_no_members() -> None:
    with pytest.raises(ValueError, match="drafter 'router' needs at least one member"):
        RouterDrafter([])


# -- what the members see --------------------------------------------------------------------------------------------


class Reading(ModelDrafter):
    """Reads, after the commit, the distributions of all nodes: most of them were never visited."""

    traits = replace(ModelDrafter.traits, learns=True)
    known, checked = 0, 0

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        before = context.tokens[: self.known]
        assert before[-1] == tree.tokens[0]
        for node in range(len(tree)):
            prefix = [*before, *(tree.tokens[n] for n in tree.path(node)[1:])]
            assert scores.p(node).equal(context.sampler.distribution(scores.logits[node], prefix))
            assert list(scores.node_prefix(node)) == prefix
            assert scores.lengths[node] == len(prefix)
            self.checked += 1
        self.known += len(verdict.path) + 1


@pytest.mark.parametrize("group", ["alone", "drafts", "watches"])
def test_scores_are_those_of_the_round_after_its_commit(group: str) -> None:
    target, draft = llamas()
    reading = Reading(draft, tree="2x2")
    reading.known = len(PROMPT)
    other = ModelDrafter(llamas()[1], k=2)
    drafter = reading if group == "alone" else RouterDrafter([reading, other], costs=(0.1, 0.1))
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.5)
    speculative = engine(target, drafter, controller=Naming(int(group == "watches")))
    (run,) = serve(speculative, [Request(PROMPT, params, 20, ignore_eos=True)])
    assert run.stats.num_accepted_tokens and reading.checked >= 15
