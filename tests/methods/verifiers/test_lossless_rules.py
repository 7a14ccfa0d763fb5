"""Every lossless rule, on every shape and kind that it is right for: its distribution is the target's, by
enumeration."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from enumeration import DRAWS, Rule, Tables, bias, drafts, outcomes, scores_of
from torch import Tensor

from foretoken import registry
from foretoken.core import Kind, TokenTree
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.kseq import threshold as kseq_threshold
from foretoken.methods.verifiers.point import PointVerifier

CHAINS = [(1,), (1, 1), (1, 1, 1)]
TREES = [(2,), (3,), (2, 1), (2, 2), (3, 1), (1, 2)]
SAMPLING = [r.name for r in registry.rows("verifier") if r.lossless and r.name not in ("greedy", "coupled")]
"""The race of ``coupled`` tosses no coins that could be enumerated: see ``test_coupled.py``."""
TINY = 1e-12


@pytest.fixture(autouse=True)
def remembered_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration meets the same few distributions thousands of times: bisect once for each."""
    thresholds: dict[tuple[object, ...], float] = {}

    def threshold(p: Tensor, q: Tensor, k: int) -> float:
        key = (*p.tolist(), *q.tolist(), k)
        if key not in thresholds:
            thresholds[key] = kseq_threshold(p, q, k)
        return thresholds[key]

    monkeypatch.setattr("foretoken.methods.verifiers.kseq.threshold", threshold)


def cases() -> list[tuple[str, Kind, tuple[int, ...]]]:
    rows = []
    for name in SAMPLING:
        rule: Verifier = registry.make("verifier", name)
        shapes = CHAINS if rule.chains_only else CHAINS + TREES
        rows += [(name, kind, shape) for kind in Kind if kind in rule.kinds for shape in shapes]
    return rows


@pytest.mark.parametrize(("name", "kind", "shape"), cases())
def test_distribution_is_the_target_distribution(name: str, kind: Kind, shape: tuple[int, ...]) -> None:
    size = 3 if len(shape) > 1 and sum(shape) > 2 else 4
    tables = Tables(size, seed=sum(shape))
    rule = registry.make("verifier", name).decide
    assert bias(rule, tables, drafts(tables, shape, kind), len(shape)) < TINY


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("seed", range(3))
def test_one_level_on_five_tokens_with_zeros(name: str, seed: int) -> None:
    rule: Verifier = registry.make("verifier", name)
    tables = Tables(5, seed=seed, closeness=0.0, zeros=1 + seed % 2, target_zeros=seed)
    shape = (1,) if rule.chains_only else (2,)
    for kind in rule.kinds:
        assert bias(rule.decide, tables, drafts(tables, shape, kind), 1) < TINY


@pytest.mark.parametrize("name", ["without_replacement", "traversal"])
@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_uniform_fallback_when_the_support_is_smaller_than_k(name: str, shape: tuple[int, ...]) -> None:
    tables = Tables(4, seed=5, closeness=0.0, zeros=3) if shape == (3,) else Tables(3, seed=5, closeness=0.0, zeros=2)
    trees = drafts(tables, shape, Kind.WITHOUT_REPLACEMENT)
    assert bias(registry.make("verifier", name).decide, tables, trees, len(shape)) < TINY


def faster_twins() -> list[tuple[str, Rule, Kind]]:
    return [
        ("block", BlockVerifier().decide_fast, Kind.IID),
        ("block", BlockVerifier().decide_fast, Kind.POINT),
        ("point", PointVerifier().decide_fast, Kind.POINT),
    ]


@pytest.mark.parametrize(("name", "rule", "kind"), faster_twins())
@pytest.mark.parametrize("shape", CHAINS)
def test_faster_twins_on_chains(name: str, rule: Rule, kind: Kind, shape: tuple[int, ...]) -> None:
    tables = Tables(3, seed=11)
    assert bias(rule, tables, drafts(tables, shape, kind), len(shape)) < TINY


@pytest.mark.parametrize("shape", [*TREES, (4,)])
def test_point_rule_on_the_host_covers_the_support(shape: tuple[int, ...]) -> None:
    tables = Tables(4, seed=3, target_zeros=1)
    assert bias(PointVerifier().decide_fast, tables, drafts(tables, shape, Kind.POINT), len(shape)) < TINY


def two_drafters(first: Tables, second: Tables, kind: Kind, coins: Coins) -> TokenTree:
    """Two children of the first drafter, one of the second, one point mass; each of the drawn ones with one child."""
    tokens = [0, *DRAWS[kind](first.q(()), 2, coins), *DRAWS[kind](second.q(()), 1, coins), 1]
    distributions, q_rows, parents = [first.q(()), second.q(())], [-1, 0, 0, 1, -1], [-1, 0, 0, 0, 0]
    for node, tables in ((1, first), (3, second)):
        distribution = tables.q((tokens[node],))
        tokens.append(DRAWS[kind](distribution, 1, coins)[0])
        parents.append(node)
        q_rows.append(len(distributions))
        distributions.append(distribution)
    return TokenTree(tokens, parents, kind, torch.stack(distributions), q_rows)


ENSEMBLES = [
    ("multi_round", Kind.IID),
    ("kseq", Kind.IID),
    ("match", Kind.IID),
    ("traversal", Kind.IID),
    ("without_replacement", Kind.WITHOUT_REPLACEMENT),
    ("traversal", Kind.WITHOUT_REPLACEMENT),
]


@pytest.mark.parametrize(("name", "kind"), ENSEMBLES)
def test_siblings_of_several_drafters(name: str, kind: Kind) -> None:
    first, second = Tables(3, seed=1), Tables(3, seed=1)
    second.q = Tables(3, seed=2).q  # another drafter for the same target
    trees = list(outcomes(lambda coins: two_drafters(first, second, kind, coins)))
    assert bias(registry.make("verifier", name).decide, first, trees, 2) < TINY


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_a_chain_of_drawn_and_deterministic_tokens(name: str) -> None:
    tables = Tables(3, seed=8)

    def draft(coins: Coins) -> TokenTree:
        first = coins.draw(tables.q(()))
        third_distribution = tables.q((first, 2))
        distributions = torch.stack([tables.q(()), third_distribution])
        return TokenTree(
            (0, first, 2, coins.draw(third_distribution)), (-1, 0, 1, 2), Kind.IID, distributions, (-1, 0, -1, 1)
        )

    rule = registry.make("verifier", name)
    assert bias(rule.decide, tables, list(outcomes(draft)), 3) < TINY
    if name == "block":
        assert bias(rule.decide_fast, tables, list(outcomes(draft)), 3) < TINY


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_stopping_after_an_unlikely_token_is_right(name: str) -> None:
    tables = Tables(3, seed=4)

    def draft(coins: Coins) -> TokenTree:
        tokens, distributions = [0], []
        while len(tokens) < 4:
            distribution = tables.q(tuple(tokens[1:]))
            tokens.append(coins.draw(distribution))
            distributions.append(distribution)
            if float(distribution[tokens[-1]]) < 0.3:
                break
        return TokenTree.chain(0, tokens[1:], torch.stack(distributions))

    trees = list(outcomes(draft))
    assert len({len(tree) for tree, _ in trees}) > 1
    assert bias(registry.make("verifier", name).decide, tables, trees, 3) < TINY


@pytest.mark.parametrize("name", [*SAMPLING, "greedy", "coupled"])
def test_empty_draft_is_plain_decoding(name: str) -> None:
    tables = Tables(4, one_hot=name not in SAMPLING)
    tree = TokenTree.root_only(0)
    assert bias(registry.make("verifier", name).decide, tables, [(tree, 1.0)], 0) < TINY


@pytest.mark.parametrize("name", ["multi_round", "kseq", "match"])
def test_equal_siblings_are_followed_together(name: str) -> None:
    """Two equal siblings of which only the second has a child: the path runs through the second."""
    tables = Tables(3, seed=6)
    q = torch.stack([tables.q(()), tables.q((1,))])
    tree = TokenTree((0, 1, 1, 2), (-1, 0, 0, 2), Kind.IID, q, (-1, 0, 0, 1))
    rule = partial(registry.make("verifier", name).decide, tree, scores_of(tree, tables))
    paths = {tuple(verdict.path) for verdict, _ in outcomes(rule)}
    assert (2, 3) in paths
    assert not any(path[:1] == (1,) for path in paths)
