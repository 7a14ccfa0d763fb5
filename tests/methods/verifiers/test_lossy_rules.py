"""Defining properties of the lossy rules."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import FixedTables, ProbabilitiesAsLogits, Tables, drafts, emitted, mean_accepted, outcomes, scores_of

from foretoken import registry
from foretoken.core import Kind, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.typical import TypicalVerifier

TINY = 1e-12
LOSSY = [row.name for row in registry.rows("verifier") if not row.lossless]


def rule(spec: str) -> Verifier:
    return registry.make("verifier", spec)  # type: ignore[no-any-return]


def verdict_of(spec: str, tree: TokenTree, tables: Tables) -> Verdict:
    return rule(spec).verify(tree, scores_of(tree, tables), Rng(0))


def at_temperature_0(logits: torch.Tensor, tree: TokenTree, **params: object) -> Scores:
    return Scores(logits, tree, (0,), Sampler(SamplingParams(temperature=0.0, **params)))  # type: ignore[arg-type]


def test_all_are_marked_as_lossy() -> None:
    assert LOSSY == ["typical", "lenient", "top_k", "distance", "min_block"]
    assert not any(rule(name).lossless for name in LOSSY)


@pytest.mark.parametrize(
    "spec",
    [
        "typical,eps=0",
        "typical,eps=1",
        "typical,delta=0",
        "typical,delta=inf",
        "typical,eps=nan",
        "lenient,lenience=0",
        "lenient,lenience=1.5",
        "lenient,lenience=nan",
        "top_k,k=0",
        "distance,eps=-1",
        "min_block,min_accepted=-1",
        "typical,sample_next=maybe",
        "top_k,q=3",
    ],
)
def test_options_outside_their_range(spec: str) -> None:
    with pytest.raises(ValueError):
        rule(spec)


@pytest.mark.parametrize("spec", ["typical", "top_k,k=1", "distance,eps=0", "min_block,min_accepted=0", "lenient"])
@pytest.mark.parametrize("seed", range(4))
def test_temperature_0_is_the_greedy_walk(spec: str, seed: int) -> None:
    """One-hot distributions; where raw logits matter, they are one-hot as well."""
    tables = Tables(3, seed=seed, one_hot=True)
    for tree, _ in drafts(tables, (1, 1) if rule(spec).chains_only else (2, 2), Kind.POINT):
        assert verdict_of(spec, tree, tables) == verdict_of("greedy", tree, tables)


# Typical acceptance.


def test_typical_threshold() -> None:
    typical = TypicalVerifier(eps=0.09, delta=0.3)
    certain = torch.tensor([1.0, 0.0, 0.0])
    assert typical.threshold(certain) == pytest.approx(0.09)
    uniform = torch.full((100,), 0.01)
    assert typical.threshold(uniform) == pytest.approx(0.3 / 100, rel=1e-5)
    coin = torch.tensor([0.5, 0.5])
    assert typical.threshold(coin) == pytest.approx(min(0.09, 0.15))


@pytest.mark.parametrize("size", [4, 50])
def test_typical_accepts_everything_under_a_uniform_distribution(size: int) -> None:
    tables = FixedTables([1 / size] * size, [1 / size] * size)
    tree = TokenTree.chain(0, [1, 0, 2])
    assert verdict_of("typical", tree, tables).path == (1, 2, 3)


def test_typical_accepts_above_the_bar_only() -> None:
    """H = 0.8018 nats, exp(-H) = 0.4485: the bar is min(0.3, 0.25 * 0.4485) = 0.1121."""
    p = [0.7, 0.2, 0.1]
    entropy = -sum(x * math.log(x) for x in p)
    assert entropy == pytest.approx(0.8018, abs=1e-4)
    tables = FixedTables(p, p)
    spec = "typical,eps=0.3,delta=0.25"
    assert verdict_of(spec, TokenTree.chain(0, [1]), tables) == Verdict((1,), 0, True)
    assert verdict_of(spec, TokenTree.chain(0, [2]), tables) == Verdict((), 0, False)


def test_typical_keeps_the_longest_run_and_breaks_ties_by_probability() -> None:
    tables = FixedTables([0.4, 0.35, 0.25, 0.0], [0.25] * 4)
    longest = TokenTree((0, 0, 1, 2), (-1, 0, 0, 2))  # 0 | 1 -> 2
    assert verdict_of("typical", longest, tables).path == (2, 3)
    tie = TokenTree((0, 2, 0, 1), (-1, 0, 0, 0))
    assert verdict_of("typical", tie, tables).path == (2,)
    same = TokenTree((0, 1, 1), (-1, 0, 0))
    assert verdict_of("typical", same, tables).path == (1,)  # the earlier sibling
    broken = TokenTree((0, 3, 0), (-1, 0, 1))  # an impossible token cuts the run though its child is fine
    assert verdict_of("typical", broken, tables) == Verdict((), 0, False)


@pytest.mark.parametrize("name", ["typical", "top_k", "distance", "min_block"])
def test_the_next_token_is_the_argmax_or_a_draw(name: str) -> None:
    tables = FixedTables([0.4, 0.35, 0.25], [0.25] * 3)
    tree = TokenTree.chain(0, [0])
    scores = scores_of(tree, tables)
    assert {v.next_token for v, _ in outcomes(lambda coins: rule(name).decide(tree, scores, coins))} == {0}
    drawn = rule(f"{name},sample_next=true")
    chances = {v.next_token: chance for v, chance in outcomes(lambda coins: drawn.decide(tree, scores, coins))}
    assert chances == pytest.approx({0: 0.4, 1: 0.35, 2: 0.25})


# Lenience.


def test_lenience_1_is_the_lossless_rule() -> None:
    tables = Tables(3, seed=1)
    for kind in (Kind.IID, Kind.POINT):
        trees = drafts(tables, (1, 1), kind)
        strict, lenient = (emitted(rule(s).decide, tables, trees) for s in ("rejection", "lenient,lenience=1.0"))
        assert strict == pytest.approx(lenient, abs=TINY)


@pytest.mark.parametrize("lenience", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("kind", [Kind.IID, Kind.POINT])
def test_lenience_bounds_every_probability(lenience: float, kind: Kind) -> None:
    tables = Tables(4, seed=2, closeness=0.0)
    p, q = tables.p(()), tables.q(())
    trees = drafts(tables, (1,), kind)
    distribution = emitted(rule(f"lenient,lenience={lenience}").decide, tables, trees)
    first = [sum(chance for tokens, chance in distribution.items() if tokens[0] == x) for x in range(4)]
    assert all(first[x] <= float(p[x]) / lenience + TINY for x in range(4))
    if kind is Kind.IID:
        accepted = mean_accepted(rule(f"lenient,lenience={lenience}").decide, tables, trees)
        assert accepted == pytest.approx(float(torch.minimum(p / lenience, q).sum()), abs=TINY)


def test_lenience_bound_is_tight() -> None:
    tables = FixedTables([0.1, 0.9], [0.9, 0.1])
    distribution = emitted(rule("lenient,lenience=0.5").decide, tables, drafts(tables, (1,), Kind.IID))
    assert sum(chance for tokens, chance in distribution.items() if tokens[0] == 0) == pytest.approx(0.1 / 0.5)


def test_lenience_at_temperature_0() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    accept, reject = TokenTree.chain(0, [1]), TokenTree.chain(0, [2])
    assert rule("lenient,lenience=0.5").verify(accept, at_temperature_0(logits, accept), Rng(0)).path == (1,)
    verdict = rule("lenient,lenience=0.5").verify(reject, at_temperature_0(logits, reject), Rng(0))
    assert verdict == Verdict((), 0, False)


# Blockwise parallel decoding.


def test_top_k_ranks_by_logits_at_temperature_0() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(3, -1)
    tree = TokenTree.chain(0, [1, 2])
    runs = [len(rule(f"top_k,k={k}").verify(tree, at_temperature_0(logits, tree), Rng(0)).path) for k in (1, 2, 3, 4)]
    assert runs == [0, 1, 2, 2]
    # With a bias at work raw logits do not know the distribution, so the exact rule is what is left.
    biased = at_temperature_0(logits, tree, logit_bias={3: 100.0})
    assert rule("top_k,k=3").verify(tree, biased, Rng(0)) == Verdict((), 3, False)


def test_top_k_of_the_whole_vocabulary_accepts_everything() -> None:
    tables = Tables(4, seed=1)
    for tree, _ in drafts(tables, (1, 1), Kind.IID):
        assert len(verdict_of("top_k,k=4", tree, tables).path) == 2


def test_top_k_never_accepts_an_impossible_token() -> None:
    tables = FixedTables([0.6, 0.4, 0.0], [0.2, 0.2, 0.6])
    assert verdict_of("top_k,k=3", TokenTree.chain(0, [2]), tables).path == ()


def test_lossy_predicates_accept_at_least_the_exact_run() -> None:
    tables = Tables(4, seed=3)
    for tree, _ in drafts(tables, (2, 1), Kind.WITHOUT_REPLACEMENT):
        exact = len(verdict_of("top_k,k=1", tree, tables).path)
        for spec in ("top_k,k=2", "distance,eps=1", "min_block,min_accepted=1"):
            assert exact <= len(verdict_of(spec, tree, tables).path)


def test_distance_of_token_ids() -> None:
    tables = FixedTables([0.1, 0.1, 0.5, 0.2, 0.1], [0.2] * 5)  # argmax 2
    accepted = [x for x in range(5) if verdict_of("distance,eps=1", TokenTree.chain(0, [x]), tables).path]
    assert accepted == [1, 2, 3]
    exact = [x for x in range(5) if verdict_of("distance,eps=0", TokenTree.chain(0, [x]), tables).path]
    assert exact == [2]


def test_min_block_on_chains() -> None:
    tables = FixedTables([0.6, 0.3, 0.1], [0.25] * 3)

    def accepted(drafts: list[int], least: int) -> int:
        return len(verdict_of(f"min_block,min_accepted={least}", TokenTree.chain(0, drafts), tables).path)

    assert accepted([1, 0, 0], 1) == 1  # max(n, l): the matches after the forced token do not count
    assert accepted([0, 0, 1], 1) == 2
    assert accepted([0, 1, 1], 3) == 3
    assert accepted([1, 1], 5) == 2
    assert accepted([1, 0], 0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["typical", "lenient", "top_k,k=4", "distance,eps=3", "min_block,min_accepted=2"])
def test_no_rule_accepts_what_a_grammar_forbids(spec: str, temperature: float) -> None:
    """Token 1 is the likeliest, and 3 is forbidden: rules that ask for no probability once wrote it."""

    def forbid(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(-1, torch.tensor([3]), -math.inf)

    sampler = Sampler(SamplingParams(temperature=temperature, processors=[forbid]))  # type: ignore[list-item]
    logits = torch.tensor([[1.0, 2.0, 0.0, 1.9]]).expand(3, -1)

    def accepted(drafts: list[int]) -> int:
        tree = TokenTree.chain(0, drafts)
        return len(rule(spec).verify(tree, Scores(logits, tree, (0,), sampler), Rng(0)).path)

    assert accepted([3, 1]) == 0 and accepted([1, 3]) <= 1 and accepted([1, 1]) >= accepted([1, 3])


def test_min_block_on_trees_forces_the_likeliest_path() -> None:
    tables = FixedTables([0.6, 0.3, 0.1], [0.25] * 3)
    tree = TokenTree((0, 2, 1, 0, 2), (-1, 0, 0, 1, 2))  # 2 -> 0 (0.06) | 1 -> 2 (0.03)
    assert verdict_of("min_block,min_accepted=2", tree, tables).path == (1, 3)
    assert verdict_of("min_block,min_accepted=1", tree, tables).path == (2,)


def test_probabilities_as_logits_is_a_distribution_maker() -> None:
    distributions = torch.eye(2)
    assert ProbabilitiesAsLogits().distribution(distributions[0], ()) is not None
