"""Filters that look at candidates alone leave what the plain form leaves, of likely and of flat distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import NonFiniteLogitsError
from foretoken.core.filters import DEPTHS, Filters
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams

SIZE = 4000
FILTERS = {
    "top_k": Filters(top_k=20),
    "top_k of one": Filters(top_k=1),
    "top_k of all": Filters(top_k=SIZE),
    "top_k beyond": Filters(top_k=10 * SIZE),
    "top_k of all and top_p": Filters(top_k=SIZE, top_p=0.9),
    "top_k beyond and top_p": Filters(top_k=10 * SIZE, top_p=0.5),
    "top_p": Filters(top_p=0.9),
    "little top_p": Filters(top_p=0.05),
    "much top_p": Filters(top_p=0.9999),
    "nearly all of top_p": Filters(top_p=0.9999999),
    "min_p": Filters(min_p=0.05),
    "min_p of one": Filters(min_p=1.0),
    "all": Filters(top_k=50, top_p=0.8, min_p=0.02),
    "top_k and top_p": Filters(top_k=3000, top_p=0.99),
}


def scores_of(kind: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits [5, SIZE] of texts that go on in few ways or in many, or with equally likely tokens."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(5, SIZE, generator=generator, dtype=torch.float64)
    if kind == "likely":
        scores[:, torch.randperm(SIZE, generator=generator)[:30]] += torch.linspace(14, 4, 30, dtype=torch.float64)
    elif kind == "ties":
        scores = (scores * 2).round()
    elif kind == "impossible":
        scores[:, 3 * SIZE // 4 :] = -torch.inf
        scores[0, 2:] = -torch.inf
    elif kind == "even":
        scores.zero_()
    return scores.to(dtype)


@pytest.mark.parametrize("kind", ["likely", "flat", "ties", "impossible", "even"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_candidates_are_enough(name: str, kind: str, temperature: float) -> None:
    filters, scores = FILTERS[name], scores_of(kind)
    expected = filters.cut(torch.softmax(scores / temperature, -1), scores)
    filtered = filters.filtered(scores, temperature)
    if (kind, name) != ("even", "top_k"):  # which of tokens that rounding alone tells apart
        assert torch.equal(filtered > 0, expected > 0)
    torch.testing.assert_close(filtered, expected, rtol=1e-12, atol=1e-15)
    logs = filters.logs(scores, temperature)
    assert torch.equal(logs > -torch.inf, filtered > 0)
    torch.testing.assert_close(logs.exp(), filtered, rtol=1e-12, atol=1e-15)


def test_likely_tokens_alone_would_not_do() -> None:
    """The control: the flat rows above need the second look."""
    rows = torch.softmax(scores_of("flat"), -1)
    assert not bool(((rows * (rows >= DEPTHS[0])).sum(-1) > 0.9999).any())


@pytest.mark.parametrize("name", FILTERS)
def test_float32_is_float64_but_for_rounding(name: str) -> None:
    wide = FILTERS[name].filtered(scores_of("likely"), 0.8)
    filtered = FILTERS[name].filtered(scores_of("likely", torch.float32), 0.8)
    assert filtered.dtype == torch.float32
    assert float((filtered - wide).abs().sum(-1).max()) < 2e-5


def test_scores_at_the_ends_of_float32_do_no_harm(recwarn: pytest.WarningsRecorder) -> None:
    scores = torch.tensor([[3e38, -3e38, 3e38, -torch.inf]])
    assert Filters(top_p=0.9).filtered(scores, 0.1).tolist() == [[0.5, 0.0, 0.5, 0.0]]
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tiny", [1e-38, 1e-45, 1e-310, 5e-324])
@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature"])
def test_the_smallest_values_give_distributions_without_warnings(
    name: str, tiny: float, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    scores = scores_of("likely", dtype)
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, name: tiny}))
    plain = torch.softmax(scores, -1)
    expected = plain if name == "min_p" else torch.zeros_like(plain).scatter_(-1, plain.argmax(-1, True), 1.0)
    torch.testing.assert_close(sampler.distributions(scores, None), expected, rtol=1e-5, atol=1e-7)
    assert not recwarn.list


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("read", ["distribution", "ranking"])
def test_what_is_not_finite_is_refused(bad: float, read: str) -> None:
    scores = scores_of("likely", torch.float32)[:1]
    scores[0, 7] = bad
    sampler = Sampler(SamplingParams(temperature=0.7, top_p=0.9), 0, Noise(1))
    for rows in (scores, torch.full_like(scores, -torch.inf)):
        with pytest.raises(NonFiniteLogitsError):
            sampler.distribution(rows[0], ()) if read == "distribution" else sampler.ranking(rows, [3], None)


@pytest.mark.parametrize("kind", ["likely", "flat"])
def test_the_race_of_what_is_left_is_that_of_all_tokens(kind: str) -> None:
    """Noise is made for the tokens that may follow alone, and is what it would be for all."""
    scores, noise = scores_of(kind, torch.float32), Noise(9)
    sampler = Sampler(SamplingParams(temperature=0.9, top_p=0.95), 4, noise)
    lengths = [4, 9, 9, 30, 5]
    ranking = sampler.ranking(scores, lengths, None)
    logs = Filters(top_p=0.95).logs(scores, 0.9).double()
    every = torch.stack([noise.gumbels(length - 4, SIZE, scores.device) for length in lengths])
    torch.testing.assert_close(ranking, logs + every, rtol=1e-13, atol=1e-13)
    assert ranking.dtype == torch.float64 and np.isneginf(ranking.numpy()).sum() > 0


@pytest.mark.parametrize("temperature", [1e8, 1e30])
def test_top_k_goes_by_scores_where_a_high_temperature_makes_all_tokens_equally_likely(temperature: float) -> None:
    scores, filters = scores_of("likely", torch.float32), Filters(top_k=3)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(3).indices, True)
    assert torch.equal(filters.filtered(scores, temperature) > 0, best)
    distributions = torch.softmax((scores - scores.amax(-1, keepdim=True)) / temperature, -1)
    assert torch.equal(filters.cut(distributions, scores) > 0, best)


@pytest.mark.parametrize("kind", ["likely", "flat", "ties", "impossible", "even"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_winner_of_what_is_kept_is_the_largest_of_the_ranking(name: str, kind: str) -> None:
    filters = FILTERS[name]
    params = SamplingParams(temperature=0.8, top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rows, lengths = scores_of(kind, dtype), [3, 4, 5, 5, 90]
        for seed in range(4):
            sampler = Sampler(params, 3, Noise(seed))
            expected = sampler.ranking(rows, lengths, None).argmax(-1).tolist()
            assert sampler.winners(rows, lengths, None) == expected
