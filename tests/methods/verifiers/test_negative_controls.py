"""Planted wrong rules and wrong proposals: the enumeration must catch every one (TV above 0.01)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from enumeration import (
    DRAWS,
    Drafts,
    FixedTables,
    SharedUniformCoins,
    Tables,
    bias,
    distinct,
    drafts,
    grow,
    independent,
    likeliest,
    outcomes,
)
from torch import Tensor

from foretoken import registry
from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, drawn_probability, leftover, residual, rest_of, scaled, verdict_at
from foretoken.methods.verifiers.block import pass_probability

CAUGHT = 0.01
WOR = Kind.WITHOUT_REPLACEMENT


def right(name: str) -> Callable[[TokenTree, Scores, Coins], Verdict]:
    return registry.make("verifier", name).decide  # type: ignore[no-any-return]


def test_the_right_rules_pass_where_the_wrong_ones_are_caught() -> None:
    tables = Tables(3, seed=2)
    assert bias(right("rejection"), tables, drafts(tables, (1, 1), Kind.IID), 2) < 1e-12
    assert bias(right("block"), tables, drafts(tables, (1, 1, 1), Kind.IID), 3) < 1e-12


def chain_rule(
    accepts: Callable[[Tensor, Tensor, int, Coins], bool], rest: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[TokenTree, Scores, Coins], Verdict]:
    """Token verification with its two parts exchanged for others."""

    def decide(tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        for node in range(1, len(tree)):
            p, q, x = scores.p(node - 1), tree.distribution(node), tree.tokens[node]
            assert q is not None
            if not accepts(p, q, x, coins):
                return Verdict(tuple(range(1, node)), coins.draw(rest(p, q)), False)
        return Verdict(tuple(range(1, len(tree))), coins.draw(scores.p(len(tree) - 1)), True)

    return decide


def test_p_and_q_swapped() -> None:
    def accepts(p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(q[x]), float(p[x]))

    tables = Tables(3, seed=2)
    assert bias(chain_rule(accepts, residual), tables, drafts(tables, (1, 1), Kind.IID), 2) > CAUGHT


def test_no_residual() -> None:
    def accepts(p: Tensor, q: Tensor, x: int, coins: Coins) -> bool:
        return coins.accept(float(p[x]), float(q[x]))

    tables = Tables(3, seed=2)
    assert bias(chain_rule(accepts, lambda p, q: p), tables, drafts(tables, (1, 1), Kind.IID), 2) > CAUGHT


def test_one_uniform_for_the_test_and_the_residual() -> None:
    tables = FixedTables([0.2, 0.5, 0.3], [0.6, 0.2, 0.2])
    trees = drafts(tables, (1,), Kind.IID)
    assert bias(right("rejection"), tables, trees, 1, SharedUniformCoins) > CAUGHT


def test_soft_distribution_with_an_argmax_draw() -> None:
    tables = Tables(3, seed=2)
    trees = drafts(tables, (1, 1), Kind.IID, likeliest)
    assert bias(right("rejection"), tables, trees, 2) > CAUGHT


def test_filtered_draw_with_an_unfiltered_distribution() -> None:
    def top_two(distribution: Tensor, count: int, coins: Coins) -> list[int]:
        kept = torch.where(distribution >= distribution.topk(2).values[-1], distribution, 0.0)
        return [coins.draw(kept) for _ in range(count)]

    tables = Tables(4, seed=2)
    assert bias(right("rejection"), tables, drafts(tables, (1,), Kind.IID, top_two), 1) > CAUGHT


def test_soft_distribution_with_top_k_children() -> None:
    tables = Tables(4, seed=2)
    for name in ("multi_round", "traversal"):
        assert bias(right(name), tables, drafts(tables, (2,), Kind.IID, likeliest), 1) > CAUGHT
    assert bias(right("without_replacement"), tables, drafts(tables, (2,), WOR, likeliest), 1) > CAUGHT


def test_dropping_a_low_confidence_token() -> None:
    def draft(tables: Tables, coins: Coins) -> TokenTree:
        tokens, distributions = [0], []
        for _ in range(2):
            distribution = tables.q(tuple(tokens[1:]))
            token = coins.draw(distribution)
            if float(distribution[token]) < 0.35:
                break
            tokens.append(token)
            distributions.append(distribution)
        return TokenTree.chain(0, tokens[1:], torch.stack(distributions) if distributions else None)

    tables = Tables(3, seed=4)
    trees = list(outcomes(lambda coins: draft(tables, coins)))
    for name in ("rejection", "block"):
        assert bias(right(name), tables, trees, 2) > CAUGHT


# Block verification gone wrong.


def wrong_block(
    first_failure: bool = False, token_residual: bool = False, uncapped: bool = False
) -> Callable[[TokenTree, Scores, Coins], Verdict]:
    def decide(tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        last = len(tree) - 1
        keep, ratio = [1.0], 1.0
        for node in range(1, len(tree)):
            p, q = float(scores.p(node - 1)[tree.tokens[node]]), drawn_probability(tree, node)
            keep.append(scaled(keep[-1], p, q))
            ratio *= p / q
        rests = [leftover(scores.p(i), tree.distribution(i + 1), tree.tokens[i + 1], keep[i]) for i in range(last)]
        chances = [1.0, *(pass_probability(float(rests[i].sum()), keep[i]) for i in range(1, last))]
        chances.append(min(1.0, ratio) if uncapped else keep[last])
        passed = [coins.accept(chance) for chance in chances]
        if first_failure:
            stop = (passed.index(False) if False in passed else last + 1) - 1
        else:
            stop = max(i for i in range(last + 1) if passed[i])
        if stop == last:
            distribution = scores.p(last)
        elif token_residual:
            distribution = rest_of(scores.p(stop), tree.distribution(stop + 1), tree.tokens[stop + 1])
        else:
            distribution = rests[stop]
        return verdict_at(tree, range(1, stop + 1), coins.draw(distribution))

    return decide


def test_wrong_blocks() -> None:
    tables = Tables(3, seed=13, closeness=0.0)
    trees = drafts(tables, (1, 1), Kind.IID)
    assert bias(wrong_block(), tables, trees, 2) < 1e-12
    assert bias(wrong_block(first_failure=True), tables, trees, 2) > CAUGHT
    assert bias(wrong_block(token_residual=True), tables, trees, 2) > CAUGHT
    assert bias(wrong_block(uncapped=True), tables, trees, 2) > CAUGHT


# Sibling draws that do not fit the rule.


def with_children(trees: Drafts, change: Callable[[TokenTree], TokenTree]) -> Drafts:
    return [(change(tree), weight) for tree, weight in trees]


def children_only(tree: TokenTree, tokens: list[int]) -> TokenTree:
    """A one-level tree with other children, drawn (so it says) from the same distribution."""
    return TokenTree((0, *tokens), (-1, *[0] * len(tokens)), tree.kind, tree.q, (-1, *[0] * len(tokens)))


def test_duplicates_removed_before_the_multi_round_rule() -> None:
    tables = FixedTables([0.15, 0.35, 0.5], [0.7, 0.2, 0.1])
    trees = with_children(
        drafts(tables, (3,), Kind.IID), lambda tree: children_only(tree, list(dict.fromkeys(tree.tokens[1:])))
    )
    assert bias(right("multi_round"), tables, trees, 1) > CAUGHT


def test_multi_round_rule_on_draws_without_replacement() -> None:
    tables = FixedTables([0.15, 0.35, 0.5], [0.7, 0.2, 0.1])
    trees = drafts(tables, (2,), Kind.IID, distinct)
    for name in ("multi_round", "traversal"):
        assert bias(right(name), tables, trees, 1) > CAUGHT


def test_independent_draws_under_the_rule_without_replacement() -> None:
    tables = FixedTables([0.15, 0.35, 0.5], [0.7, 0.2, 0.1])
    trees = drafts(tables, (2,), WOR, independent)
    assert bias(right("without_replacement"), tables, trees, 1) > CAUGHT


def test_siblings_sorted_by_the_draft_distribution() -> None:
    tables = FixedTables([0.15, 0.35, 0.5], [0.5, 0.3, 0.2])

    def sort(tree: TokenTree) -> TokenTree:
        assert tree.q is not None
        return children_only(tree, sorted(tree.tokens[1:], key=lambda token: -float(tree.q[0][token])))  # type: ignore[index]

    trees = with_children(drafts(tables, (2,), WOR), sort)
    for name in ("without_replacement", "traversal"):
        assert bias(right(name), tables, trees, 1) > CAUGHT


def test_siblings_pruned_by_their_own_probability() -> None:
    tables = FixedTables([0.15, 0.35, 0.5], [0.5, 0.3, 0.2])

    def prune(tree: TokenTree) -> TokenTree:
        return children_only(tree, [t for t in tree.tokens[1:] if float(tables.q(())[t]) > 0.25])

    trees = with_children(drafts(tables, (2,), WOR), prune)
    assert bias(right("without_replacement"), tables, trees, 1) > CAUGHT


def test_draft_distribution_of_the_wrong_node() -> None:
    """The children's distribution recorded one level off: a child tested against its parent's own sibling
    distribution."""
    tables = Tables(3, seed=2)

    def draft(coins: Coins) -> TokenTree:
        tree = grow(tables, (2, 1), WOR, coins)
        return TokenTree(tree.tokens, tree.parents, WOR, tree.q, (-1, 0, 0, 0, 0))

    trees = list(outcomes(draft))
    for name in ("without_replacement", "traversal"):
        assert bias(right(name), tables, trees, 2) > CAUGHT


def test_one_target_draw_per_path() -> None:
    def decide(tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        token = -1
        for child in tree.children[0]:
            token = coins.draw(scores.p(0))
            if token == tree.tokens[child]:
                return Verdict((child,), coins.draw(scores.p(child)), True)
        return Verdict((), token, False)

    tables = Tables(4, seed=1)
    assert bias(decide, tables, drafts(tables, (2,), Kind.POINT), 1) > CAUGHT
    assert bias(right("match"), tables, drafts(tables, (2,), Kind.POINT), 1) < 1e-12


def test_a_target_draw_that_looks_at_the_residual_of_the_wrong_child() -> None:
    """A top-down rule that leaves p as it was between trials."""

    def decide(tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        p = scores.p(0)
        for child in tree.children[0]:
            if coins.accept(float(p[tree.tokens[child]]), drawn_probability(tree, child)):
                return Verdict((child,), coins.draw(scores.p(child)), True)
        return Verdict((), coins.draw(rest_of(p, tree.distribution(1), tree.tokens[1])), False)

    tables = Tables(4, seed=1)
    assert bias(decide, tables, drafts(tables, (2,), Kind.IID), 1) > CAUGHT


def test_the_enumeration_draws_what_it_says() -> None:
    """The draws themselves: independent, distinct and deterministic children have the distributions of their kinds."""
    distribution = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for kind, expected in ((Kind.IID, 0.25), (WOR, 0.0), (Kind.POINT, 0.0)):
        pairs = list(outcomes(lambda coins, draw=DRAWS[kind]: tuple(draw(distribution, 2, coins))))
        assert abs(sum(weight for _, weight in pairs) - 1.0) < 1e-12
        assert abs(sum(weight for pair, weight in pairs if pair == (0, 0)) - expected) < 1e-12
