"""Drafts of drafts: the exact distribution of a chain that a draft model writes with the help of another drafter, and
of what a target makes of it, by enumerating every draw of all levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from enumeration import Drafts, Tables, bias, distinct, independent, outcomes, total_variation
from torch import Tensor

from foretoken import registry
from foretoken.core import Budget, Context, Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.base import Drafter, Traits, Verify
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.methods.drafters.staged import StagedDrafter
from foretoken.methods.verifiers.base import Coins, drawn_probability
from foretoken.methods.verifiers.compatibility import auto_verifier
from foretoken.models.other.table import TableModel

PROMPT = [0, 1, 0, 1, 0]
T1 = Sampler(SamplingParams(temperature=1.0), len(PROMPT))
TINY, CAUGHT = 1e-12, 1e-3
Build = Callable[[Coins], Drafter]


def model(seed: int, size: int = 3) -> TableModel:
    return TableModel.random(size, seed=seed, order=2, sharpness=1.3)


class Drawn(Drafter):
    """A chain or a level of siblings per place, drawn from a table by the coins of an enumeration."""

    name = "drawn"

    def __init__(self, table: TableModel, coins: Coins, shape: Sequence[int], kind: Kind = Kind.IID) -> None:
        self.table, self.coins, self.shape = table, coins, shape
        self.max_depth = len(shape)
        self.traits = Traits(kind, draws_trees=max(shape) > 1, rewinds=True)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Only the first node of a level gets children: the trees stay small."""
        tokens, parents, q_rows, distributions, parent = [context.root], [-1], [-1], [], 0
        prefix = list(context.tokens)
        for count in self.shape[: budget.max_depth]:
            distributions.append(context.sampler.distribution(self.table.distribution(prefix).log(), prefix))
            draw = distinct if self.traits.kind is Kind.WITHOUT_REPLACEMENT else independent
            level = draw(distributions[-1], count, self.coins)
            prefix.append(level[0])
            q_rows += [len(distributions) - 1] * count
            tokens += level
            parents += [parent] * count
            parent = len(tokens) - count
        return TokenTree(tokens, parents, self.traits.kind, torch.stack(distributions), q_rows)


def right_rule(coins: Coins) -> Verify:
    """The library's own choice, with these coins."""

    def verify(tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
        sampler = scores.sampler
        return auto_verifier(tree.kind, not tree.is_chain, sampler.greedy, sampler.fixed).decide(tree, scores, coins)

    return verify


def triforce_rule(coins: Coins) -> Verify:
    """The published slip: after a rejection the next token is drawn from the model's distribution, not from the
    residual."""

    def verify(tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
        for node in range(1, len(tree)):
            p = scores.p(node - 1)
            if not coins.accept(float(p[tree.tokens[node]]), drawn_probability(tree, node)):
                return Verdict(tuple(range(1, node)), coins.draw(p), False)
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(len(tree) - 1)), True)

    return verify


class TargetTables(Tables):
    """A table model as the target of an enumeration."""

    def __init__(self, target: TableModel) -> None:
        super().__init__(target.vocab_size)
        self.p = lambda prefix: target.distribution((*PROMPT, *prefix))


def drafts(build: Build, budget: Budget | None = None, prompt: Sequence[int] = PROMPT) -> Drafts:
    """Every tree that a drafter makes of the prompt, with its probability."""
    trees: dict[tuple[int, ...], tuple[TokenTree, float]] = {}

    def draft(coins: Coins) -> TokenTree:
        context = Context(0, list(prompt), len(prompt), T1, Rng(0))
        drafter = build(coins)
        drafter.start(context)
        tree = drafter.propose(context, budget or Budget())
        drafter.finish(context)
        return tree

    for tree, weight in outcomes(draft):
        key = (*tree.tokens, *tree.parents)
        trees[key] = (tree, weight + (trees[key][1] if key in trees else 0.0))
    return list(trees.values())


def check_recorded_distributions(trees: Drafts, table: TableModel) -> None:
    """Every node says that it was drawn from the draft model's distribution after its own path."""
    for tree, _ in trees:
        for node in range(1, len(tree)):
            distribution = tree.distribution(node)
            path = [tree.tokens[n] for n in tree.path(tree.parents[node])[1:]]
            assert distribution is not None
            torch.testing.assert_close(distribution, table.distribution((*PROMPT, *path)), rtol=0, atol=1e-14)


def chain_distribution(trees: Drafts) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[1:]): weight for tree, weight in trees}


def product_distribution(table: TableModel, length: int) -> dict[tuple[int, ...], float]:
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        distribution = {
            (*tokens, token): weight * chance
            for tokens, weight in distribution.items()
            for token, chance in enumerate(table.distribution((*PROMPT, *tokens)).tolist())
        }
    return distribution


INNER: dict[str, Callable[[Coins], Drafter]] = {
    "chain": lambda coins: Drawn(model(7), coins, (1, 1)),
    "iid-tree": lambda coins: Drawn(model(7), coins, (2, 1), Kind.IID),
    "wor-tree": lambda coins: Drawn(model(7), coins, (2, 1), Kind.WITHOUT_REPLACEMENT),
    "ngram": lambda coins: NgramDrafter(n=2, k=3),
    "nothing": lambda coins: ScriptedDrafter(),
    "wrong": lambda coins: ScriptedDrafter("2 2 2"),
    "deep": lambda coins: CascadeDrafter(model(7), Drawn(model(8), coins, (1,)), right_rule(coins), k=2),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("budget", [Budget(3, 64), Budget(2, 64), Budget(8, 1)], ids=["3", "2", "1"])
def test_a_chain_has_the_draft_models_distribution(inner: str, budget: Budget) -> None:
    middle = model(5)
    trees = drafts(lambda coins: CascadeDrafter(middle, INNER[inner](coins), right_rule(coins), k=3), budget)
    length = min(3, budget.max_depth, budget.max_nodes)
    assert total_variation(chain_distribution(trees), product_distribution(middle, length)) < TINY
    check_recorded_distributions(trees, middle)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_chain_has_the_draft_models_distribution_under_other_inner_rules(name: str) -> None:
    middle, rule = model(5), registry.make("verifier", name)

    def build(coins: Coins) -> Drafter:
        return CascadeDrafter(middle, Drawn(model(7), coins, (1, 1)), lambda t, s, r: rule.decide(t, s, coins), k=3)

    assert total_variation(chain_distribution(drafts(build)), product_distribution(middle, 3)) < TINY


@pytest.mark.parametrize("name", ["rejection", "block", "traversal", "match", "multi_round", "kseq"])
@pytest.mark.parametrize("inner", ["chain", "wor-tree", "deep"])
def test_three_levels_keep_the_targets_distribution(inner: str, name: str) -> None:
    trees = drafts(lambda coins: CascadeDrafter(model(5), INNER[inner](coins), right_rule(coins), k=3))
    assert bias(registry.make("verifier", name).decide, TargetTables(model(1)), trees, 3) < TINY


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_a_stop_keeps_the_targets_distribution(name: str) -> None:
    def build(coins: Coins) -> Drafter:
        return CascadeDrafter(model(5), INNER["chain"](coins), right_rule(coins), k=3)

    trees = drafts(build, Budget(3, 64, min_confidence=0.35))
    assert {len(tree) for tree, _ in trees} == {2, 3, 4}
    for tree, _ in trees:
        sure = [
            float(model(5).distribution((*PROMPT, *tree.tokens[1:i]))[tree.tokens[i]]) >= 0.35
            for i in range(1, len(tree))
        ]
        assert all(sure[:-1]) and (len(tree) == 4 or not sure[-1])
    assert bias(registry.make("verifier", name).decide, TargetTables(model(1)), trees, 3) < TINY


@pytest.mark.parametrize("name", ["rejection", "block", "traversal", "match", "multi_round", "kseq"])
@pytest.mark.parametrize("late", ["chain", "wrong", "ngram"])
def test_a_chain_by_two_drafters_keeps_the_targets_distribution(late: str, name: str) -> None:
    """Drawn tokens of two distributions, or drawn tokens and then point masses."""

    def build(coins: Coins) -> Drafter:
        rule = right_rule(coins)
        return CascadeDrafter(
            model(5), NgramDrafter(n=2), rule, k=3, early=1 + (late == "ngram"), late=INNER[late](coins)
        )

    trees = drafts(build)
    points = {sum(row < 0 for row in tree.q_rows[1:]) for tree, _ in trees}
    assert max(points) == {"chain": 0, "wrong": 2, "ngram": 1}[late]
    assert bias(registry.make("verifier", name).decide, TargetTables(model(1)), trees, 3) < TINY


@pytest.mark.parametrize("lenience", [2.0, 5.0])
def test_lenient_chains_keep_the_targets_distribution_as_point_masses(lenience: float) -> None:
    def build(coins: Coins) -> Drafter:
        return CascadeDrafter(model(5), ScriptedDrafter("1 2 1"), right_rule(coins), k=3, lenience=lenience)

    trees = drafts(build)
    assert [tree.kind for tree, _ in trees] == [Kind.POINT]
    assert bias(registry.make("verifier", "point").decide, TargetTables(model(1)), trees, 3) < TINY


# -- staged ----------------------------------------------------------------------------------------------------------


def staged(coins: Coins, monkeypatch: pytest.MonkeyPatch, inner: str, k: int = 2, width: int = 2) -> Drafter:
    def draw(distribution: Tensor, count: int, context: Context) -> list[int]:
        count = min(count, int((distribution > 0).sum()))
        return distinct(distribution / distribution.sum(), count, coins)

    monkeypatch.setattr("foretoken.methods.drafters.staged.draw_without_replacement", draw)
    return StagedDrafter(model(5), INNER[inner](coins), right_rule(coins), k=k, width=width)


@pytest.mark.parametrize("name", ["without_replacement", "traversal", "match"])
@pytest.mark.parametrize(
    ("inner", "budget"),
    [
        ("chain", Budget(2, 64)),
        ("chain", Budget(2, 3)),
        ("ngram", Budget(2, 64, min_confidence=0.35)),
        ("ngram", Budget(2, 3, min_confidence=0.35)),
    ],
    ids=["whole", "three-nodes", "stop", "three-nodes-stop"],
)
def test_staged_trees_keep_the_targets_distribution(
    inner: str, budget: Budget, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = drafts(lambda coins: staged(coins, monkeypatch, inner), budget)
    check_recorded_distributions(trees, model(5))
    assert max(len(tree) for tree, _ in trees) == 1 + min(4, budget.max_nodes)
    assert bias(registry.make("verifier", name).decide, TargetTables(model(1)), trees, 2) < TINY


def test_siblings_cover_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = drafts(lambda coins: staged(coins, monkeypatch, "nothing", k=1, width=5))
    assert {tuple(sorted(tree.tokens[1:])) for tree, _ in trees} == {(0, 1, 2)}
    assert len(trees) == 6
    assert bias(registry.make("verifier", "traversal").decide, TargetTables(model(1)), trees, 1) < TINY


# -- negative controls -----------------------------------------------------------------------------------------------


def test_the_triforce_slip_emits_another_distribution() -> None:
    """Middle distribution (.5, .5), guesses always token 0: half of them are accepted, and half of the others are drawn
    as 0 again."""
    middle = TableModel(lambda prefix: [0.5, 0.5], 2)

    def build(rule: Callable[[Coins], Verify]) -> Build:
        return lambda coins: CascadeDrafter(middle, ScriptedDrafter("0"), rule(coins), k=2)

    def first_token(trees: Drafts) -> list[float]:
        return [sum(weight for tree, weight in trees if tree.tokens[1] == token) for token in (0, 1)]

    assert first_token(drafts(build(right_rule), prompt=[0])) == pytest.approx([0.5, 0.5], abs=TINY)
    slipped = drafts(build(triforce_rule), prompt=[0])
    assert first_token(slipped) == pytest.approx([0.75, 0.25], abs=TINY)
    assert all(tree.q is not None and tree.q[0].tolist() == [0.5, 0.5] for tree, _ in slipped)


def test_the_triforce_slip_is_caught_at_every_level() -> None:
    middle = model(5)
    trees = drafts(lambda coins: CascadeDrafter(middle, INNER["chain"](coins), triforce_rule(coins), k=3))
    assert total_variation(chain_distribution(trees), product_distribution(middle, 3)) > CAUGHT
    assert bias(registry.make("verifier", "block").decide, TargetTables(model(1)), trees, 3) > CAUGHT


def test_siblings_before_the_spine_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of the spine was drawn first: as the second child it is judged by the wrong distribution."""

    def swapped(tree: TokenTree) -> TokenTree:
        return TokenTree((tree.tokens[0], tree.tokens[2], tree.tokens[1]), (-1, 0, 0), tree.kind, tree.q, (-1, 0, 0))

    trees = [
        (swapped(tree), weight)
        for tree, weight in drafts(lambda coins: staged(coins, monkeypatch, "nothing", k=1, width=2))
    ]
    assert bias(registry.make("verifier", "without_replacement").decide, TargetTables(model(1)), trees, 1) > CAUGHT
