"""Sampling: one function from logits to a distribution, compared with Transformers' processors and warpers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.core import NonFiniteLogitsError
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.models.other.table import TableModel
from toys import engine, fixed_tables, outputs

VOCAB = 50
PREFIX = [3, 7, 7, 0, 49, 3, 12]


def random_logits(rows: int, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * scale).to(dtype)


def transformers_distribution(logits: Tensor, prefix: Sequence[int], processors: list[Any]) -> Tensor:
    ids = torch.tensor([list(prefix)]).repeat(len(logits), 1)
    return torch.softmax(LogitsProcessorList(processors)(ids, logits.clone()), -1)


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "hot": ({"temperature": 2.5}, [TemperatureLogitsWarper(2.5)]),
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_k=1": ({"top_k": 1}, [TopKLogitsWarper(1)]),
    "top_k=V": ({"top_k": VOCAB}, [TopKLogitsWarper(VOCAB)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "top_p-small": ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "min_p=1": ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "repetition": ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
    "repetition<1": ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
    "bias": (
        {"logit_bias": {0: 2.0, 5: -3.0, 49: 1.5}},
        [SequenceBiasLogitsProcessor({(0,): 2.0, (5,): -3.0, (49,): 1.5})],
    ),
    "all": (
        {
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "logit_bias": {3: 1.0, 7: -1.0},
        },
        [
            SequenceBiasLogitsProcessor({(3,): 1.0, (7,): -1.0}),
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_distributions_are_those_of_transformers(name: str) -> None:
    options, processors = CASES[name]
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits = random_logits(40)
    distributions = Sampler(params).distributions(logits, [PREFIX] * len(logits))
    torch.testing.assert_close(
        distributions, transformers_distribution(logits, PREFIX, processors), rtol=1e-12, atol=1e-14
    )


def test_user_processors_run_before_the_warpers() -> None:
    def clip(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.tolist() == [PREFIX]
        return scores.clamp(max=float(scores.median()) + 1.0)

    logits = random_logits(1)
    params = SamplingParams(temperature=0.5, top_k=9, processors=(clip,))
    distribution = Sampler(params).distribution(logits[0], PREFIX)
    expected = transformers_distribution(logits, PREFIX, [clip, TemperatureLogitsWarper(0.5), TopKLogitsWarper(9)])
    torch.testing.assert_close(distribution, expected[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_at_once_are_rows_one_by_one(name: str, dtype: torch.dtype) -> None:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, **CASES[name][0]}), prompt_length=2)
    logits = random_logits(6, seed=1, dtype=dtype)
    prefixes = [PREFIX[: n + 1] for n in range(6)]
    together = sampler.distributions(logits, prefixes)
    alone = torch.stack([sampler.distribution(row, prefix) for row, prefix in zip(logits, prefixes, strict=True)])
    assert together.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(together.sum(-1), torch.ones(6, dtype=together.dtype))


def test_greedy_is_one_hot() -> None:
    logits = random_logits(5)
    distributions = Sampler(SamplingParams()).distributions(logits, None)
    assert distributions.sum(-1).tolist() == [1.0] * 5
    assert distributions.argmax(-1).tolist() == logits.argmax(-1).tolist()
    assert set(distributions.unique().tolist()) == {0.0, 1.0}


def test_greedy_ignores_the_filters_but_not_the_penalties() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0], dtype=torch.float64)
    filtered = Sampler(SamplingParams(top_k=1, top_p=0.1, min_p=0.9)).distribution(logits, [0])
    assert filtered.tolist() == [1.0, 0.0, 0.0]
    assert Sampler(SamplingParams(repetition_penalty=1.2)).distribution(logits, [0]).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_are_left_as_they_were(temperature: float) -> None:
    params = SamplingParams(temperature, 5, 0.9, 0.1, 1.3, 0.2, 0.1, {1: 2.0}, (lambda ids, scores: scores.mul_(2),))
    logits = random_logits(2)
    before = logits.clone()
    Sampler(params, 2).distributions(logits, [PREFIX, PREFIX])
    assert torch.equal(logits, before)


# -- penalties -------------------------------------------------------------------------------------------------------


def test_presence_and_frequency_count_the_output_only() -> None:
    """Prompt [3, 7, 7], output [0, 49, 3, 12, 0]: every output token once by presence, each time by frequency."""
    logits = random_logits(1)[0]
    prefix = [3, 7, 7, 0, 49, 3, 12, 0]
    distribution = Sampler(
        SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.25), prompt_length=3
    ).distribution(logits, prefix)
    expected = logits.clone()
    for token, count in Counter(prefix[3:]).items():
        expected[token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(distribution, torch.softmax(expected, -1), rtol=1e-12, atol=1e-15)


def test_no_output_yet_no_presence_penalty() -> None:
    logits = random_logits(1)[0]
    distribution = Sampler(
        SamplingParams(1.0, presence_penalty=5.0, frequency_penalty=5.0), prompt_length=4
    ).distribution(logits, PREFIX[:4])
    torch.testing.assert_close(distribution, torch.softmax(logits, -1))


def test_negative_penalties_encourage() -> None:
    distribution = Sampler(SamplingParams(1.0, presence_penalty=-1.0, frequency_penalty=-1.0)).distribution(
        torch.zeros(3).double(), [2, 2]
    )
    torch.testing.assert_close(distribution, torch.softmax(torch.tensor([0.0, 0.0, 3.0]).double(), -1))


@pytest.mark.parametrize(
    ("options", "free"),
    [
        ({}, True),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"processors": (lambda ids, scores: scores,)}, False),
    ],
)
def test_context_free_says_whether_the_prefix_matters(options: dict[str, Any], free: bool) -> None:
    assert Sampler(SamplingParams(temperature=1.0, **options)).context_free is free


# -- edges -----------------------------------------------------------------------------------------------------------


def test_ties_at_the_top_k_threshold_all_stay() -> None:
    """Our choice, and Transformers': everything as likely as the k-th token is kept."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    distribution = Sampler(SamplingParams(1.0, top_k=2)).distributions(logits, None)
    assert (distribution > 0).tolist() == [[True, True, True, True, False]]
    torch.testing.assert_close(distribution, transformers_distribution(logits, [0], [TopKLogitsWarper(2)]))


def test_ties_at_the_top_p_threshold_go_to_the_lower_id() -> None:
    """Four equal tokens and half of the mass: the first two.  (Transformers' choice depends on an unstable sort.)"""
    distribution = Sampler(SamplingParams(1.0, top_p=0.5)).distribution(torch.zeros(4, dtype=torch.float64), [])
    assert distribution.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_greedy_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    assert Sampler(SamplingParams()).distribution(logits, []).argmax() == 1
    target, _ = fixed_tables([0.2, 0.3, 0.2, 0.3], [0.25] * 4)
    assert outputs(engine(target), [Request([0], max_new_tokens=3)]) == [[1, 1, 1]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_tiny_temperatures_do_not_overflow(temperature: float, dtype: torch.dtype) -> None:
    logits = random_logits(4, scale=80.0, dtype=dtype)
    distributions = Sampler(SamplingParams(temperature, top_p=0.9, min_p=0.1)).distributions(logits, None)
    assert torch.isfinite(distributions).all()
    assert distributions.argmax(-1).tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(distributions.sum(-1), torch.ones(4, dtype=distributions.dtype))


def test_huge_logits_and_huge_temperatures() -> None:
    distributions = Sampler(SamplingParams(1e30)).distributions(random_logits(3, scale=1e4, dtype=torch.float32), None)
    torch.testing.assert_close(distributions, torch.full_like(distributions, 1 / VOCAB))


def test_banned_tokens_stay_banned() -> None:
    logits = random_logits(1)[0]
    logits[::2] = -torch.inf
    for params in (
        SamplingParams(1.0),
        SamplingParams(0.3, 40, 0.99, 0.001),
        SamplingParams(2.0, repetition_penalty=1.5),
    ):
        distribution = Sampler(params).distribution(logits, PREFIX)
        assert float(distribution[::2].sum()) == 0.0
        assert torch.isfinite(distribution).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("penalty", [1.0, 1.1], ids=["plain", "penalty"])
@pytest.mark.parametrize("logits", [[1.0, float("nan"), 0.0], [float("-inf")] * 3, [0.0, float("inf"), 0.0]])
def test_bad_logits_raise(temperature: float, penalty: float, logits: list[float]) -> None:
    sampler = Sampler(SamplingParams(temperature, repetition_penalty=penalty))
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        sampler.distribution(torch.tensor(logits), [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("penalty", [1.0, 1.1], ids=["plain", "penalty"])
def test_bad_logits_stop_a_generation(temperature: float, penalty: float) -> None:
    target = TableModel(lambda prefix: [0.5, 0.5] if len(prefix) < 4 else [float("nan")] * 2, 2)
    params = SamplingParams(temperature, repetition_penalty=penalty)
    with pytest.raises(NonFiniteLogitsError) as error:
        outputs(engine(target), [Request([0, 1], params, 10, seed=0)])
    assert "\n" not in str(error.value)


# -- ranges ----------------------------------------------------------------------------------------------------------

BAD = {
    "temperature": [-0.1, float("nan"), float("inf")],
    "top_k": [-1],
    "top_p": [0.0, -0.5, 1.01, float("nan")],
    "min_p": [-0.1, 1.1, float("nan")],
    "repetition_penalty": [0.0, -1.0, float("nan"), float("inf")],
    "presence_penalty": [float("nan"), float("inf")],
    "frequency_penalty": [float("nan"), float("-inf")],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be") as error:
        SamplingParams(**{name: value})
    assert str(value) in str(error.value) and "\n" not in str(error.value)


def test_the_ends_of_the_ranges_are_fine() -> None:
    for top_p, min_p, top_k in product((1e-9, 1.0), (0.0, 1.0), (0, 10**9)):
        distribution = Sampler(SamplingParams(1.0, top_k, top_p, min_p)).distribution(random_logits(1)[0], [])
        assert float(distribution.sum()) == pytest.approx(1.0)
