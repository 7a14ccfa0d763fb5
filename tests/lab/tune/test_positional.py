"""The positional acceptance vector: by hand, and as the distribution of what recursive rejection does."""

from __future__ import annotations

import itertools

import pytest
import torch

from foretoken.core import Kind, Scores, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.lab.tune.positional import acceptance_probabilities, measured_acceptance
from foretoken.lab.workload import Subject, Workload
from foretoken.methods.drafters.model import ModelDrafter
from toys import fixed_tables

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def chances(tokens: tuple[int, ...]) -> list[float]:
    distribution = torch.tensor([Q], dtype=torch.float64)
    count = len(tokens)
    tree = TokenTree((0, *tokens), (-1, *[0] * count), Kind.WITHOUT_REPLACEMENT, distribution, (-1, *[0] * count))
    logits = torch.tensor([P] * (count + 1), dtype=torch.float64).log()
    return acceptance_probabilities(tree, Scores(logits, tree, [0], Sampler(SamplingParams(temperature=1.0))), 0)


def test_by_hand() -> None:
    """After token 1 (.3 / .5) is rejected the residual is all on token 0; after token 2 (.2 / .3) as well."""
    assert chances((1, 0)) == pytest.approx([0.6, 0.4])
    assert chances((2, 1)) == pytest.approx([2 / 3, 0.0])
    assert chances((0, 1)) == pytest.approx([1.0, 0.0])


def test_what_is_measured_is_the_mean_over_draws() -> None:
    """The same distributions after every text: the vector is known exactly from all orders of drawing two tokens."""
    exact = [0.0, 0.0]
    for first, second in itertools.permutations(range(3), 2):
        weight = Q[first] * Q[second] / (1 - Q[first])
        for rank, chance in enumerate(chances((first, second))):
            exact[rank] += weight * chance
    assert exact[0] == pytest.approx(sum(map(min, P, Q)))  # one trial: 1 - TV
    target, draft = fixed_tables(P, Q)
    work = Workload(Subject(target), [[0, 1]] * 8, new_tokens=100, temperature=1.0)
    assert measured_acceptance(work, ModelDrafter(draft), width=2) == pytest.approx(exact, abs=0.05)


def test_greedy_ranks() -> None:
    """The target always says the draft's third choice."""
    target, draft = fixed_tables(P, Q)
    work = Workload(Subject(target), [[0, 1]], new_tokens=10)
    assert measured_acceptance(work, ModelDrafter(draft), width=3) == (0.0, 0.0, 1.0)


def test_a_hopeless_draft() -> None:
    target, draft = fixed_tables([1.0, 0.0, 0.0], [0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="no draft was ever accepted"):
        measured_acceptance(Workload(Subject(target), [[1, 2]], new_tokens=5), ModelDrafter(draft), width=2)
