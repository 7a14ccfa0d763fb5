"""Several drafters at once: shares of the budget, what each member sees of a round, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from foretoken import registry
from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.jacobi import JacobiDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.recycling import RecyclingDrafter
from foretoken.methods.drafters.router import RouterDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.suffix import SuffixDrafter
from foretoken.methods.trees.operations import from_paths, truncate
from toys import MarkovTable, engine, llamas, outputs, serve, tables

PROMPT = [0, 1, 2, 3, 0, 1]


def context_of(tokens: Sequence[int], temperature: float = 0.0) -> Context:
    sampler = Sampler(SamplingParams(temperature=temperature), len(tokens))
    return Context(1, list(tokens), len(tokens), sampler, Rng(0))


def says(*paths: Sequence[int]) -> ScriptedDrafter:
    """The same paths in every round, as far as the budget goes."""

    def propose(context: Context, budget: Budget) -> TokenTree:
        kept = [path[: budget.max_depth] for path in paths]
        return from_paths(context.root, kept if sum(map(len, kept)) <= budget.max_nodes else [])

    return ScriptedDrafter(propose=propose)


# -- proposals -------------------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    """Two drafts of `return a`: what deterministic members agree on is scored once."""
    tree = EnsembleDrafter([says((5, 6, 7)), says((5, 8)), says((9,))]).propose(context_of([1]), Budget(8, 64))
    assert (tree.tokens, tree.parents) == ((1, 5, 6, 7, 8, 9), (-1, 0, 1, 2, 1, 0))
    assert (tree.kind, tree.drafters) == (Kind.POINT, (-1, 0, 0, 0, 1, 2))


def test_drawn_nodes_keep_their_distributions_and_owners() -> None:
    target, draft = tables()
    first, last = ModelDrafter(draft, k=2), ModelDrafter(target, k=2)
    context = context_of(PROMPT, temperature=1.0)
    group = EnsembleDrafter([first, NgramDrafter(n=2, k=2), last])
    group.start(context)
    tree = group.propose(context, Budget(2, 64))
    assert tree.kind is Kind.IID and tree.drafters == (-1, 0, 0, 1, 1, 2, 2)
    for node, owner in enumerate(tree.drafters[1:], 1):
        distribution = tree.distribution(node)
        prefix = [*PROMPT, *(tree.tokens[n] for n in tree.path(tree.parents[node])[1:])]
        if owner == 1:
            assert distribution is None
        else:
            assert distribution is not None
            torch.testing.assert_close(
                distribution, (draft, target)[owner // 2].distribution(prefix).to(distribution), rtol=0, atol=1e-12
            )


class Greedy(Drafter):
    """Takes ``takes`` nodes of what it gets, or all, and remembers what it got."""

    name = "greedy_drafter"

    def __init__(self, token: int, takes: int = 1000) -> None:
        self.token, self.takes = token, takes
        self.got: list[tuple[int, int]] = []

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        self.got.append((budget.max_depth, budget.max_nodes))
        return TokenTree.chain(context.root, [self.token] * min(self.takes, budget.max_nodes))


@pytest.mark.parametrize(
    ("takes", "nodes", "shares"),
    [
        ((99, 99, 99), 9, [3, 3, 3]),
        ((1, 99, 99), 9, [3, 4, 4]),
        ((0, 0, 99), 9, [3, 5, 9]),
        ((99, 99, 99), 4, [2, 1, 1]),
        ((99, 99, 99), 1, [1]),
    ],
)
def test_the_budget_is_shared_and_what_is_left_goes_on(takes: Sequence[int], nodes: int, shares: Sequence[int]) -> None:
    members = [Greedy(i, take) for i, take in enumerate(takes)]
    tree = EnsembleDrafter(members).propose(context_of([7]), Budget(20, nodes))
    assert [nodes for member in members for _, nodes in member.got] == shares
    assert {depth for member in members for depth, _ in member.got} == {20}
    assert tree.num_drafts <= nodes


def test_members_that_go_too_deep_are_cut() -> None:
    tree = EnsembleDrafter([Greedy(1), Greedy(2)]).propose(context_of([7]), Budget(3, 20))
    assert tree.tokens == (7, 1, 1, 1, 2, 2, 2) and max(tree.depths) == 3


def test_what_a_group_says_of_itself() -> None:
    draft = tables()[1]
    chain, tree = ModelDrafter(draft, k=3), ModelDrafter(draft, tree="2x1")
    iid = EnsembleDrafter([chain, NgramDrafter(k=9)])
    assert (iid.traits.kind, iid.traits.draws_trees, iid.max_depth, iid.max_nodes) == (Kind.IID, True, 9, 128)
    assert iid.traits.proposals == {(Kind.IID, True), (Kind.POINT, True)}
    assert EnsembleDrafter([NgramDrafter(), chain, tree]).traits.kind is Kind.WITHOUT_REPLACEMENT
    point = EnsembleDrafter([NgramDrafter(), SuffixDrafter(share=True)])
    assert (point.traits.kind, point.traits.shares_state) == (Kind.POINT, True)
    assert not EnsembleDrafter([NgramDrafter()]).traits.draws_trees
    tapped = [says((1,)), says((2,)), says((3,))]
    tapped[0].taps, tapped[1].taps = ("last", "layer:2"), ("layer:1", "last")
    assert EnsembleDrafter(tapped).taps == ("last", "layer:2", "layer:1")


@pytest.mark.parametrize("group", [EnsembleDrafter, RouterDrafter])
def test_a_group_prefers_noise_as_its_members_do(group: Callable[[Sequence[Drafter]], Drafter]) -> None:
    """Without it, a member's drafts for sampled requests without a seed are accepted less often than alone."""
    _, draft = tables()
    assert (
        group([JacobiDrafter()]).traits.prefers_noise and group([NgramDrafter(), JacobiDrafter()]).traits.prefers_noise
    )
    assert not group([NgramDrafter()]).traits.prefers_noise
    assert not group([JacobiDrafter(), ModelDrafter(draft)]).traits.prefers_noise  # drawn drafts have their own rules


def test_ensembles_in_an_ensemble_are_opened() -> None:
    members = [NgramDrafter(), NgramDrafter(), SuffixDrafter()]
    assert EnsembleDrafter([members[0], EnsembleDrafter(members[1:])]).drafters == tuple(members)
    target, _ = tables()
    built = build_drafter("ensemble,drafters=(ngram,n=2|ensemble,drafters=(suffix,k=4|ngram))", target)
    assert isinstance(built, EnsembleDrafter)
    assert [member.name for member in built.drafters] == ["ngram", "suffix", "ngram"]


# -- what members see ------------------------------------------------------------------------------------------------


class Watcher(Drafter):
    """Checks that the rounds it is shown spell the text, and that every distribution is the target's at its place."""

    name = "watcher"
    traits = Traits(draws_trees=True)

    def __init__(
        self, target: MarkovTable, inner: Callable[[Context, Budget], TokenTree], is_cut: bool = False
    ) -> None:
        self.target, self.inner, self.is_cut = target, inner, is_cut
        self.text: list[int] = []
        self.proposed: TokenTree | None = None
        self.seen_own = self.seen_plain = 0

    def start(self, context: Context) -> None:
        self.text = list(context.tokens)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        assert context.tokens == self.text
        self.proposed = self.inner(context, budget)
        return self.proposed

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        if len(tree) > 1 and self.is_cut:
            assert self.proposed is not None and paths_of(tree) <= paths_of(self.proposed)
        elif len(tree) > 1:
            assert tree is self.proposed
        self.seen_own, self.seen_plain = self.seen_own + (len(tree) > 1), self.seen_plain + (len(tree) == 1)
        self.proposed = None
        assert scores.tree is tree and len(scores.logits) == len(tree) and tree.tokens[0] == self.text[-1]
        for node in range(len(tree)):
            prefix = [*self.text, *(tree.tokens[n] for n in tree.path(node)[1:])]
            distribution = torch.softmax(scores.logits[node], -1)
            torch.testing.assert_close(
                distribution, self.target.distribution(prefix).to(distribution), rtol=0, atol=1e-9
            )
        assert [tree.parents[node] for node in verdict.path] == [0, *verdict.path][: len(verdict.path)]
        self.text += [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        assert context.tokens[: len(self.text)] == self.text


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}


class Cutting(ConstantController):
    """Keeps all nodes but the last one of every second tree, and the first draft node of the others."""

    name = "cutting"

    def kept(
        self, contexts: Sequence[Context], trees: Sequence[TokenTree], beside: Sequence[TokenTree]
    ) -> Sequence[Sequence[int]]:
        return [
            range(len(tree) - 1 if len(context.tokens) % 2 else min(2, len(tree)))
            for context, tree in zip(contexts, trees, strict=True)
        ]


def random_paths(seed: int) -> Callable[[Context, Budget], TokenTree]:
    """Two paths that depend on the text, often right ones among them."""

    def propose(context: Context, budget: Budget) -> TokenTree:
        key = sum(context.tokens) * 31 + len(context.tokens) * 7 + seed
        paths = [[(key >> i) % 4 for i in range(3)], [(key // 5 >> i) % 4 for i in range(2)]]
        return truncate(from_paths(context.root, paths), budget.max_depth)

    return propose


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_member_sees_whole_rounds_of_its_own(temperature: float) -> None:
    target, draft = tables()
    watchers = [Watcher(target, random_paths(0)), Watcher(target, random_paths(3))]
    group = EnsembleDrafter([watchers[0], ModelDrafter(draft, tree="2x1"), watchers[1]])
    (run,) = serve(engine(target, group), [Request(PROMPT, SamplingParams(temperature=temperature), 80, seed=1)])
    for watcher in watchers:
        assert watcher.seen_own >= run.stats.num_drafts - 3  # near the end there is no room for all
        assert watcher.seen_plain > 0
    assert run.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nested", [False, True], ids=["ensemble", "ensemble in a router"])
def test_every_member_sees_what_a_controller_left_of_its_rounds(temperature: float, nested: bool) -> None:
    target, draft = tables()
    watchers = [Watcher(target, random_paths(0), True), Watcher(target, random_paths(3), True)]
    group: Drafter = EnsembleDrafter([watchers[0], ModelDrafter(draft, tree="2x1"), watchers[1]])
    if nested:
        group = RouterDrafter([group], costs=(0.0,))
    request = Request(PROMPT, SamplingParams(temperature=temperature), 80, seed=1)
    (run,) = serve(engine(target, group, controller=Cutting()), [request])
    (alone,) = serve(engine(target), [request])
    assert run.output == alone.output
    assert watchers[0].seen_own > run.stats.num_drafts / 2 and watchers[1].seen_own > run.stats.num_drafts / 4
    assert run.stats.num_accepted_tokens > 10


@pytest.mark.parametrize(
    "build",
    [
        lambda: JacobiDrafter(m=4),
        lambda: LookaheadDrafter(w=3, n=3, g=3),
        lambda: RecyclingDrafter(nodes=8, share=False),
        lambda: NgramDrafter(),
        lambda: SuffixDrafter(share=False),
    ],
    ids=["jacobi", "lookahead", "recycling", "ngram", "suffix"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_useless_neighbour_changes_nothing(build: Callable[[], Drafter], first: bool) -> None:
    """Drafters that learn from verdicts learn the same in a group."""
    target, _ = llamas()
    request = Request([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], ignore_eos=True, max_new_tokens=60)
    (alone,) = serve(engine(target, build()), [request])
    wrong = ScriptedDrafter(
        propose=lambda context, budget: TokenTree.chain(
            context.root, [(alone.output[len(context.tokens) - context.prompt_length] + 1) % 32]
        )
    )
    members = [build(), wrong] if first else [wrong, build()]
    (grouped,) = serve(engine(target, EnsembleDrafter(members)), [request])
    assert grouped.output == alone.output
    assert grouped.stats.num_accepted_tokens >= alone.stats.num_accepted_tokens > 0
    assert grouped.stats.num_drafts <= alone.stats.num_drafts


def test_two_halves_of_the_truth_make_a_whole() -> None:
    """Each member knows every other stretch of the answer; together they are always right."""
    target, _ = tables()
    truth = outputs(engine(target), [Request(PROMPT, max_new_tokens=48)])[0]

    def knows(odd: bool) -> ScriptedDrafter:
        def propose(context: Context, budget: Budget) -> TokenTree:
            at = len(context.tokens) - context.prompt_length
            right = (at // 4) % 2 == odd
            guess = truth[at : at + budget.max_depth]
            return TokenTree.chain(context.root, guess if right else [(t + 1) % 4 for t in guess])

        drafter = ScriptedDrafter(propose=propose)
        drafter.max_depth = 3
        return drafter

    group = EnsembleDrafter([knows(False), knows(True)])
    (run,) = serve(engine(target, group), [Request(PROMPT, max_new_tokens=48)])
    assert run.output == truth and run.stats.num_drafts == 12
    (half,) = serve(engine(target, knows(False)), [Request(PROMPT, max_new_tokens=48)])
    assert half.output == truth and half.stats.num_drafts == 30


# -- verifiers -------------------------------------------------------------------------------------------------------


def test_verifiers_are_right_for_all_that_members_propose() -> None:
    target, draft = tables()
    iid = EnsembleDrafter([ModelDrafter(draft, k=2), NgramDrafter()])
    wor = EnsembleDrafter([ModelDrafter(draft, tree="2x1"), ModelDrafter(draft, k=2)])
    for group, right in (
        (iid, ["match", "coupled", "multi_round", "traversal"]),
        (wor, ["match", "coupled", "without_replacement", "traversal"]),
    ):
        for row in registry.rows("verifier"):
            if not row.lossless or row.name == "greedy":
                continue
            if row.name in right:
                engine(target, group, registry.make("verifier", row.name))
            else:
                with pytest.raises(ValueError, match=f"Use {', '.join(right)}\\."):
                    engine(target, group, registry.make("verifier", row.name))


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ensemble,drafters=(ngram|nonsense)", "unknown drafter 'nonsense': choose one of"),
        ("ensemble,drafters=(ngram|)", "empty item in its list"),
        ("ensemble,drafters=()", "empty item in its list"),
        ("ensemble,drafters=(ngram|none)", "cannot hold 'none'"),
        ("ensemble,drafters=(ngram,x=1)", "unknown option 'x' of drafter 'ngram'"),
        ("ensemble,drafters=ngram,n=3", "unknown option 'n' of drafter 'ensemble': valid ones: drafters"),
        ("ensemble:./path", "takes no path"),
        ("ensemble,drafters=(model|ngram)", "needs a path for this target"),
        ("ensemble,drafters=(ngram", "unbalanced parentheses"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    target, _ = tables()
    with pytest.raises(ValueError, match=words) as error:
        build_drafter(spec, target, target_source=target)
    assert "\n" not in str(error.value)


def test_bad_members() -> None:
    _, draft = tables()
    _, wide = tables(vocab=6)
    same = NgramDrafter()
    for members, words in (
        ([], "needs at least one member"),
        ([same, same], "same object twice"),
        (["ngram"], "must be a drafter, not str"),
        ([ModelDrafter(draft), ModelDrafter(wide)], r"different vocabularies, 4 \(model\) and 6 \(model\)"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            EnsembleDrafter(members)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_a_member_that_drafts_on_the_targets_cache_is_refused() -> None:
    own = NgramDrafter()
    own.traits = replace(own.traits, runs_target=True)
    with pytest.raises(ValueError, match="cannot be in an ensemble, use it in a router"):
        EnsembleDrafter([own, NgramDrafter()])


def test_plain_ensemble_on_any_target() -> None:
    target, _ = tables()
    built = build_drafter("ensemble", target, target_source=target)
    assert isinstance(built, EnsembleDrafter) and [m.name for m in built.drafters] == ["ngram", "suffix"]
