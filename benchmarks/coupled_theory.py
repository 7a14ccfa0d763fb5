"""How often coupled sampling accepts: chances that target and draft pick alike in races on shared noise.

Daliri, Musco, Suresh 2024, https://arxiv.org/abs/2408.07978.  With E(v) ~ Exp(1), independent over tokens, the target
takes the token of the smallest E(v) / p(v), and the draft's candidates are the tokens of the k smallest E(v) / q(v)
(:mod:`foretoken.core.noise`).  For k = 1 the chance that the target's token is the candidate has a closed form.  For k
> 1 it is an integral over one variable, computed here to about 1e-14; the closed form, by inclusion and exclusion over
all sets of k - 1 tokens, cancels badly in a large vocabulary and is used only to check the integral.

Distributions are float64 arrays [..., V], or nested lists, that sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SUM_TOLERANCE = 1e-6
"""How far from 1 a distribution may sum."""

STEP = 0.125
TIMES = np.exp(np.arange(-42.0, 4.5, STEP))
"""[n] points at which integrands over the winner's time are evaluated: what lies outside is below 1e-17."""
WEIGHTS = STEP * TIMES * np.exp(-TIMES)
"""[n] their weights for the density exp(-t).  The trapezoidal rule in log t is exact to rounding for exp(-c t) at every
rate c: its relative error is |Gamma(1 + 2 pi i / STEP)|, about 1e-33."""


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


def coupled_acceptance(p: Any, q: Any) -> Array:
    """Chance that target and draft pick the same token: sum_v 1 / sum_w max(p(w) / p(v), q(w) / q(v)).

    Terms with p(v) = 0 or q(v) = 0 are 0.  At most 1 - TV, which rejection sampling reaches, and at least
    :func:`coupled_lower_bound`.  Takes O(V log V): ordered by p / q, the maximum is p(w) / p(v) for the tokens up to v
    and q(w) / q(v) for those behind it, so that two running sums are enough.

    Args:
        p: [..., V] the target's distributions.
        q: [..., V] the draft's.

    Returns:
        [...] one probability per pair.

    Raises:
        ValueError: different shapes, or something that is no distribution.
    """
    p, q = _pair(p, q)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(q > 0, p / q, np.where(p > 0, np.inf, 0.0))
        order = np.argsort(-ratio, axis=-1, kind="stable")
        p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
        up_to = np.cumsum(p, -1)
        behind = np.cumsum(q[..., ::-1], -1)[..., ::-1]
        behind = np.concatenate([behind[..., 1:], np.zeros_like(behind[..., :1])], -1)
        terms = 1.0 / (up_to / p + behind / q)
    return np.asarray(np.where((p > 0) & (q > 0), terms, 0.0).sum(-1).clip(0.0, 1.0))


def coupled_lower_bound(p: Any, q: Any) -> Array:
    """(1 - TV) / (1 + TV) [...]: what :func:`coupled_acceptance` never falls below, for [..., V] distributions.

    No way to pick two tokens on shared randomness, each without knowing the other's distribution, can promise more
    (Bavarian et al. 2020; a simpler proof is in Daliri et al.).
    """
    overlap = acceptance_probability(p, q)
    return np.asarray(overlap / (2.0 - overlap))


def _of_each_pair(chance: Callable[[Array, Array, int], float], p: Any, q: Any, k: int) -> Array:
    _check_count(k)
    p, q = _pair(p, q)
    pairs = zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), strict=True)
    found = np.array([chance(target_row, draft_row, k) for target_row, draft_row in pairs])
    return np.asarray(found.reshape(p.shape[:-1]).clip(0.0, 1.0))


def candidates_acceptance(p: Any, q: Any, k: int) -> Array:
    """Chance that the target's token is among the draft's k candidates: sum_v p(v) int exp(-t) P(N_v(t) < k) dt.

    The winner's time t ~ Exp(1) is independent of which token v wins.  Given both, a token w that did not win is ahead
    of v in the draft's race with chance 1 - exp(-t c), c = max(0, p(v) q(w) / q(v) - p(w)), independently of the
    others; N_v(t) counts those that are.  For k = 1 this integrates to :func:`coupled_acceptance`.  Tokens with
    q(v) = 0 are never candidates.

    O(k V^2) per pair: meant for vocabularies of up to some hundred tokens.

    Args:
        p: [..., V] the target's distributions.
        q: [..., V] the draft's.
        k: siblings.

    Returns:
        [...] one probability per pair.

    Raises:
        ValueError: k < 1, different shapes, or something that is no distribution.
    """
    return _of_each_pair(_candidates_acceptance, p, q, k)


def _candidates_acceptance(p: Array, q: Array, k: int) -> float:
    winners = np.flatnonzero((p > 0) & (q > 0))  # [m]
    with np.errstate(over="ignore"):
        rates = np.maximum(p[winners, None] * q / q[winners, None] - p, 0.0)  # [m, V]
    rates[np.arange(len(winners)), winners] = 0.0
    ahead = np.zeros((k, len(winners), len(TIMES)))  # chances that 0, 1, ..., k - 1 tokens are ahead of the winner
    ahead[0] = 1.0
    for rate in rates.T[rates.any(0)]:
        behind = np.exp(-rate[:, None] * TIMES)
        for count in range(k - 1, 0, -1):
            ahead[count] = ahead[count] * behind + ahead[count - 1] * (1.0 - behind)
        ahead[0] *= behind
    return float(p[winners] @ (ahead.sum(0) @ WEIGHTS))


def recursive_rejection_acceptance(p: Any, q: Any, k: int) -> Array:
    """Chance that recursive rejection accepts one of k siblings drawn from q without replacement (2402.14160).

    The rule of the verifier ``without_replacement``, and of ``traversal`` for a tree of one level: what a request
    without a seed gets from as many siblings.  When q has fewer tokens than k, all of them are drawn and no more.

    Follows every draw that can be rejected, up to V! / (V - k + 1)! of them: meant for small vocabularies.

    Args:
        p: [..., V] the target's distributions.
        q: [..., V] the draft's.
        k: siblings.

    Returns:
        [...] one probability per pair.

    Raises:
        ValueError: k < 1, different shapes, or something that is no distribution.
    """
    return _of_each_pair(_recursive_rejection_acceptance, p, q, k)


def _recursive_rejection_acceptance(p: Array, q: Array, k: int) -> float:
    accepted = 0.0
    chances, rest, drawn_from = np.ones(1), p[None], q[None]  # of n sequences of draws that were all rejected: [n, V]
    for sibling in range(k):
        accepted += float(chances @ np.minimum(rest, drawn_from).sum(-1))
        if sibling == k - 1:
            break
        rejected = np.maximum(drawn_from - rest, 0.0)  # [n, V] chance that a token is drawn and rejected
        row, token = np.nonzero(rejected)
        chances = chances[row] * rejected[row, token]
        rest = _normalised(np.maximum(rest - drawn_from, 0.0))[row]
        drawn_from = drawn_from[row]
        drawn_from[np.arange(len(row)), token] = 0.0
        drawn_from = _normalised(drawn_from)
    return accepted


def _normalised(weights: Array) -> Array:
    """Rows that sum to 1; a row of zeros stays so."""
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def _pair(p: Any, q: Any) -> tuple[Array, Array]:
    acceptance_probability(p, q)  # refuses what is no pair of distributions
    return _normalised(np.asarray(p, dtype=np.float64)), _normalised(np.asarray(q, dtype=np.float64))


def _check_count(k: int) -> None:
    if k != int(k) or k < 1:
        raise ValueError(f"k must be a whole number >= 1, not {k}")


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
