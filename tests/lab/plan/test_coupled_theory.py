"""Acceptance of coupled sampling: golden values, bounds, and agreement with simulated races."""

from __future__ import annotations

import math
import runpy
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foretoken.core.noise import Noise

THEORY = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "coupled_theory.py"))
acceptance_probability, coupled_acceptance = THEORY["acceptance_probability"], THEORY["coupled_acceptance"]
coupled_lower_bound, candidates_acceptance = THEORY["coupled_lower_bound"], THEORY["candidates_acceptance"]
recursive_rejection_acceptance = THEORY["recursive_rejection_acceptance"]

Array = NDArray[np.float64]

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
DRAWS = 250_000
SIGMAS = 4.5
"""A right formula fails one comparison with a simulation less often than once in 100,000 (seeds are fixed)."""


def random_pairs(count: int, size: int, seed: int, concentration: float = 0.4) -> tuple[Array, Array]:
    """Pairs [count, V] near and far from each other; some tokens are impossible for one of both, or for both."""
    rng = np.random.default_rng(seed)
    p, other = rng.dirichlet(np.full(size, concentration), (2, count))
    q = (mix := rng.uniform(0.0, 1.0, (count, 1))) * p + (1.0 - mix) * other
    for weights, every in ((p, 3), (q, 4)):
        weights[::every, rng.integers(size)] = 0.0
    both = rng.integers(size)
    p[::5, both] = q[::5, both] = 0.0
    return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)


def as_written(p: Array, q: Array) -> float:
    """The formula of the paper, term by term."""
    possible = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return sum(1.0 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p))) for v in possible)


def by_subsets(p: Array, q: Array, k: int) -> float:
    """The chance of k candidates in closed form: inclusion and exclusion over all sets of tokens ahead of the winner.

    With rates c_w, P(N < k) = sum_{j < k} (-1)^(k-1-j) C(m-j-1, k-1-j) sum_{|S| = j} exp(-t (sum c - sum_S c)).
    """
    total = 0.0
    for v in range(len(p)):
        if p[v] == 0 or q[v] == 0:
            continue
        rates = [p[v] * q[w] / q[v] - p[w] for w in range(len(p)) if w != v]
        rates = [rate for rate in rates if rate > 0]
        m, whole = len(rates), math.fsum(rates)
        if m < k:
            total += p[v]
            continue
        for j in range(k):
            sets = math.fsum(1.0 / (1.0 + whole - math.fsum(s)) for s in combinations(rates, j))
            total += p[v] * (-1) ** (k - 1 - j) * math.comb(m - j - 1, k - 1 - j) * sets
    return total


def test_golden_values() -> None:
    assert coupled_acceptance(P, Q) == pytest.approx(0.2 + 3 / 13 + 0.2, abs=1e-15)
    assert float(coupled_acceptance(P, Q)) == pytest.approx(0.6307692, abs=5e-8)
    assert acceptance_probability(P, Q) == pytest.approx(0.7) and float(P @ Q) == pytest.approx(0.29)
    assert coupled_lower_bound(P, Q) == pytest.approx(0.7 / 1.3)
    assert candidates_acceptance(P, Q, 2) == pytest.approx(0.8887300, abs=5e-8)
    assert candidates_acceptance(P, Q, 3) == pytest.approx(1.0)
    assert [float(recursive_rejection_acceptance(P, Q, k)) for k in (1, 2, 3)] == pytest.approx([0.7, 0.82, 1.0])


def test_equal_and_disjoint_distributions() -> None:
    assert coupled_acceptance(P, P) == pytest.approx(1.0) and coupled_lower_bound(P, P) == pytest.approx(1.0)
    assert coupled_acceptance([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert candidates_acceptance([1.0, 0.0], [0.0, 1.0], 2) == 0.0  # an impossible token is no candidate
    assert coupled_acceptance([[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]).tolist() == [1.0, 0.5]


def test_numbers_that_nearly_vanish() -> None:
    p, q = [1e-300, 1.0, 0.0], [1.0, 5e-324, 0.0]
    assert float(coupled_acceptance(p, q)) == pytest.approx(1e-300)
    assert [float(candidates_acceptance(p, q, k)) for k in (1, 2)] == pytest.approx([1e-300, 1.0])
    assert float(coupled_acceptance([1 - 1e-16, 1e-16], [1 - 1e-16, 1e-16])) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [3, 7, 40])
def test_one_candidate_is_the_formula_of_the_paper(size: int) -> None:
    p, q = random_pairs(60, size, seed=size)
    assert coupled_acceptance(p, q) == pytest.approx(np.array([as_written(*pair) for pair in zip(p, q, strict=True)]))
    assert candidates_acceptance(p, q, 1) == pytest.approx(coupled_acceptance(p, q), abs=1e-13)


@pytest.mark.parametrize("size", [3, 7, 40])
def test_bounds_hold(size: int) -> None:
    p, q = random_pairs(400, size, seed=100 + size)
    acceptance, slack = coupled_acceptance(p, q), 1e-12
    assert (acceptance >= coupled_lower_bound(p, q) - slack).all()
    assert (acceptance <= acceptance_probability(p, q) + slack).all()
    assert acceptance.max() > 0.9 and acceptance.min() < 0.3  # the pairs are near and far
    assert coupled_acceptance(p, q) == pytest.approx(coupled_acceptance(q, p))  # the races are symmetric


@pytest.mark.parametrize("k", [2, 3, 4])
def test_more_candidates_agree_with_the_closed_form(k: int) -> None:
    p, q = random_pairs(40, 9, seed=k)
    closed = [by_subsets(*pair, k) for pair in zip(p, q, strict=True)]
    assert candidates_acceptance(p, q, k) == pytest.approx(np.array(closed), abs=1e-12)


def test_more_candidates_are_never_worse() -> None:
    p, q = random_pairs(50, 8, seed=3)
    acceptance = np.stack([candidates_acceptance(p, q, k) for k in range(1, 9)])
    assert (np.diff(acceptance, axis=0) >= -1e-12).all()
    assert acceptance[-1] == pytest.approx((p * (q > 0)).sum(-1))  # all possible tokens are candidates


@cache
def races() -> Array:
    """[DRAWS, 6] the noise of as many positions of one seed."""
    noise = Noise(20240815)
    return torch.stack([noise.exponentials(position, 6) for position in range(DRAWS)]).numpy()


def ranks(times: Array, p: Array, q: Array) -> NDArray[np.intp]:
    """[DRAWS] how many tokens of the draft's race are ahead of the target's token (V: it is impossible there)."""
    with np.errstate(divide="ignore"):
        winners = (times / p).argmin(-1)
        draft = times / q
    winner_times = np.take_along_axis(draft, winners[:, None], -1)
    return np.where(np.isinf(winner_times[:, 0]), len(p), (draft < winner_times).sum(-1))


def test_formulas_agree_with_simulated_races() -> None:
    times = races()
    p, q = random_pairs(6, 6, seed=1)
    assert (p == 0).any() and (q == 0).any()
    p[0], q[0] = [*P, 0.0, 0.0, 0.0], [*Q, 0.0, 0.0, 0.0]
    for target, proposal in zip(p, q, strict=True):
        drawn_ranks = ranks(times, target, proposal)
        for k, expected in [(1, coupled_acceptance(target, proposal))] + [
            (k, candidates_acceptance(target, proposal, k)) for k in (1, 2, 3, 4)
        ]:
            error = math.sqrt(max(float(expected * (1 - expected)), 1e-9) / DRAWS)
            assert (drawn_ranks < k).mean() == pytest.approx(float(expected), abs=SIGMAS * error)


def test_a_simulation_notices_a_wrong_formula() -> None:
    """Negative control: the lower bound, and rejection's acceptance, are no results of these races."""
    simulated = float((ranks(races()[:, :3], P, Q) < 1).mean())
    error = SIGMAS * math.sqrt(0.25 / DRAWS)
    assert abs(simulated - coupled_lower_bound(P, Q)) > error and abs(simulated - acceptance_probability(P, Q)) > error


def test_recursive_rejection_is_right_at_both_ends() -> None:
    p, q = random_pairs(30, 6, seed=8)
    assert recursive_rejection_acceptance(p, q, 1) == pytest.approx(acceptance_probability(p, q))
    acceptance = np.stack([recursive_rejection_acceptance(p, q, k) for k in range(1, 7)])
    assert (np.diff(acceptance, axis=0) >= -1e-12).all() and (acceptance <= 1.0).all()
    full = (q > 0).all(-1)
    assert full.any() and acceptance[-1][full] == pytest.approx(1.0)


@pytest.mark.parametrize("rule", [candidates_acceptance, recursive_rejection_acceptance])
@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_counts_are_checked(rule: object, k: float) -> None:
    with pytest.raises(ValueError, match="k must be a whole number >= 1"):
        rule(P, Q, k)  # type: ignore[operator]


def test_distributions_are_checked() -> None:
    for rule in (coupled_acceptance, coupled_lower_bound):
        with pytest.raises(ValueError, match="sum to 1"):
            rule(P, 2 * Q)
        with pytest.raises(ValueError, match="same shape"):
            rule(P, [0.5, 0.5])


def test_what_the_theory_page_says_of_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    names = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "coupled_acceptance.py"))
    p, q = names["random_pairs"](400, 32, 1.5)
    distance, acceptances = 1.0 - acceptance_probability(p, q), names["acceptances"](p, q)
    mean = {name: names["means"](distance, values)[1] for name, values in acceptances.items()}
    middles, bound = names["means"](distance, coupled_lower_bound(p, q))
    assert (mean["rejection, 1"] - mean["coupled, 1"] < mean["coupled, 1"] - bound).all()
    assert (mean["coupled, 4"] > mean["recursive rejection, 4"]).all()
    assert ((mean["coupled, 2"] > mean["recursive rejection, 2"]) == (middles < 0.5)).all()
    names["plot"](distance, acceptances, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


# -- rejection ---------------------------------------------------------------------------------------------------------


def test_acceptance_by_hand_and_from_total_variation() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    assert float(acceptance_probability(p, q)) == pytest.approx(0.75)
    distributions = np.random.default_rng(0).dirichlet([0.3] * 7, size=(2, 50))
    total_variation = 0.5 * np.abs(distributions[0] - distributions[1]).sum(-1)
    assert acceptance_probability(*distributions) == pytest.approx(1 - total_variation)
    tensors = (torch.tensor(distribution) for distribution in distributions)
    assert acceptance_probability(*tensors) == pytest.approx(1 - total_variation)


def test_acceptance_of_equal_and_of_disjoint_distributions() -> None:
    assert acceptance_probability([0.2, 0.8], [0.2, 0.8]) == pytest.approx(1.0)
    assert acceptance_probability([1.0, 0.0], [0.0, 1.0]) == 0.0


def test_acceptance_is_how_often_the_test_passes() -> None:
    random = np.random.default_rng(1)
    p, q = random.dirichlet([0.5] * 5, size=2)
    count = 200_000
    x = random.choice(5, size=count, p=q)
    passed = (random.random(count) * q[x] < p[x]).mean()
    beta = float(acceptance_probability(p, q))
    assert abs(passed - beta) < SIGMAS * math.sqrt(beta * (1 - beta) / count)


@pytest.mark.parametrize(
    ("p", "q", "words"),
    [
        ([0.5, 0.5], [0.5, 0.4], "q must sum to 1"),
        ([0.5, 0.5], [1.0], "same shape"),
        ([1.5, -0.5], [0.5, 0.5], "p must be a distribution"),
        (0.5, 0.5, "p must be a distribution"),
    ],
)
def test_no_distributions(p: object, q: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        acceptance_probability(p, q)
