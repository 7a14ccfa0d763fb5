"""The production path: faster twins, laziness, nothing mutated, and the statistics of real uniforms."""

from __future__ import annotations

import pytest
import torch
from enumeration import Tables, grow, scores_of

from foretoken import registry
from foretoken.core import Kind, Rng, Scores, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams, draw, draw_by_blocks
from foretoken.methods.verifiers.base import Coins, SiblingDistributions, Verifier
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.rejection import RejectionVerifier

ALL = [row.name for row in registry.rows("verifier")]
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
]


def rule(name: str) -> Verifier:
    return registry.make("verifier", name)  # type: ignore[no-any-return]


def random_scores(
    seed: int, kind: Kind, shape: tuple[int, ...], params: SamplingParams, size: int = 40, races: bool = False
) -> Scores:
    """A random target near a random draft model, as a model of float32 logits would give them.

    The request has noise where the rule ``races``.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = Tables(size)
    tables.q = lambda prefix: torch.softmax(torch.randn(size, generator=generator), -1)
    tree = grow(tables, shape, kind, Coins(Rng(seed)))
    logits = torch.randn(len(tree), size, generator=generator)
    parents = torch.tensor(tree.parents[1:])
    if tree.q is not None:
        logits[parents] += 1.5 * tree.q[torch.tensor(tree.q_rows[1:])].log()
    else:
        logits[parents, torch.tensor(tree.tokens[1:])] += 3.0
    return Scores(logits, tree, (0,), Sampler(params, 1, Noise(seed) if races else None))


def kinds_of(name: str) -> list[tuple[str, Kind]]:
    return [(name, kind) for kind in Kind if kind in rule(name).kinds]


@pytest.mark.parametrize(("name", "kind"), [pair for name in ALL for pair in kinds_of(name)])
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-r{p.repetition_penalty}")
def test_verify_equals_the_plain_rule(name: str, kind: Kind, params: SamplingParams) -> None:
    verifier = rule(name)
    has_twin = type(verifier).decide_fast is not Verifier.decide_fast
    accepted = 0
    for seed in range(25 if has_twin else 4):
        for shape in ((1, 1, 1, 1),) if verifier.chains_only else ((1, 1, 1, 1), (3, 2)):
            scores = random_scores(seed, kind, shape, params, races=verifier.races)
            plain = verifier.decide(scores.tree, scores, Coins(Rng(seed)))
            assert verifier.verify(scores.tree, scores, Rng(seed)) == plain
            accepted += len(plain.path)
    assert accepted or not has_twin


def test_large_vocabularies_make_distributions_one_by_one() -> None:
    for verifier in (RejectionVerifier(), BlockVerifier()):
        for seed in range(3):
            scores = random_scores(seed, Kind.IID, (1, 1, 1), PARAMS[0], size=40_000)
            plain = verifier.decide(scores.tree, scores, Coins(Rng(seed)))
            assert verifier.verify(scores.tree, scores, Rng(seed)) == plain


@pytest.mark.parametrize(("name", "kind"), [pair for name in ALL for pair in kinds_of(name)])
def test_nothing_is_mutated(name: str, kind: Kind) -> None:
    verifier = rule(name)
    for seed in range(5):
        shape = (1, 1, 1) if verifier.chains_only else (3, 2)
        scores = random_scores(seed, kind, shape, PARAMS[0], races=verifier.races)
        distributions = [scores.p(node) for node in range(len(scores.tree))]
        before = [distribution.clone() for distribution in distributions]
        q = None if scores.tree.q is None else scores.tree.q.clone()
        logits = scores.logits.clone()
        verifier.verify(scores.tree, scores, Rng(seed))
        verifier.decide(scores.tree, scores, Coins(Rng(seed)))
        assert all(torch.equal(distribution, old) for distribution, old in zip(distributions, before, strict=True))
        assert torch.equal(scores.logits, logits)
        assert q is None or (scores.tree.q is not None and torch.equal(q, scores.tree.q))


class RecordingScores(Scores):
    """Scores that remember for which nodes a distribution was asked."""

    def p(self, node: int) -> torch.Tensor:
        self.taps.setdefault(str(node), self.logits)
        return super().p(node)


@pytest.mark.parametrize("name", ["match", "point", "multi_round", "without_replacement", "traversal", "rejection"])
def test_distributions_are_made_only_where_the_walk_goes(name: str) -> None:
    """All drafts are impossible under the target: the root's distribution is all that is needed."""
    verifier = rule(name)
    tree = TokenTree.chain(0, [2, 2, 2]) if verifier.chains_only else TokenTree((0, 2, 3, 2, 3), (-1, 0, 0, 1, 1))
    plain = scores_of(tree, Tables(4))
    plain.logits[:] = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    scores = RecordingScores(plain.logits, tree, (0,), plain.sampler)
    verdict = verifier.decide(tree, scores, Coins(Rng(0)))
    assert verdict.path == () and not verdict.next_is_bonus
    assert set(scores.taps) == {"0"}


def test_probes_are_never_walked() -> None:
    """A chain with a probe beside it: chain rules go along the chain, tree rules do not see the probe."""
    tables = Tables(3, one_hot=True)
    first = int(tables.p(()).argmax())
    second = int(tables.p((first,)).argmax())
    tree = TokenTree((0, first, first, second), (-1, 0, 0, 2), probes=(False, True, False, False))
    for name in ALL:
        assert rule(name).verify(tree, scores_of(tree, tables), Rng(0)).path == (2, 3), name


@pytest.mark.parametrize("name", ["rejection", "block", "lenient"])
def test_chain_rules_refuse_branches(name: str) -> None:
    tree = TokenTree((0, 1, 2), (-1, 0, 0))
    with pytest.raises(ValueError, match="supports chains only, but node 0 has 2 children"):
        rule(name).verify(tree, scores_of(tree, Tables(3)), Rng(0))


def test_bonus_means_that_the_path_reached_a_leaf() -> None:
    for name in ALL:
        for seed in range(20):
            kind = next(kind for kind in Kind if kind in rule(name).kinds)
            shape = (1, 1) if rule(name).chains_only else (2, 1)
            scores = random_scores(seed, kind, shape, PARAMS[0], races=rule(name).races)
            verdict = rule(name).verify(scores.tree, scores, Rng(seed))
            last = verdict.path[-1] if verdict.path else 0
            assert verdict.next_is_bonus == (not scores.tree.children[last])
            assert list(verdict.path) == scores.tree.path(last)[1:]


@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in ("greedy", "coupled", "typical", "top_k", "distance", "min_block")]
)
def test_plain_decoding_uses_one_uniform_per_token(name: str) -> None:
    tree, tables, rng = TokenTree.root_only(0), Tables(5), Rng(3)
    verdict = rule(name).verify(tree, scores_of(tree, tables), rng)
    other = Rng(3)
    assert verdict.next_token == draw(tables.p(()), other.uniform())
    assert rng.uniform() == other.uniform()


def test_draw_never_returns_a_token_of_zero_weight() -> None:
    distribution = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draw(distribution, 0.0) == 1
    assert draw(distribution, 0.3 - 1e-9) == 1
    assert draw(distribution, 1.0 - 2**-53) == 3
    assert draw(distribution * 5, 0.9) == 3


def test_draw_resolves_the_tail_of_a_large_vocabulary() -> None:
    """One token has half of the mass and 150k tokens share the rest: float32 steps would merge or skip many of them."""
    size = 150_000
    distribution = torch.full((size,), 0.5 / (size - 1))
    distribution[0] = 0.5
    tail = torch.arange(1000, 1200)
    drawn = [draw(distribution, 0.5 + (float(i) - 0.5) * 0.5 / (size - 1)) for i in tail]
    assert max(abs(token - int(i)) for token, i in zip(drawn, tail, strict=True)) <= 1


@pytest.mark.parametrize("size", [3, 256, 700, 1024, 70_000])
def test_draw_by_blocks_is_draw(size: int) -> None:
    distribution = torch.softmax(torch.randn(size, generator=torch.Generator().manual_seed(size)), -1).double()
    distribution[torch.arange(0, size, 3)] = 0.0
    if size > 600:
        distribution[256:600] = 0.0  # blocks without weight
    rng = Rng(size)
    for u in [0.0, 1.0 - 2**-53, *rng.uniforms(200)]:
        index = draw_by_blocks(distribution, u)
        assert float(distribution[index]) > 0.0
        cdf = distribution.cumsum(0) / distribution.sum()
        assert float(cdf[index] - distribution[index] / distribution.sum()) - 1e-12 <= u <= float(cdf[index]) + 1e-12


def test_sibling_distributions_keep_the_sequences_of_two_drafters_apart() -> None:
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    tree = TokenTree((0, 0, 2, 1), (-1, 0, 0, 0), Kind.WITHOUT_REPLACEMENT, q, (-1, 0, 1, 0))
    distributions = SiblingDistributions(tree)
    distributions.remove(1)
    second, third = distributions.distribution(2), distributions.distribution(3)
    assert second is not None and torch.allclose(second, q[1])
    assert third is not None and torch.allclose(third, torch.tensor([0.0, 0.6, 0.4]))


CHI_SQUARE_15 = 44.26  # 15 degrees of freedom: exceeded by chance with probability 1e-4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("match", Kind.POINT),
        ("rejection", Kind.IID),
        ("block", Kind.IID),
        ("point", Kind.POINT),
        ("multi_round", Kind.IID),
        ("kseq", Kind.IID),
        ("without_replacement", Kind.WITHOUT_REPLACEMENT),
        ("traversal", Kind.WITHOUT_REPLACEMENT),
    ],
)
def test_pairs_of_tokens_follow_the_target(name: str, kind: Kind) -> None:
    tables, verifier, rng = Tables(4, seed=7), rule(name), Rng(1234)
    coins = Coins(rng)
    count = 2500
    seen = torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(count):
        tree = grow(tables, (1, 1) if verifier.chains_only else (2, 1), kind, coins)
        verdict = verifier.verify(tree, scores_of(tree, tables), rng)
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        if len(tokens) == 1:
            tokens.append(coins.draw(tables.p((tokens[0],))))
        seen[tokens[0], tokens[1]] += 1
    expected = count * torch.stack([tables.p(())[x] * tables.p((x,)) for x in range(4)])
    assert float(((seen - expected) ** 2 / expected).sum()) < CHI_SQUARE_15
