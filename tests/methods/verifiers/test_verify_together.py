"""A batch is verified as its requests are one by one: the same verdicts from the same randomness, bit for bit."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from test_verify_paths import ALL, kinds_of, random_scores, rule

from foretoken.core import Kind, NonFiniteLogitsError, Rng, Scores, TokenTree, Verdict
from foretoken.core.sampling import SamplingParams, draw
from foretoken.methods.verifiers.base import Verifier, draw_all
from foretoken.methods.verifiers.batched import LateCoins, verify_batch
from foretoken.methods.verifiers.block import BlockVerifier
from foretoken.methods.verifiers.point import PointVerifier

MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
]
"""Requests that sample alike, and others that do not."""


def batch_of(seed: int, kind: Kind, chains: bool, size: int = 40, races: bool = False) -> list[Scores]:
    """Chains, trees where the rule takes them, and requests without a draft; with noise where the rule ``races``."""
    shapes = cycle([(1, 1, 1), (1,) if chains else (3, 2), (1, 1)])
    batch = [
        random_scores(seed + i, kind, shape, params, size, races)
        for i, (params, shape) in enumerate(zip(MIXED, shapes, strict=False))
    ]
    root = TokenTree.root_only(0)
    return [*batch, *(Scores(scores.logits[:1], root, (0,), scores.sampler) for scores in batch)]


@pytest.mark.parametrize(("name", "kind"), [pair for name in ALL for pair in kinds_of(name)])
def test_verdicts_of_a_batch_are_those_of_its_requests(name: str, kind: Kind) -> None:
    verifier = rule(name)
    accepted = 0
    for seed in range(0, 300, 15):
        many = batch_of(seed, kind, verifier.chains_only, races=verifier.races)
        if verifier.greedy_only:
            many = [request for request in many if request.sampler.greedy] * 3
        one_by_one = [Scores(request.logits, request.tree, request.prefix, request.sampler) for request in many]
        rngs, others = ([Rng(seed + i) for i in range(len(many))] for _ in range(2))
        verdicts = verify_batch([verifier] * len(many), many, rngs)
        assert verdicts == [
            verifier.verify(scores.tree, scores, rng) for scores, rng in zip(one_by_one, others, strict=True)
        ]
        assert [rng.uniform() for rng in rngs] == [rng.uniform() for rng in others]  # as many were used
        accepted += sum(len(verdict.path) for verdict in verdicts)
    assert accepted


def test_every_request_has_its_own_rule() -> None:
    kinds = [Kind.IID, Kind.POINT, Kind.IID, Kind.POINT]
    rules: list[Verifier] = [BlockVerifier(), PointVerifier(), rule("rejection"), rule("match")]
    many, again = ([random_scores(i, kind, (1, 1), MIXED[0]) for i, kind in enumerate(kinds)] for _ in range(2))
    verdicts = verify_batch(rules, many, [Rng(i) for i in range(4)])
    assert verdicts == [r.verify(s.tree, s, Rng(i)) for i, (r, s) in enumerate(zip(rules, again, strict=True))]


def test_distributions_and_weights_are_made_once() -> None:
    many = [random_scores(i, Kind.IID, (1, 1), MIXED[0]) for i in range(3)]
    verify_batch([BlockVerifier()] * 3, many, [Rng(i) for i in range(3)])
    for scores in many:
        assert scores.batched_p is not None and scores.tree.q is not None and scores.weights is not None
        assert torch.equal(scores.batched_p, scores.sampler.distributions(scores.logits, None))
        assert scores.weights[0] == [float(scores.batched_p[i, x]) for i, x in enumerate(scores.tree.tokens[1:])]
        assert scores.weights[1] == [float(scores.tree.q[i, x]) for i, x in enumerate(scores.tree.tokens[1:])]


def test_a_rule_with_a_verify_of_its_own_is_asked() -> None:
    class Stubborn(BlockVerifier):
        def verify(self, tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
            return Verdict((), 7, next_is_bonus=False)

    many = [random_scores(i, Kind.IID, (1, 1), MIXED[0]) for i in range(3)]
    assert {verdict.next_token for verdict in verify_batch([Stubborn()] * 3, many, [Rng(i) for i in range(3)])} == {7}


def test_what_draws_twice_does_not_draw_last() -> None:
    coins = LateCoins(Rng(0))
    assert coins.draw(torch.ones(4)) == LateCoins.UNKNOWN
    with pytest.raises(AssertionError, match="cannot defer its draw"):
        coins.draw(torch.ones(4))


def test_a_request_without_a_distribution_is_reported() -> None:
    many = [random_scores(i, Kind.IID, (1, 1), MIXED[0]) for i in range(3)]
    many[1].logits[0] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        verify_batch([BlockVerifier()] * 3, many, [Rng(i) for i in range(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 100, 40_000])
def test_draws_made_together(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        distributions = torch.rand(5, size, generator=generator, dtype=dtype).softmax(-1)
        distributions[1, size // 2 :] = 0.0  # nothing at the end, and weights that are no distribution
        uniforms = [*torch.rand(3, generator=generator, dtype=torch.float64).tolist(), 0.0, 1.0 - 2.0**-53]
        pairs = list(zip(distributions, uniforms, strict=True))
        assert draw_all(pairs) == [draw(distribution, u) for distribution, u in pairs]
        ends = [(distribution, 1.0 - 2.0**-53) for distribution in distributions]
        tokens = draw_all(ends)
        assert tokens == [draw(distribution, u) for distribution, u in ends]
        assert all(float(distribution[token]) > 0 for (distribution, _), token in zip(ends, tokens, strict=True))


def test_no_draws() -> None:
    assert draw_all([]) == []
