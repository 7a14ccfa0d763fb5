"""The formulas: closed forms, published numbers, simulation, and what the engine itself does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from foretoken.core.costs import DrafterCost
from foretoken.lab.plan.roofline import Roofline, experts_touched, ridge_tokens
from foretoken.lab.plan.speedup import (
    acceptance_probability,
    acceptance_rate,
    accepted_distribution,
    alpha_for_tokens,
    break_even_alpha,
    break_even_c,
    expected_tokens,
    extended,
    memory_traffic_factor,
    operations_factor,
    optimal_k,
    speedup,
    stationary_k,
    survival,
    tokens_of_guesses,
    walltime_factor,
)
from foretoken.lab.plan.trees import (
    batch_effect,
    branching_parents,
    positional_success,
    tree_expected_tokens,
    tree_speedup,
    trial_acceptance,
)
from foretoken.methods.trees.shapes import choice_parents, expected_length, medusa_choices

ALPHAS = (0.05, 0.3, 0.6, 0.7, 0.85, 0.99)
CS = (0.01, 0.05, 0.1, 0.3, 0.6)
SIGMAS = 4.0
"""A right simulation misses this bound once in 16 000 runs; seeds are fixed."""


# -- acceptance ------------------------------------------------------------------------------------------------------


def test_acceptance_by_hand_and_from_total_variation() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    assert float(acceptance_probability(p, q)) == pytest.approx(0.75)
    distributions = np.random.default_rng(0).dirichlet([0.3] * 7, size=(2, 50))
    total_variation = 0.5 * np.abs(distributions[0] - distributions[1]).sum(-1)
    assert acceptance_probability(*distributions) == pytest.approx(1 - total_variation)
    assert acceptance_rate(*distributions) == pytest.approx(1 - total_variation.mean())
    assert acceptance_rate(torch.tensor(distributions[0]), torch.tensor(distributions[1])) == pytest.approx(
        acceptance_rate(*distributions)
    )


def test_acceptance_of_equal_and_of_disjoint_distributions() -> None:
    assert acceptance_rate([0.2, 0.8], [0.2, 0.8]) == pytest.approx(1.0)
    assert acceptance_rate([1.0, 0.0], [0.0, 1.0]) == 0.0


def test_acceptance_is_how_often_the_test_passes() -> None:
    random = np.random.default_rng(1)
    p, q = random.dirichlet([0.5] * 5, size=2)
    count = 200_000
    x = random.choice(5, size=count, p=q)
    passed = (random.random(count) * q[x] < p[x]).mean()
    beta = float(acceptance_probability(p, q))
    assert abs(passed - beta) < SIGMAS * math.sqrt(beta * (1 - beta) / count)


# -- tokens per round ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1e-12, *ALPHAS, 1 - 1e-6, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 7, 40])
def test_expected_tokens_are_the_sum_of_powers(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)), rel=1e-12)
    assert expected_tokens(survival(alpha, k), k) == pytest.approx(expected_tokens(alpha, k), rel=1e-12)


def test_limits_of_expected_tokens() -> None:
    assert (expected_tokens(0.0, 9), expected_tokens(1.0, 9), expected_tokens(0.4, 0)) == (1.0, 10.0, 1.0)
    assert expected_tokens(0.75, 10_000) == pytest.approx(4.0)


def test_expected_tokens_rise_with_alpha_and_k() -> None:
    table = [[expected_tokens(alpha, k) for k in range(9)] for alpha in ALPHAS]
    assert all(np.diff(row).min() > 0 for row in table)
    assert all(np.diff(column).min() > 0 for column in list(zip(*table, strict=True))[1:])


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_tokens_and_alpha_are_inverse(alpha: float, k: int) -> None:
    assert alpha_for_tokens(expected_tokens(alpha, k), k) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize("guesses", [1, 2, 7])
def test_tokens_of_several_guesses(guesses: int) -> None:
    """The closed form, and a simulation of chains that fail on their own."""
    alpha, k = 0.6, 4
    closed = (k + 1) - sum((1 - alpha**i) ** guesses for i in range(1, k + 1))
    assert tokens_of_guesses(alpha, k, guesses) == pytest.approx(closed)
    assert tokens_of_guesses(survival(alpha, 2), k, guesses) == pytest.approx(closed), "a vector is continued"
    rounds = 20_000
    right = np.random.default_rng(guesses).random((rounds, guesses, k)) < alpha
    tokens = 1 + right.cumprod(-1).sum(-1).max(-1)
    assert tokens.mean() == pytest.approx(closed, abs=SIGMAS * tokens.std() / rounds**0.5)
    assert alpha_for_tokens(closed, k, guesses) == pytest.approx(alpha)


def test_limits_of_several_guesses() -> None:
    assert tokens_of_guesses(0.7, 5, 1) == expected_tokens(0.7, 5)
    assert tokens_of_guesses(0.7, 5, 10**6) == pytest.approx(6.0)
    assert tokens_of_guesses(0.0, 5, 9) == 1.0 and tokens_of_guesses(1.0, 5, 9) == 6.0
    with pytest.raises(ValueError, match="guesses must be a whole number >= 1, not 0"):
        tokens_of_guesses(0.7, 5, 0)


def test_alpha_for_tokens_out_of_reach() -> None:
    assert alpha_for_tokens(1.0, 3) == 0.0
    assert alpha_for_tokens(0.5, 3) == 0.0
    assert alpha_for_tokens(4.0, 3) == pytest.approx(1.0)
    assert alpha_for_tokens(4.001, 3) is None
    assert alpha_for_tokens(1.5, 0) is None
    assert alpha_for_tokens(math.nan, 3) is None


def test_a_survival_vector_goes_on_as_it_ended() -> None:
    assert extended([0.8, 0.4], 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert extended([0.8], 3) == pytest.approx(survival(0.8, 3))
    assert extended([0.8, 0.4], 1) == [0.8]
    assert extended([0.5, 0.0], 3) == [0.5, 0.0, 0.0]
    assert extended([], 2) == [0.0, 0.0]


@pytest.mark.parametrize("measured", [(), (0.7,), (0.8, 0.4), (0.9, 0.8, 0.2), (0.5, 0.5, 0.5)])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_measured_costs_promise_the_same_tokens(measured: Sequence[float], k: int) -> None:
    assert expected_tokens(measured, k) == pytest.approx(DrafterCost(0.0, 0.0, measured).expected_tokens(k))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_distribution_of_accepted_counts(alpha: float) -> None:
    distribution = accepted_distribution(survival(alpha, 5))
    assert distribution == pytest.approx([alpha**n * (1 - alpha) for n in range(5)] + [alpha**5])
    assert distribution.sum() == pytest.approx(1.0)
    assert 1 + distribution @ np.arange(6) == pytest.approx(expected_tokens(alpha, 5))


def test_counts_of_simulated_rounds() -> None:
    random, alpha, k, rounds = np.random.default_rng(2), 0.7, 5, 100_000
    accepted = np.cumprod(random.random((rounds, k)) < alpha, axis=1).sum(1)
    distribution = accepted_distribution(survival(alpha, k))
    spread = math.sqrt(distribution @ np.arange(k + 1) ** 2 - (distribution @ np.arange(k + 1)) ** 2)
    bound = SIGMAS * spread / math.sqrt(rounds)
    assert abs(1 + accepted.mean() - expected_tokens(alpha, k)) < bound
    assert abs(1 + accepted.mean() - expected_tokens(alpha, k - 1)) > bound
    shares = np.bincount(accepted, minlength=k + 1) / rounds
    assert (np.abs(shares - distribution) < SIGMAS * np.sqrt(distribution * (1 - distribution) / rounds)).all()


# -- published numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "k", "operations", "faster"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_leviathan(alpha: float, k: int, operations: float, faster: float) -> None:
    """Arithmetic and speed for a drafter that is free (c = c_hat = 0)."""
    assert round(operations_factor(alpha, k, 0.0), 2) == operations
    assert round(walltime_factor(alpha, k, 0.0), 2) == faster


@pytest.mark.parametrize(
    ("bandwidth", "flops", "size", "tokens"),
    [
        (3.35e12, 989e12, 2, 295),  # H100, bfloat16
        (4.8e12, 989e12, 2, 206),  # H200
        (2.039e12, 312e12, 2, 153),  # A100
        (20e9, 100e9, 4, 10),  # two cores, float32
    ],
)
def test_ridge_points(bandwidth: float, flops: float, size: float, tokens: int) -> None:
    assert round(ridge_tokens(bandwidth, flops, size)) == tokens


# -- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", CS)
def test_walltime_factor_is_theorem_3_8(alpha: float, c: float) -> None:
    for k in range(1, 12):
        closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))
        assert walltime_factor(alpha, k, c) == pytest.approx(closed)
        assert walltime_factor(alpha, k, c, v=1.5, overhead=0.2) == pytest.approx(closed * (k * c + 1) / (k * c + 1.7))
    assert walltime_factor(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))  # corollary 3.9
    assert walltime_factor(alpha, 0, c, overhead=3.0) == 1.0


def test_a_free_drafter_reaches_the_geometric_limit() -> None:
    assert walltime_factor(0.8, 2000, 0.0) == pytest.approx(1 / (1 - 0.8))


def test_operations_and_traffic() -> None:
    alpha, k, c_hat = 0.7, 4, 0.05
    closed = (1 - alpha) * (k * c_hat + k + 1) / (1 - alpha ** (k + 1))  # theorem 3.11
    assert operations_factor(alpha, k, c_hat) == pytest.approx(closed)
    assert operations_factor(1.0, k, 0.0) == pytest.approx(1.0)
    assert min(operations_factor(alpha, k, 0.0) for alpha in ALPHAS) > 1.0
    assert memory_traffic_factor(alpha, k) == pytest.approx(1 / expected_tokens(alpha, k))
    assert memory_traffic_factor(alpha, k, 0.1) == pytest.approx(1.4 / expected_tokens(alpha, k))


# -- the best k ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", CS)
def test_the_stationary_point_is_beside_the_best_k(alpha: float, c: float) -> None:
    place, best = stationary_k(alpha, c), optimal_k(alpha, c, 512)
    assert best in {math.floor(place), math.ceil(place)}
    if place > 0:
        power = alpha ** (place + 1)
        assert -math.log(alpha) * power * (place * c + 1) == pytest.approx(c * (1 - power), rel=1e-6)

        def factor(k: float) -> float:
            return (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))

        assert factor(place) >= max(factor(place - 1e-3), factor(place + 1e-3))


def test_stationary_points_at_the_ends() -> None:
    assert stationary_k(0.0, 0.1) == 0.0
    assert stationary_k(0.5, 0.0) == math.inf
    assert stationary_k(1.0, 0.5) == math.inf
    assert stationary_k(1.0, 1.0) == 0.0
    assert stationary_k(0.1, 0.9) == 0.0


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", CS)
def test_drafting_pays_if_and_only_if_alpha_exceeds_c(alpha: float, c: float) -> None:
    assert (optimal_k(alpha, c) > 0) == (alpha > c + 1e-12)


def test_optimal_k_sees_steps_in_v() -> None:
    def stairs(nodes: int) -> float:
        return 1.0 if nodes <= 4 else 3.0 if nodes <= 8 else 3.1

    assert optimal_k(0.9, 0.0, 7, stairs) == 3
    assert optimal_k(0.9, 0.0, 40, stairs) == 3
    assert optimal_k(0.97, 0.0, 200, stairs) == 200  # behind the step it rises again
    assert optimal_k(0.5, 0.0, 8, overhead=5.0) == 0
    assert optimal_k([0.9, 0.8, 0.0], 0.1, 8) == 2


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_break_even_is_where_the_factor_is_one(alpha: float, k: int) -> None:
    v, overhead = 1.02, 0.01
    c = break_even_c(alpha, k, v, overhead)
    if c >= 0:
        assert walltime_factor(alpha, k, c, v, overhead) == pytest.approx(1.0)
        assert break_even_alpha(k, c, v, overhead) == pytest.approx(alpha, abs=1e-9)
    else:
        assert walltime_factor(alpha, k, 0.0, v, overhead) < 1.0
    assert break_even_c(alpha, 1) == pytest.approx(alpha)
    assert break_even_c(alpha, k) <= alpha + 1e-12


def test_break_even_that_is_out_of_reach() -> None:
    assert break_even_alpha(3, 1.01) is None
    assert break_even_alpha(3, 0.0) == 0.0
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)


# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_chain_is_a_tree() -> None:
    chain = branching_parents([1] * 5)
    assert chain == [-1, 0, 1, 2, 3, 4]
    assert tree_expected_tokens(chain, [1.0, *[0.7] * 5]) == pytest.approx(expected_tokens(0.7, 5))


def test_a_tree_by_hand() -> None:
    parents = branching_parents([2, 2])
    assert parents == [-1, 0, 0, 1, 1, 2, 2]
    success = positional_success(parents, [0.6, 0.2])
    assert success[1:] == [0.6, 0.2, 0.6, 0.2, 0.6, 0.2]
    assert tree_expected_tokens(parents, success) == pytest.approx(1 + 0.8 + 0.8**2)
    by_depth = positional_success(parents, [[0.6, 0.2], [0.5, 0.1]])
    assert tree_expected_tokens(parents, by_depth) == pytest.approx(1 + 0.8 + 0.8 * 0.6)


def test_medusa_and_positional_acceptance_agree() -> None:
    accuracies = [[0.6, 0.15, 0.05], [0.4, 0.1, 0.05], [0.25, 0.1, 0.02]]
    choices = medusa_choices(accuracies, 14)
    parents = [-1, *choice_parents(choices)]
    success = [1.0, *(accuracies[len(c) - 1][c[-1]] for c in choices)]
    assert tree_expected_tokens(parents, success) == pytest.approx(expected_length(choices, accuracies))


def test_trial_acceptance_is_that_of_independent_trials() -> None:
    places = trial_acceptance(0.6, 3)
    assert places == pytest.approx([0.6, 0.24, 0.096])
    assert sum(places) == pytest.approx(1 - 0.4**3)


def test_a_simulated_tree() -> None:
    """Walk random trees: at each node at most one child is accepted."""
    random = np.random.default_rng(3)
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 6]
    success = positional_success(parents, [0.55, 0.25])
    rounds = 40_000
    children: list[list[int]] = [[n for n, p in enumerate(parents) if p == node] for node in range(len(parents))]
    lengths = []
    for row in random.random((rounds, 5)).tolist():
        node, length = 0, 0
        for u in row:
            ends = np.cumsum([success[child] for child in children[node]])
            rank = int(np.searchsorted(ends, u, side="right"))
            if rank >= len(ends):
                break
            node, length = children[node][rank], length + 1
        lengths.append(1 + length)
    bound = SIGMAS * np.std(lengths) / math.sqrt(rounds)
    assert abs(np.mean(lengths) - tree_expected_tokens(parents, success)) < bound


def test_speed_up_of_trees_and_batches() -> None:
    def v(nodes: int) -> float:
        return 1 + nodes / 100 - 0.01

    assert tree_speedup(3.0, 15, 3, 0.1, v, 0.05) == pytest.approx(3.0 / (v(16) + 0.3 + 0.05))
    assert tree_speedup(3.0, 15, 3, 0.1) == pytest.approx(speedup(3.0, 3, 0.1))
    assert tree_speedup(1.0, 0, 0, 0.1, v, 5.0) == 1.0
    assert tree_speedup(3.0, 15, 3, 0.1, v, batch=8) == pytest.approx(3.0 / (v(128) / v(8) + 0.3))
    assert batch_effect(15, 8, v) == pytest.approx(v(128) / v(8))
    factors = [tree_speedup(3.0, 15, 3, 0.1, v, batch=2**i) for i in range(12)]
    assert (np.diff(factors) < 0).all() and factors[0] > 1 > factors[-1]
    assert tree_speedup(3.0, 15, 3, 0.1, lambda n: float(n), batch=4) == pytest.approx(3.0 / (16 + 0.3))


# -- roofline --------------------------------------------------------------------------------------------------------


def test_a_dense_roofline_bends_at_the_ridge() -> None:
    v = Roofline(parameters=8e9, bandwidth=3.35e12, flops=989e12)
    ridge = ridge_tokens(3.35e12, 989e12)
    assert v.seconds(1) == pytest.approx(16e9 / 3.35e12)
    assert v(int(ridge)) == 1.0
    assert v(2 * int(ridge) + 2) == pytest.approx((2 * int(ridge) + 2) / ridge)
    assert v(4, batch=100) == pytest.approx(v(400))


def test_the_cache_is_read_once_per_request() -> None:
    more = Roofline(8e9, 3.35e12, 989e12, context=32_000, kv_bytes=131_072)
    assert more.seconds(1, 64) == pytest.approx((16e9 + 64 * 32_000 * 131_072) / 3.35e12)
    # Long contexts keep big batches limited by memory, so scoring stays cheap (MagicDec).
    bare = Roofline(8e9, 3.35e12, 989e12)
    assert more(4, 256) / more(1, 256) == 1.0 < bare(4, 256) / bare(1, 256)


def test_experts_touched_in_closed_form_and_simulated() -> None:
    assert experts_touched(8, 2, 1) == pytest.approx(2.0)
    assert experts_touched(8, 2, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts_touched(64, 64, 3) == 64.0
    assert experts_touched(64, 6, 0) == 0.0
    assert experts_touched(64, 6, 1e6) == pytest.approx(64.0)
    random = np.random.default_rng(4)
    counts = [len(np.unique(random.random((5, 64)).argsort(1)[:, :6])) for _ in range(4000)]
    assert abs(np.mean(counts) - experts_touched(64, 6, 5)) < SIGMAS * np.std(counts) / math.sqrt(4000)


def test_experts_make_small_batches_expensive() -> None:
    dense = Roofline(57e9, 3.35e12, 989e12)
    sparse = Roofline(57e9, 3.35e12, 989e12, experts=64, active=8, expert_parameters=0.85)
    assert dense(8) == 1.0 < sparse(8)
    growth = [sparse(5, batch) / sparse(1, batch) for batch in (1, 4, 16, 64)]
    # Most expensive alone; once nearly all experts are read anyway, more tokens read nothing new (MoESD).
    assert growth[0] > growth[1] > growth[2] > growth[3] >= 1.0
    assert sparse.seconds(1) == pytest.approx(2 * 57e9 * (0.15 + 0.85 * 8 / 64) / 3.35e12)


# -- bad input -------------------------------------------------------------------------------------------------------

Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_tokens(1.1, 2), "alpha must be in"),
        (lambda: expected_tokens(-0.1, 2), "alpha must be in"),
        (lambda: expected_tokens(math.nan, 2), "alpha must be in"),
        (lambda: expected_tokens(0.5, -1), "k must be a whole number"),
        (lambda: expected_tokens(0.5, 1.5), "k must be a whole number"),  # type: ignore[arg-type]
        (lambda: expected_tokens([0.5, 0.6], 2), "entry 2 is 0.6"),
        (lambda: expected_tokens([1.2], 2), "entry 1 is 1.2"),
        (lambda: accepted_distribution([-0.1]), "survival vector"),
        (lambda: survival(2.0, 3), "alpha must be in"),
        (lambda: walltime_factor(0.5, 2, -0.1), "c must be a finite number"),
        (lambda: walltime_factor(0.5, 2, math.inf), "c must be a finite number"),
        (lambda: walltime_factor(0.5, 2, 0.1, v=0.0), "v must be"),
        (lambda: walltime_factor(0.5, 2, 0.1, overhead=-1), "overhead must be"),
        (lambda: stationary_k(0.5, -1), "c must be"),
        (lambda: optimal_k(0.5, 0.1, -1), "k must be"),
        (lambda: break_even_c(0.5, 0), "k >= 1"),
        (lambda: break_even_alpha(0, 0.1), "k >= 1"),
        (lambda: acceptance_rate([0.5, 0.5], [0.5, 0.4]), "q must sum to 1"),
        (lambda: acceptance_rate([0.5, 0.5], [1.0]), "same shape"),
        (lambda: acceptance_rate([1.5, -0.5], [0.5, 0.5]), "p must be a distribution"),
        (lambda: acceptance_rate(0.5, 0.5), "p must be a distribution"),
        (lambda: branching_parents([]), "positive child counts"),
        (lambda: branching_parents([2, 0]), "positive child counts"),
        (lambda: tree_expected_tokens([0, 1], [1, 1]), "needs a root"),
        (lambda: tree_expected_tokens([-1, 2, 1], [1, 0.5, 0.5]), "parents come before"),
        (lambda: tree_expected_tokens([-1, 0, 0], [1, 0.6, 0.5]), "sum to 1.1 > 1"),
        (lambda: tree_expected_tokens([-1, 0], [1]), "as many chances"),
        (lambda: tree_expected_tokens([-1, 0], [1, 1.5]), "chance of node 1"),
        (lambda: positional_success([-1, 0, 0], [0.5]), "tries 2 siblings"),
        (lambda: positional_success([-1, 0, 1], [[0.5]]), "a row per depth"),
        (lambda: tree_speedup(2.0, -1, 1, 0.1), "nodes"),
        (lambda: tree_speedup(2.0, 3, 1, 0.1, batch=0), "batch >= 1"),
        (lambda: batch_effect(3, 0, lambda n: 1.0), "batch >= 1"),
        (lambda: ridge_tokens(0.0, 1e12), "bandwidth must be"),
        (lambda: Roofline(-1, 1e12, 1e12), "parameters must be"),
        (lambda: Roofline(1e9, 1e12, 1e12, context=-1), "context must be"),
        (lambda: Roofline(1e9, 1e12, 1e12, experts=4, active=5), "active <= experts"),
        (lambda: Roofline(1e9, 1e12, 1e12, experts=4, expert_parameters=2), "share"),
        (lambda: Roofline(1e9, 1e12, 1e12)(0), "nodes and requests"),
    ],
)
def test_values_out_of_range(call: Call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
