"""Merged trees of several drafters: every right rule keeps the target's distribution exactly, and wrong merging is
caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from enumeration import Drafts, FixedTables, Tables, bias, grow, mean_accepted, outcomes

from foretoken import registry
from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.trees.operations import merge
from foretoken.methods.verifiers.base import Coins

CAUGHT = 0.01
IID, WOR, POINT = Kind.IID, Kind.WITHOUT_REPLACEMENT, Kind.POINT
Member = tuple[Tables, Sequence[int], Kind]  # distributions, children per level, how they are drawn


def rule(name: str) -> Callable[[TokenTree, Scores, Coins], Verdict]:
    return registry.make("verifier", name).decide  # type: ignore[no-any-return]


def merged(members: Sequence[Member], kind: Kind | None = None) -> Drafts:
    """Every merged tree with its probability."""
    return list(outcomes(lambda coins: merge([grow(*member, coins) for member in members], kind)[0]))


def distributions(seed: int, **more: int) -> Tables:
    return Tables(3, seed=seed, **more)


TARGET = distributions(1, zeros=1)
A, B, C = TARGET, distributions(2), distributions(3, zeros=1)

GROUPS: dict[str, tuple[Sequence[Member], int]] = {
    "two-chains": ([(A, (1, 1), IID), (B, (1, 1), IID)], 2),
    "chain-and-tree": ([(A, (1,), IID), (B, (2, 1), IID)], 2),
    "equal-distributions": ([(A, (1, 1), IID), (A, (1, 1), IID)], 2),
    "three-drafters": ([(A, (1,), IID), (B, (1,), IID), (C, (1,), IID)], 1),
    "drawn-then-point": ([(A, (1, 1), IID), (B, (2, 1), POINT)], 2),
    "point-then-drawn": ([(B, (1, 1), POINT), (A, (2, 1), IID)], 2),
    "point-drawn-point": ([(B, (1,), POINT), (A, (1,), IID), (C, (2,), POINT)], 1),
}
WITHOUT: dict[str, tuple[Sequence[Member], int]] = {
    "two-sequences": ([(A, (2,), WOR), (B, (2,), WOR)], 1),
    "equal-distributions": ([(A, (2,), WOR), (A, (2,), WOR)], 1),
    "used-up": ([(C, (3,), WOR), (A, (1,), WOR)], 1),
    "two-levels": ([(A, (2, 1), WOR), (B, (1, 1), IID)], 2),
    "iid-siblings": ([(A, (2,), WOR), (B, (2,), IID), (C, (1,), POINT)], 1),
    "point-first": ([(C, (1, 1), POINT), (A, (2, 1), WOR)], 2),
}


@pytest.mark.parametrize("name", ["multi_round", "kseq", "traversal", "match"])
@pytest.mark.parametrize("group", GROUPS)
def test_independent_draws_of_several_drafters(group: str, name: str) -> None:
    members, depth = GROUPS[group]
    assert bias(rule(name), TARGET, merged(members), depth) < 1e-12


@pytest.mark.parametrize("name", ["without_replacement", "traversal", "match"])
@pytest.mark.parametrize("group", WITHOUT)
def test_draws_without_replacement_beside_others(group: str, name: str) -> None:
    members, depth = WITHOUT[group]
    assert bias(rule(name), TARGET, merged(members), depth) < 1e-12


@pytest.mark.parametrize("name", ["without_replacement", "traversal"])
@pytest.mark.parametrize("group", ["two-chains", "chain-and-tree", "point-then-drawn"])
def test_independent_draws_under_the_other_name(group: str, name: str) -> None:
    """A group with a member that draws without replacement calls all its trees so, whoever proposed this round."""
    members, depth = GROUPS[group]
    assert bias(rule(name), TARGET, merged(members, WOR), depth) < 1e-12


@pytest.mark.parametrize("name", ["multi_round", "traversal", "match"])
def test_what_the_first_leaves_of_the_budget_goes_to_the_next(name: str) -> None:
    """How much a member guesses may depend on what those before it drew: they are tried first."""

    def shared(coins: Coins) -> TokenTree:
        first = grow(A, (1, 1), IID, coins)
        if float(first.distribution(1)[first.tokens[1]]) < 0.4:  # type: ignore[index]  # an unsure draft stops
            first = TokenTree.chain(0, first.tokens[1:2], first.q[:1])  # type: ignore[index]
        return merge([first, grow(B, (1,) * (3 - first.num_drafts), IID, coins)])[0]

    trees = list(outcomes(shared))
    assert len({len(tree) for tree, _ in trees}) == 1 and len({tree.parents for tree, _ in trees}) == 2
    assert bias(rule(name), TARGET, trees, 2) < 1e-12


def test_two_different_drafts_accept_more_than_two_of_one() -> None:
    """The worked example of docs/methods/ensemble.md."""
    first, second = FixedTables([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), FixedTables([0.5, 0.3, 0.2], [0.6, 0.3, 0.1])
    twice = merged([(first, (1,), IID), (first, (1,), IID)])
    both = merged([(first, (1,), IID), (second, (1,), IID)])
    assert mean_accepted(rule("multi_round"), first, twice) == pytest.approx(0.76)
    assert mean_accepted(rule("multi_round"), first, both) == pytest.approx(0.88)
    copied = merged([(first, (1,), IID), (second, (1,), POINT)])  # the second always says token 0
    assert mean_accepted(rule("multi_round"), first, copied) == pytest.approx(1.0)


# -- negative controls -----------------------------------------------------------------------------------------------


def deduplicated(tree: TokenTree) -> TokenTree:
    """Drop a sibling that holds the same token as an earlier one (trees of depth 1)."""
    kept = [n for n in range(len(tree)) if n == 0 or tree.tokens[n] not in tree.tokens[1:n]]
    return replace(
        tree,
        tokens=tuple(tree.tokens[n] for n in kept),
        parents=(-1, *[0] * (len(kept) - 1)),
        q_rows=tuple(tree.q_rows[n] for n in kept),
        drafters=(),
    )


@pytest.mark.parametrize("name", ["multi_round", "traversal"])
def test_removing_duplicates_of_independent_drafters_is_caught(name: str) -> None:
    target = FixedTables([0.4, 0.35, 0.25], [0.8, 0.1, 0.1])
    other = FixedTables([0.4, 0.35, 0.25], [0.7, 0.1, 0.2])
    trees = merged([(target, (1,), IID), (other, (1,), IID)])
    assert bias(rule(name), target, trees, 1) < 1e-12
    assert bias(rule(name), target, [(deduplicated(tree), weight) for tree, weight in trees], 1) > CAUGHT


@pytest.mark.parametrize("name", ["multi_round", "kseq", "traversal"])
def test_one_distribution_for_all_drafters_is_caught(name: str) -> None:
    trees = merged([(A, (1,), IID), (B, (1,), IID)])
    wrong = [(replace(tree, q_rows=(-1, 0, 0)), weight) for tree, weight in trees]
    assert bias(rule(name), TARGET, trees, 1) < 1e-12
    assert bias(rule(name), TARGET, wrong, 1) > CAUGHT


@pytest.mark.parametrize("name", ["without_replacement", "traversal"])
def test_independent_siblings_that_share_a_row_are_caught(name: str) -> None:
    """Why a merged tree of draws without replacement gives every independent draw a row of its own."""
    target = Tables(4, seed=3)
    trees = merged([(target, (2,), IID), (Tables(4, seed=4), (1,), WOR)])
    wrong = [(replace(tree, q_rows=(-1, 0, 0, 2)), weight) for tree, weight in trees]
    assert bias(rule(name), target, trees, 1) < 1e-12
    assert bias(rule(name), target, wrong, 1) > CAUGHT


def test_a_draw_that_equals_a_point_mass_is_a_trial_all_the_same() -> None:
    target = FixedTables([0.3, 0.4, 0.3], [0.5, 0.2, 0.3])
    trees = merged([(target, (1,), POINT), (target, (1,), IID)])
    wrong = [(deduplicated(tree), weight) for tree, weight in trees]
    assert bias(rule("multi_round"), target, trees, 1) < 1e-12
    assert bias(rule("multi_round"), target, wrong, 1) > CAUGHT
