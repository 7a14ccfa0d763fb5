"""What speculative decoding promises: formulas from acceptance and cost to tokens per round and speed-up.

Words and units: ``k`` draft tokens (the papers' gamma); ``alpha`` the chance that a draft token is accepted, given that
those before it was accepted; tokens per round include the target's own token; costs are in target calls that score one
token, so ``c`` is a draft step and ``v(n)`` a call with n tokens, v(1) = 1.  A *survival vector* (s_1, s_2, ...) holds
the chance that a draft stands at least one, two, ... tokens far: what is measured where acceptance differs by position.

Nothing here runs a model.  Numbers of theorems and equations are those of Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192; :mod:`foretoken.lab.plan.trees` has trees and batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Acceptance = float | Sequence[float]
"""One acceptance rate alpha, or a survival vector."""
Curve = Callable[[int], float]
"""v(n): cost of scoring n tokens in one call."""
SUM_TOLERANCE = 1e-6
"""How far from 1 a distribution may sum."""


def flat(nodes: int) -> float:
    """v(n) = 1: scoring several tokens costs what scoring one costs."""
    return 1.0


# -- acceptance ------------------------------------------------------------------------------------------------------


def acceptance_probability(p: Any, q: Any) -> NDArray[np.float64]:
    """Chance that a token drawn from q is accepted against p: beta = sum_x min(p(x), q(x)) = 1 - TV(p, q).

    Leviathan et al., theorem 3.5.

    Args:
        p, q: [..., V] distributions of target and draft, arrays or nested lists.

    Returns:
        [...] one probability per pair of distributions.

    Raises:
        ValueError: different shapes, or something that is no distribution.
    """
    p, q = _distribution(p, "p"), _distribution(q, "q")
    if p.shape != q.shape:
        raise ValueError(f"p and q must have the same shape, not {p.shape} and {q.shape}")
    return np.asarray(np.minimum(p, q).sum(-1).clip(0.0, 1.0))


def acceptance_rate(p: Any, q: Any) -> float:
    """alpha = E[beta], the mean of :func:`acceptance_probability` over positions (corollary 3.6)."""
    return float(acceptance_probability(p, q).mean())


def survival(alpha: float, k: int) -> list[float]:
    """(alpha, alpha^2, ..., alpha^k): how many draft tokens are accepted when every token is accepted alike and
    independently."""
    check_alpha(alpha)
    _check_k(k)
    return [alpha**i for i in range(1, k + 1)]


def extended(measured: Sequence[float], k: int) -> list[float]:
    """The first k entries of a survival vector; beyond what was measured every step is as good as the last one.

    Raises:
        ValueError: entries outside [0, 1], or a draft that is accepted further more often.
    """
    _check_survival(measured)
    _check_k(k)
    known = [float(s) for s in measured[:k]]
    if not known:
        return [0.0] * k
    before = known[-2] if len(known) > 1 else 1.0
    step = known[-1] / before if before > 0 else 0.0
    while len(known) < k:
        known.append(known[-1] * step)
    return known


def accepted_distribution(survival: Sequence[float]) -> NDArray[np.float64]:
    """[k+1] chances of 0, 1, ..., k accepted tokens: P(n) = s_n - s_{n+1}, with s_0 = 1 and s_{k+1} = 0.

    For s_i = alpha^i this is the geometric distribution cut off at k from which equation 1 of Leviathan et al. is made.
    """
    _check_survival(survival)
    reached = np.array([1.0, *survival, 0.0])
    return np.asarray(reached[:-1] - reached[1:])


# -- tokens per round ------------------------------------------------------------------------------------------------


def expected_tokens(acceptance: Acceptance, k: int) -> float:
    """Tokens per round: (1 - alpha^(k+1)) / (1 - alpha) (Leviathan et al., equation 1), or 1 + s_1 + ... + s_k.

    Its limits are 1 for alpha -> 0 and k + 1 for alpha -> 1.

    Args:
        acceptance: alpha, or a survival vector (continued by :func:`extended`).
        k: draft tokens per round.

    Raises:
        ValueError: alpha or an entry outside [0, 1], or a negative k.
    """
    if not isinstance(acceptance, float | int):
        return 1.0 + math.fsum(extended(acceptance, k))
    alpha = float(acceptance)
    check_alpha(alpha)
    _check_k(k)
    if k == 0 or alpha in (0.0, 1.0):
        return 1.0 + k * alpha
    return -math.expm1((k + 1) * math.log(alpha)) / (1.0 - alpha)  # expm1: no cancellation near alpha = 1


def tokens_of_guesses(acceptance: Acceptance, k: int, guesses: int) -> float:
    """Tokens per round of the best of G chains that guess independently: (k + 1) - sum over i of (1 - alpha^i)^G.

    A round gets i drafts far unless all G chains fail before.  One guess gives :func:`expected_tokens`.  Lookahead
    decoding, Fu et al. 2024 (https://arxiv.org/abs/2402.02057), equation 4.  Guesses that resemble each other give
    less: this is an upper estimate.

    Args:
        acceptance: alpha, or a survival vector, of every chain.
        k: draft tokens per chain.
        guesses: G, chains that are verified in a round.

    Raises:
        ValueError: alpha or an entry outside [0, 1], a negative k, or fewer than one guess.
    """
    if guesses != int(guesses) or guesses < 1:
        raise ValueError(f"the number of guesses must be a whole number >= 1, not {guesses}")
    if guesses == 1:
        return expected_tokens(acceptance, k)
    rate = isinstance(acceptance, float | int)
    reached = survival(float(acceptance), k) if rate else extended(acceptance, k)  # type: ignore[arg-type]
    return 1.0 + math.fsum(1.0 - (1.0 - s) ** guesses for s in reached)


def alpha_for_tokens(tokens: float, k: int, guesses: int = 1) -> float | None:
    """The alpha whose :func:`tokens_of_guesses` are ``tokens``: 0 when one token is enough, ``None`` above k + 1."""
    _check_k(k)
    if math.isnan(tokens) or tokens > k + 1:
        return None
    return 0.0 if tokens <= 1.0 else _root(lambda alpha: tokens_of_guesses(alpha, k, guesses) - tokens, 0.0, 1.0)


# -- factors ---------------------------------------------------------------------------------------------------------


def speedup(tokens: float, steps: float, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """Tokens per second over those of plain decoding: S = E / (v + c steps + o).

    Args:
        tokens: E, tokens per round.
        steps: draft steps of a round (levels of a tree, not nodes).
        c: cost of a draft step.
        v: cost of the target call that scores the whole draft and the root, v(nodes + 1).
        overhead: what a round costs beyond both, o.

    Raises:
        ValueError: a negative or infinite cost, or v = 0.
    """
    return tokens / round_cost(steps, c, v, overhead)


def round_cost(steps: float, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """v + c steps + o: a round in plain rounds, and therefore the tokens that it must give to pay."""
    for name, value in (("c", c), ("the overhead", overhead), ("the number of draft steps", steps)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, not {value}")
    if not (math.isfinite(v) and v > 0):
        raise ValueError(f"v must be a finite number > 0, not {v}")
    return v + c * steps + overhead


def walltime_factor(acceptance: Acceptance, k: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """Speed-up of chains of k draft tokens: (1 - alpha^(k+1)) / ((1 - alpha) (k c + 1)), theorem 3.8.

    The theorem's 1 is ``v`` = v(k + 1) where scoring k + 1 tokens costs more than scoring one.  k = 0 is plain
    decoding, which pays no overhead: exactly 1.
    """
    tokens, cost = expected_tokens(acceptance, k), round_cost(k, c, v, overhead)
    return tokens / cost if k else 1.0


def operations_factor(acceptance: Acceptance, k: int, c_hat: float) -> float:
    """Arithmetic per emitted token over that of plain decoding: (k c_hat + k + 1) / E, theorem 3.11.

    Never below 1: rejected tokens were computed for nothing.

    Args:
        acceptance: alpha or a survival vector.
        k: draft tokens per round.
        c_hat: operations of the drafter per token over those of the target.
    """
    return round_cost(k, c_hat, v=k + 1.0) / expected_tokens(acceptance, k)


def memory_traffic_factor(acceptance: Acceptance, k: int, m_hat: float = 0.0) -> float:
    """Bytes of weights and cache read per emitted token over plain decoding's: (1 + k m_hat) / E.

    The target reads its weights once per round instead of once per token (Leviathan et al., section 3.4, where the
    draft's own reads ``m_hat``, bytes of drafter over bytes of target, are left out).
    """
    return round_cost(k, m_hat) / expected_tokens(acceptance, k)


# -- the best k, and where it stops paying ---------------------------------------------------------------------------


def optimal_k(acceptance: Acceptance, c: float, k_max: int = 64, v: Curve = flat, overhead: float = 0.0) -> int:
    """The k in 0..k_max of the largest :func:`walltime_factor`, the smallest on ties (section 3.5).

    Scanned, because a measured v(n) has steps: with one there may be several local optima.
    """
    _check_k(k_max)
    factors = [walltime_factor(acceptance, k, c, v(k + 1), overhead) for k in range(k_max + 1)]
    return max(range(k_max + 1), key=lambda k: factors[k])


def stationary_k(alpha: float, c: float) -> float:
    """Where dS/dk = 0 with a flat v: the root of -ln(alpha) alpha^(k+1) (k c + 1) = c (1 - alpha^(k+1)).

    S rises before and falls behind it (the difference of both sides falls with k), so the best whole k is one of its
    two neighbours.  0 when S falls from the start, infinity when it never does (a free drafter, or alpha = 1).
    """
    check_alpha(alpha)
    round_cost(1, c)
    if alpha == 0.0:
        return 0.0
    if c == 0.0 or alpha == 1.0:
        return math.inf if c < alpha else 0.0
    log = math.log(alpha)

    def slope(k: float) -> float:
        power = math.exp((k + 1) * log)
        return -log * power * (k * c + 1) - c * (1 - power)

    high = 1.0
    while slope(high) > 0:
        high *= 2
    return _root(slope, 0.0, high) if slope(0.0) > 0 else 0.0


def break_even_c(acceptance: Acceptance, k: int, v: float = 1.0, overhead: float = 0.0) -> float:
    """The draft cost at which k draft tokens pay no more: c* = (E - v - o) / k.

    With v = 1 and o = 0 it is largest, and equal to alpha, for k = 1: drafting can pay if and only if alpha > c
    (corollary 3.9).  Negative: not even a free drafter pays.

    Raises:
        ValueError: k < 1, or a value out of range.
    """
    if k < 1:
        raise ValueError(f"break-even needs k >= 1, not {k}: k = 0 is plain decoding")
    return (expected_tokens(acceptance, k) - round_cost(k, 0.0, v, overhead)) / k


def break_even_alpha(k: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float | None:
    """The acceptance rate from which k draft tokens pay: E(alpha, k) = v + c k + o.

    0 when they always do, ``None`` when not even alpha = 1 is enough.
    """
    if k < 1:
        raise ValueError(f"break-even needs k >= 1, not {k}: k = 0 is plain decoding")
    return alpha_for_tokens(round_cost(k, c, v, overhead), k)


# -- checks and helpers ----------------------------------------------------------------------------------------------


def _distribution(values: Any, name: str) -> NDArray[np.float64]:
    distribution = np.asarray(values, dtype=np.float64)
    if (
        distribution.ndim == 0
        or distribution.shape[-1] == 0
        or not np.isfinite(distribution).all()
        or (distribution < 0).any()
    ):
        raise ValueError(f"{name} must be a distribution: probabilities >= 0 along its last axis")
    if np.abs(distribution.sum(-1) - 1.0).max(initial=0.0) > SUM_TOLERANCE:
        raise ValueError(f"{name} must sum to 1 along its last axis: pass probabilities, not logits")
    return distribution


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Refuse what is no probability.

    Raises:
        ValueError: outside [0, 1], or NaN.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], not {alpha}")


def _check_k(k: int) -> None:
    if k != int(k) or k < 0:
        raise ValueError(f"k must be a whole number >= 0, not {k}")


def _check_survival(values: Sequence[float]) -> None:
    for i, (earlier, later) in enumerate(zip([1.0, *values], values, strict=False), 1):
        if not 0.0 <= later <= earlier:
            raise ValueError(
                f"a survival vector falls from at most 1 to at least 0, but entry {i} is {later:g} after {earlier:g}"
            )


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a monotone function changes its sign between ``low`` and ``high``, by halving."""
    rising = function(high) > function(low)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return 0.5 * (low + high)
