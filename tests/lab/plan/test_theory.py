"""The formulas: closed forms, published numbers, simulation, and what the engine itself does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from foretoken.core.costs import DrafterCost
from foretoken.lab.plan.assumptions import Assumptions
from foretoken.lab.plan.planner import plan
from foretoken.lab.plan.roofline import Roofline, experts_touched
from foretoken.lab.plan.speedup import (
    alpha_for_tokens,
    expected_tokens,
    extended,
    round_cost,
    survival,
    tokens_of_guesses,
    tree_tokens,
    trial_acceptance,
)
from foretoken.methods.trees.shapes import choice_parents, expected_length

ALPHAS = (0.05, 0.3, 0.6, 0.7, 0.85, 0.99)
CS = (0.01, 0.05, 0.1, 0.3, 0.6)
SIGMAS = 4.0
"""A right simulation misses this bound once in 16 000 runs; seeds are fixed."""


# -- acceptance ------------------------------------------------------------------------------------------------------


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


def test_counts_of_simulated_rounds() -> None:
    random, alpha, k, rounds = np.random.default_rng(2), 0.7, 5, 100_000
    accepted = np.cumprod(random.random((rounds, k)) < alpha, axis=1).sum(1)
    distribution = -np.diff([1.0, *survival(alpha, k), 0.0])  # of 0 to k accepted tokens
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
    row = plan(Assumptions(alpha), [k]).row(k)
    assert (round(row.operations, 2), round(row.speedups[1], 2)) == (operations, faster)


# -- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", CS)
def test_the_speed_up_is_theorem_3_8(alpha: float, c: float) -> None:
    for k in range(1, 12):
        closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))
        assert Assumptions(alpha, c).speedup(k) == pytest.approx(closed)
        expensive = Assumptions(alpha, c, 0.2, lambda nodes, batch=1: 1.5 if nodes > 1 else 1.0)
        assert expensive.speedup(k) == pytest.approx(closed * (k * c + 1) / (k * c + 1.7))
    assert Assumptions(alpha, c).speedup(1) == pytest.approx((1 + alpha) / (1 + c))  # corollary 3.9
    assert Assumptions(alpha, c, 3.0).speedup(0) == 1.0


def test_a_free_drafter_reaches_the_geometric_limit() -> None:
    assert Assumptions(0.8).speedup(2000) == pytest.approx(1 / (1 - 0.8))


def test_operations_are_theorem_3_11() -> None:
    alpha, k, c_hat = 0.7, 4, 0.05
    closed = (1 - alpha) * (k * c_hat + k + 1) / (1 - alpha ** (k + 1))
    assert plan(Assumptions(alpha, c_hat=c_hat), [k]).row(k).operations == pytest.approx(closed)
    assert plan(Assumptions(1.0), [k]).row(k).operations == pytest.approx(1.0)


# -- the best k ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", CS)
def test_drafting_pays_if_and_only_if_alpha_exceeds_c(alpha: float, c: float) -> None:
    assert (Assumptions(alpha, c).best_k(range(65)) > 0) == (alpha > c + 1e-12)


def test_the_best_k_sees_steps_in_v() -> None:
    def stairs(nodes: int, batch: int = 1) -> float:
        return 1.0 if nodes <= 4 else 3.0 if nodes <= 8 else 3.1

    assert Assumptions(0.9, v=stairs).best_k(range(8)) == 3
    assert Assumptions(0.9, v=stairs).best_k(range(41)) == 3
    assert Assumptions(0.97, v=stairs).best_k(range(201)) == 200  # behind the step it rises again
    assert Assumptions(0.5, overhead=5.0).best_k(range(9)) == 0
    assert Assumptions([0.9, 0.8, 0.0], 0.1).best_k(range(9)) == 2


# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_chain_is_a_tree() -> None:
    assert tree_tokens([1] * 5, [[0.7]] * 5) == pytest.approx(expected_tokens(0.7, 5))


def test_a_tree_by_hand() -> None:
    assert tree_tokens([2, 2], [[0.6, 0.2]] * 2) == pytest.approx(1 + 0.8 + 0.8**2)
    assert tree_tokens([2, 2], [[0.6, 0.2, 0.1], [0.5, 0.1]]) == pytest.approx(1 + 0.8 + 0.8 * 0.6)


def test_trees_of_full_levels_are_worth_what_any_tree_is_worth() -> None:
    accuracies = [[0.6, 0.15, 0.05], [0.4, 0.1, 0.05], [0.25, 0.1, 0.02]]
    for widths in ((3, 2, 1), (1, 3, 2), (2,)):
        choices = [c for depth in range(1, len(widths) + 1) for c in product(*map(range, widths[:depth]))]
        assert tree_tokens(widths, accuracies[: len(widths)]) == pytest.approx(expected_length(choices, accuracies))


def test_trial_acceptance_is_that_of_independent_trials() -> None:
    places = trial_acceptance(0.6, 3)
    assert places == pytest.approx([0.6, 0.24, 0.096])
    assert sum(places) == pytest.approx(1 - 0.4**3)


def test_a_simulated_tree() -> None:
    """Walk random trees: at each node at most one child is accepted."""
    random = np.random.default_rng(3)
    choices: list[tuple[int, ...]] = [
        (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)
    ]  # fmt: skip
    parents, row = [-1, *choice_parents(choices)], [0.55, 0.25]
    success = [1.0, *(row[choice[-1]] for choice in choices)]
    rounds = 40_000
    children: list[list[int]] = [[n for n, p in enumerate(parents) if p == node] for node in range(len(parents))]
    lengths = []
    for us in random.random((rounds, 5)).tolist():
        node, length = 0, 0
        for u in us:
            ends = np.cumsum([success[child] for child in children[node]])
            rank = int(np.searchsorted(ends, u, side="right"))
            if rank >= len(ends):
                break
            node, length = children[node][rank], length + 1
        lengths.append(1 + length)
    bound = SIGMAS * np.std(lengths) / math.sqrt(rounds)
    assert abs(np.mean(lengths) - expected_length(choices, [row] * 4)) < bound


# -- roofline --------------------------------------------------------------------------------------------------------


def test_a_dense_roofline_bends_at_the_ridge() -> None:
    v = Roofline(parameters=8e9, bandwidth=3.35e12, flops=989e12)
    ridge = 989e12 * 2 / (2 * 3.35e12)  # operations a weight read allows: both take equally long
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
        (lambda: survival(2.0, 3), "alpha must be in"),
        (lambda: round_cost(2, -0.1), "c must be a finite number"),
        (lambda: round_cost(2, math.inf), "c must be a finite number"),
        (lambda: round_cost(2, 0.1, v=0.0), "v must be"),
        (lambda: round_cost(2, 0.1, overhead=-1), "overhead must be"),
        (lambda: expected_tokens([-0.1], 1), "survival vector"),
        (lambda: Roofline(1e9, 0.0, 1e12), "bandwidth must be"),
        (lambda: tree_tokens([], []), "positive child counts"),
        (lambda: tree_tokens([2, 0], [[0.5, 0.1]] * 2), "positive child counts"),
        (lambda: tree_tokens([2], [[0.6, 0.5]]), "sum to 1.1 > 1"),
        (lambda: tree_tokens([1], [[1.5]]), "probability of sibling 1"),
        (lambda: tree_tokens([2], [[0.5]]), "tries 2 siblings"),
        (lambda: tree_tokens([1, 1], [[0.5]]), "shorter"),
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
