"""Identities between rules, by enumeration: where two rules must coincide, and who accepts more."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
from enumeration import (
    FixedTables,
    Tables,
    drafts,
    emitted,
    extended,
    mean_accepted,
    outcomes,
    scores_of,
    target_distribution,
    total_variation,
)

from foretoken import registry
from foretoken.core import Kind, TokenTree
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.kseq import _groups, threshold

TINY = 1e-12
LOSSLESS = [row.name for row in registry.rows("verifier") if row.lossless]


def rule(name: str) -> Verifier:
    return registry.make("verifier", name)  # type: ignore[no-any-return]


def same_rule(rule_a: str, rule_b: str, kind: Kind, shape: tuple[int, ...], tables: Tables) -> bool:
    trees = drafts(tables, shape, kind)
    first, second = (emitted(rule(name).decide, tables, trees) for name in (rule_a, rule_b))
    return total_variation(first, second) < TINY


@pytest.mark.parametrize("name", ["multi_round", "without_replacement", "kseq"])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_one_child_is_speculative_sampling(name: str, shape: tuple[int, ...]) -> None:
    kind = Kind.WITHOUT_REPLACEMENT if name == "without_replacement" else Kind.IID
    assert same_rule("rejection", name, kind, shape, Tables(3, seed=1))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("kind", list(Kind))
def test_traversal_of_a_chain_is_block_verification(shape: tuple[int, ...], kind: Kind) -> None:
    assert same_rule("block", "traversal", kind, shape, Tables(3, seed=2))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_block_verification_of_point_masses_is_the_token_rule(shape: tuple[int, ...]) -> None:
    assert same_rule("block", "rejection", Kind.POINT, shape, Tables(3, seed=3))


@pytest.mark.parametrize("name", ["traversal", "match", "multi_round", "without_replacement", "kseq"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (3, 1), (1, 2), (1, 1, 1)])
def test_on_point_masses_every_tree_rule_is_the_point_rule(name: str, shape: tuple[int, ...]) -> None:
    assert same_rule("point", name, Kind.POINT, shape, Tables(4, seed=4))


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("rejection", Kind.IID, (1, 1, 1)),
        ("block", Kind.IID, (1, 1, 1)),
        ("multi_round", Kind.IID, (2, 1)),
        ("kseq", Kind.IID, (2, 1)),
        ("without_replacement", Kind.WITHOUT_REPLACEMENT, (2, 2)),
        ("traversal", Kind.WITHOUT_REPLACEMENT, (2, 2)),
        ("traversal", Kind.IID, (2, 1)),
    ],
)
def test_a_perfect_draft_is_accepted_whole(name: str, kind: Kind, shape: tuple[int, ...]) -> None:
    tables = Tables(3, seed=5, closeness=1.0)
    accepted = mean_accepted(rule(name).decide, tables, drafts(tables, shape, kind))
    assert accepted == pytest.approx(len(shape), abs=1e-3 if name == "kseq" else TINY)  # rho is rounded up


@pytest.mark.parametrize("name", ["rejection", "block", "multi_round", "kseq", "traversal"])
def test_disjoint_supports_accept_nothing(name: str) -> None:
    tables = FixedTables([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75])
    shape = (1, 1) if rule(name).chains_only else (2, 1)
    accepted = emitted(rule(name).decide, tables, drafts(tables, shape, Kind.IID))
    assert {len(tokens) for tokens in accepted} == {1}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("seed", range(3))
def test_at_temperature_0_every_rule_is_the_greedy_walk(name: str, kind: Kind, seed: int) -> None:
    tables = Tables(3, seed=seed, one_hot=True)
    for tree, _ in drafts(tables, (1, 1) if rule(name).chains_only else (2, 1), kind):
        scores = scores_of(tree, tables)
        (walk, _), *_ = outcomes(lambda coins, t=tree, s=scores: rule("greedy").decide(t, s, coins))
        for verdict, _ in outcomes(lambda coins, t=tree, s=scores: rule(name).decide(t, s, coins)):
            tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
            expected = [*(tree.tokens[node] for node in walk.path), walk.next_token]
            if name == "traversal" and kind is Kind.IID:  # it does not look into an equal sibling's subtree
                expected = expected[: len(tokens)]
            assert tokens == expected


@pytest.mark.parametrize("name", LOSSLESS)
def test_at_temperature_0_the_distribution_is_one_sequence(name: str) -> None:
    tables = Tables(3, seed=9, one_hot=True)
    trees = drafts(tables, (1, 1), Kind.POINT)
    distribution = extended(emitted(rule(name).decide, tables, trees), tables, 3)
    assert total_variation(distribution, target_distribution(tables, 3)) < TINY


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_as_much_as_token_verification(seed: int) -> None:
    tables = Tables(3, seed=seed)
    trees = drafts(tables, (1, 1, 1), Kind.IID)
    token, block = (mean_accepted(rule(name).decide, tables, trees) for name in ("rejection", "block"))
    assert token <= block + TINY


@pytest.mark.parametrize("seed", range(4))
def test_traversal_accepts_at_least_as_much_as_the_top_down_walk(seed: int) -> None:
    tables = Tables(3, seed=seed, closeness=0.0)
    trees = drafts(tables, (2, 1), Kind.WITHOUT_REPLACEMENT)
    walk, traversal = (mean_accepted(rule(n).decide, tables, trees) for n in ("without_replacement", "traversal"))
    assert walk <= traversal + TINY


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_independent_children_stay_below_the_optimal_transport_bound(seed: int, k: int) -> None:
    tables = Tables(4, seed=seed, closeness=0.0)
    p, q = tables.p(()), tables.q(())
    subsets = chain.from_iterable(combinations(range(4), size) for size in range(5))
    bound = 1 + min(float(p[list(s)].sum() - q[list(s)].sum() ** k) for s in subsets)
    trees = drafts(tables, (k,), Kind.IID)
    reached = {name: mean_accepted(rule(name).decide, tables, trees) for name in ("match", "multi_round", "kseq")}
    reached["traversal"] = mean_accepted(rule("traversal").decide, tables, trees)
    assert max(reached.values()) <= bound + TINY
    assert reached["match"] <= min(reached["multi_round"], reached["kseq"]) + TINY
    if k == 1:
        assert reached["multi_round"] == pytest.approx(bound, abs=TINY)
    assert reached["traversal"] == pytest.approx(reached["multi_round"], abs=TINY)


def test_the_papers_example() -> None:
    """Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens: 10/9 accepted by token, 11/9 by block."""
    tables = FixedTables([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    trees = drafts(tables, (1, 1), Kind.IID)
    assert mean_accepted(rule("rejection").decide, tables, trees) == pytest.approx(10 / 9, abs=TINY)
    assert mean_accepted(rule("block").decide, tables, trees) == pytest.approx(11 / 9, abs=TINY)
    assert mean_accepted(rule("traversal").decide, tables, trees) == pytest.approx(11 / 9, abs=TINY)


def test_acceptance_rate_is_one_minus_total_variation() -> None:
    tables = Tables(5, seed=3)
    accepted = mean_accepted(rule("rejection").decide, tables, drafts(tables, (1,), Kind.IID))
    assert accepted == pytest.approx(float(torch.minimum(tables.p(()), tables.q(())).sum()), abs=TINY)


def test_kseq_threshold() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    assert threshold(p, q, 1) == 1.0
    rho = threshold(p, q, 3)
    assert 1.0 < rho < 3.0
    beta = float(torch.minimum(q, p / rho).sum())
    assert 1 - (1 - beta) ** 3 == pytest.approx(rho * beta, abs=1e-4)
    assert 1 - (1 - beta) ** 3 <= rho * beta


def test_the_root_is_never_rejected_by_rounding() -> None:
    """float32, q equal to p but for the last bits: residuals of rounding size must not break any rule."""
    p = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), -1)
    q = p * (1 + 1e-7)
    tree = TokenTree((0, 3, 4, 5), (-1, 0, 0, 1), Kind.IID, q.expand(2, -1), (-1, 0, 0, 1))

    class Unlucky(Coins):
        def __init__(self) -> None:
            pass

        def accept(self, num: float, den: float = 1.0, node: int | None = None) -> bool:
            return False

        def draw(self, distribution: torch.Tensor) -> int:
            assert torch.isfinite(distribution).all() and float(distribution.sum()) > 0
            return int(distribution.argmax())

    tables = FixedTables(p.tolist(), q.tolist())
    tables.p = lambda prefix: p
    for name in ("multi_round", "kseq", "traversal"):
        verdict = rule(name).decide(tree, scores_of(tree, tables), Unlucky())
        assert 0 <= verdict.next_token < 50


@pytest.mark.parametrize(("shift", "groups"), [(0.0, [[1, 2]]), (1e-15, [[1, 2]]), (1e-3, [[1], [2]])])
def test_rows_that_a_forward_computed_twice_are_one_distribution(shift: float, groups: list[list[int]]) -> None:
    """Otherwise the kernels would decide whether siblings share a threshold, and so a seeded text."""
    q = torch.softmax(torch.arange(6, dtype=torch.float64), -1)
    other = q + shift * torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    tree = TokenTree((0, 3, 4), (-1, 0, 0), Kind.IID, torch.stack([q, other]), (-1, 0, 1))
    assert _groups(tree, [1, 2]) == groups
