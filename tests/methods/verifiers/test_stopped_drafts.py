"""Drafts that a stop rule ends, enumerated: the target's distribution is accepted exactly; a rule that drops the token
breaks it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from enumeration import DRAWS, FixedTables, Tables, bias, mean_accepted, outcomes
from torch import Tensor

from foretoken import registry
from foretoken.core import Budget, Context, Kind, Limits, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.loading import build_controller
from foretoken.methods.controllers.base import Controller
from foretoken.methods.verifiers.base import Coins

EXACT, CAUGHT = 1e-12, 0.01
RULES = {
    "draft_verify": "draft_verify,threshold=0.6",
    "adaedl": "adaedl,threshold=0.57",
    "svip": "svip,threshold=0.36",
    "tapout": "tapout",
}
View = Callable[[Tensor, int], tuple[Tensor | None, float]]


def with_distribution(distribution: Tensor, token: int) -> tuple[Tensor | None, float]:
    """The distributions that a drafter shows a stop rule."""
    return distribution, float(distribution[token])


def without_distribution(distribution: Tensor, token: int) -> tuple[Tensor | None, float]:
    """A counting drafter shows no distribution: a rule then looks at the drawn token."""
    return None, float(distribution[token])


def budget_of(spec: str) -> Budget:
    controller: Controller = build_controller(spec)
    controller.attach(Limits("toy", 3, 64))
    sampling = Sampler(SamplingParams(temperature=1.0))
    return controller.budget(Context(0, [0], 1, sampling, Rng(0)), 1)


def rule_named(name: str) -> Callable[[TokenTree, Scores, Coins], Verdict]:
    decide: Callable[[TokenTree, Scores, Coins], Verdict] = registry.make("verifier", name).decide
    return decide


def stopped(
    tables: Tables, budget: Budget, view: View, shape: tuple[int, ...], drops: bool, most: int, coins: Coins
) -> TokenTree:
    """A draft of at most three levels and ``most`` nodes; ``drops`` takes the token that ends it away."""
    kind = Kind.IID if max(shape) == 1 else Kind.WITHOUT_REPLACEMENT
    tokens, parents, q_rows, distributions = [0], [-1], [-1], []
    level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for width in shape:
        following = []
        for node, prefix in level:
            distribution = tables.q(prefix)
            for token in DRAWS[kind](distribution, min(width, most + 1 - len(tokens)), coins):
                stops = budget.stops_after(*view(distribution, token))
                if stops and drops:
                    continue
                if not stops:
                    following.append((len(tokens), (*prefix, token)))
                distributions.append(distribution)
                tokens.append(token)
                parents.append(node)
                q_rows.append(len(distributions) - 1)
        level = following
    if len(tokens) == 1:
        return TokenTree.root_only(0)
    # Siblings share a row: the first one's.
    rows = [
        min(q_rows[n] for n in range(1, len(tokens)) if parents[n] == parents[node]) for node in range(1, len(tokens))
    ]
    return TokenTree(tuple(tokens), tuple(parents), kind, torch.stack(distributions), (-1, *rows))


def trees_of(
    tables: Tables, spec: str, view: View, shape: tuple[int, ...] = (1, 1, 1), drops: bool = False, most: int = 64
) -> list[tuple[TokenTree, float]]:
    return list(outcomes(partial(stopped, tables, budget_of(spec), view, shape, drops, most)))


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("view", [with_distribution, without_distribution])
@pytest.mark.parametrize("spec", RULES.values(), ids=RULES)
def test_chains_that_a_rule_ends_are_exact(spec: str, view: View, verifier: str) -> None:
    tables = Tables(3, seed=14)
    trees = trees_of(tables, spec, view)
    assert len({len(tree) for tree, _ in trees}) > 1, "the rule never had a choice"
    assert bias(rule_named(verifier), tables, trees, 3) < EXACT


@pytest.mark.parametrize("verifier", ["without_replacement", "traversal"])
@pytest.mark.parametrize("view", [with_distribution, without_distribution])
@pytest.mark.parametrize("spec", RULES.values(), ids=RULES)
def test_trees_that_a_rule_ends_are_exact(spec: str, view: View, verifier: str) -> None:
    tables = Tables(3, seed=14)
    trees = trees_of(tables, spec, view, (2, 1, 1))
    assert len({len(tree) for tree, _ in trees}) > 1, "the rule never had a choice"
    assert bias(rule_named(verifier), tables, trees, 3) < EXACT


@pytest.mark.parametrize("verifier", ["without_replacement", "traversal"])
@pytest.mark.parametrize("most", [3, 4, 5])
def test_nodes_that_a_stop_elsewhere_left_room_for_are_exact(most: int, verifier: str) -> None:
    """With a limit on nodes, a tree by levels has more of them in one subtree where another one stopped."""
    tables = Tables(3, seed=14)
    trees = trees_of(tables, RULES["draft_verify"], without_distribution, (2, 2, 1), most=most)
    full = {tuple(map(len, tree.children[1:3])) for tree, _ in trees if tree.num_drafts == most}
    assert len(full) > 1, "a stop never left room"
    assert bias(rule_named(verifier), tables, trees, 3) < EXACT


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("spec", RULES.values(), ids=RULES)
def test_dropping_an_unlikely_token_is_caught(spec: str, verifier: str) -> None:
    """The same rules on the token's own probability, with the token taken out of the draft."""
    tables = Tables(3, seed=14)
    assert bias(rule_named(verifier), tables, trees_of(tables, spec, without_distribution, drops=True), 3) > CAUGHT


def test_dropping_for_the_distribution_alone_is_no_error() -> None:
    """A distribution does not know the token: then even taking it away is adapted, and costs nothing but its chance."""
    tables = Tables(3, seed=14)
    dropped = trees_of(tables, RULES["svip"], with_distribution, drops=True)
    kept = trees_of(tables, RULES["svip"], with_distribution)
    assert bias(rule_named("block"), tables, dropped, 3) < EXACT
    assert mean_accepted(rule_named("block"), tables, dropped) < mean_accepted(rule_named("block"), tables, kept)


def test_the_worked_example_of_the_confidence_page() -> None:
    """p = (.45, .3, .2, .05), q = (.1, .5, .3, .1), tokens below .2 dropped: (.39, .36, .24, .01) comes out."""
    tables = FixedTables((0.45, 0.3, 0.2, 0.05), (0.1, 0.5, 0.3, 0.1))

    def draft(coins: Coins) -> TokenTree:
        distribution = tables.q(())
        token = coins.draw(distribution)
        return (
            TokenTree.root_only(0)
            if float(distribution[token]) < 0.2
            else TokenTree.chain(0, [token], distribution[None])
        )

    first = [0.0] * 4
    for tree, weight in outcomes(draft):
        scores = Scores(torch.stack([tables.p(())] * len(tree)), tree, (0,), Sampler(SamplingParams(temperature=1.0)))
        scores._distributions.update(dict.fromkeys(range(len(tree)), tables.p(())))
        for verdict, chance in outcomes(partial(rule_named("rejection"), tree, scores)):
            first[tree.tokens[verdict.path[0]] if verdict.path else verdict.next_token] += weight * chance
    assert first == pytest.approx([0.39, 0.36, 0.24, 0.01], abs=1e-12)
