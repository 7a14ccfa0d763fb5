"""Formulas for speculative decoding: tokens per round from acceptance, and the cost of a round.

Words and units: ``k`` draft tokens (the papers' gamma); ``alpha`` the probability that a draft token is accepted, given
that the previous ones were; tokens per round include the target's own token; costs are in target calls that score one
token, so ``c`` is a draft step and ``v(n)`` a call with n tokens, v(1) = 1.  A *survival vector* (s_1, s_2, ...) holds
the probabilities that at least one, two, ... draft tokens are accepted, for acceptance that depends on position.

No model is run.  Numbers of theorems and equations are those of Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192; :class:`foretoken.lab.plan.assumptions.Assumptions` computes the speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from foretoken.core.costs import continued

Acceptance = float | Sequence[float]
"""One acceptance rate alpha, or a survival vector."""
SUM_TOLERANCE = 1e-6
"""Tolerance for the sum of a distribution above 1."""


# -- acceptance ------------------------------------------------------------------------------------------------------


def survival(alpha: float, k: int) -> list[float]:
    """Survival vector (alpha, alpha^2, ..., alpha^k) of independent acceptance at a constant rate."""
    check_alpha(alpha)
    _check_k(k)
    return [alpha**i for i in range(1, k + 1)]


def extended(measured: Sequence[float], k: int) -> list[float]:
    """The first k entries of a survival vector, extrapolated with the last step's rate.  Raises ``ValueError`` for
    entries outside [0, 1] and for increasing ones."""
    _check_survival(measured)
    _check_k(k)
    return continued(measured, k)


def reached(acceptance: Acceptance, k: int) -> list[float]:
    """The survival vector of k entries for either kind of acceptance."""
    return survival(acceptance, k) if isinstance(acceptance, float | int) else extended(acceptance, k)


# -- tokens per round ------------------------------------------------------------------------------------------------


def expected_tokens(acceptance: Acceptance, k: int) -> float:
    """Tokens per round of k draft tokens: (1 - alpha^(k+1)) / (1 - alpha) (Leviathan et al., equation 1), or 1 + s_1 +
    ... + s_k for a survival vector, continued by :func:`extended`.

    Its limits are 1 for alpha -> 0 and k + 1 for alpha -> 1.
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
    """Tokens per round of the best of G independent chains: (k + 1) - sum over i of (1 - alpha^i)^G.

    At least i draft tokens are accepted unless all G chains fail before.  One guess gives :func:`expected_tokens`.
    Lookahead decoding, Fu et al. 2024 (https://arxiv.org/abs/2402.02057), equation 4.  An upper estimate: similar
    guesses give less.
    """
    if guesses != int(guesses) or guesses < 1:
        raise ValueError(f"the number of guesses must be a whole number >= 1, not {guesses}")
    if guesses == 1:
        return expected_tokens(acceptance, k)
    return 1.0 + math.fsum(1.0 - (1.0 - s) ** guesses for s in reached(acceptance, k))


def alpha_for_tokens(tokens: float, k: int, guesses: int = 1) -> float | None:
    """The alpha at which :func:`tokens_of_guesses` equals ``tokens``: 0 up to one token, ``None`` above k + 1."""
    _check_k(k)
    if math.isnan(tokens) or tokens > k + 1:
        return None
    return 0.0 if tokens <= 1.0 else _root(lambda alpha: tokens_of_guesses(alpha, k, guesses) - tokens, 0.0, 1.0)


# -- the cost of a round -----------------------------------------------------------------------------------------------


def round_cost(steps: float, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """Cost v + c steps + o of a round in plain rounds, which is also its break-even number of tokens."""
    for name, value in (("c", c), ("the overhead", overhead), ("the number of draft steps", steps)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, not {value}")
    if not (math.isfinite(v) and v > 0):
        raise ValueError(f"v must be a finite number > 0, not {v}")
    return v + c * steps + overhead


# -- checks and helpers ----------------------------------------------------------------------------------------------


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Raise ``ValueError`` for a probability outside [0, 1] or NaN."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], not {alpha}")


def _check_k(k: int) -> None:
    if k != int(k) or k < 0:
        raise ValueError(f"k must be a whole number >= 0, not {k}")


def _check_survival(values: Sequence[float]) -> None:
    for i, (earlier, later) in enumerate(zip([1.0, *values], values, strict=False), 1):
        if not 0.0 <= later <= earlier:
            raise ValueError(
                f"a survival vector must fall from at most 1 to at least 0, but entry {i} is {later:g} after "
                f"{earlier:g}"
            )


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Sign change of a monotone function between ``low`` and ``high``, by bisection."""
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


# -- trees -------------------------------------------------------------------------------------------------------------


def tree_tokens(widths: Sequence[int], rows: Sequence[Sequence[float]]) -> float:
    """Tokens per round of a tree in which every node of level i - 1 has ``widths[i]`` children (SpecInfer's expansion).

    1 + the sum over levels of the probability that the walk gets there, as in Sequoia's F(T) (2402.12374).
    :func:`foretoken.methods.trees.shapes.expected_length` is for any tree.  Raises ``ValueError`` for probabilities of
    siblings that are missing or sum to more than 1, as only one of them can be accepted.

    Args:
        rows: per level the probability that the first, second, ... sibling is the accepted child of an accepted parent.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"a tree needs positive child counts per level, not {list(widths)}")
    share, tokens = 1.0, [1.0]
    for width, row in zip(widths, rows, strict=True):
        if width > len(row):
            raise ValueError(f"the tree tries {width} siblings, the acceptance table has {len(row)} columns")
        for rank, probability in enumerate(row[:width], 1):
            check_alpha(probability, f"the probability of sibling {rank}")
        accepted = math.fsum(row[:width])
        if accepted > 1.0 + SUM_TOLERANCE:
            raise ValueError(f"siblings are accepted with probabilities that sum to {accepted:g} > 1")
        share *= accepted
        tokens.append(share)
    return math.fsum(tokens)


def trial_acceptance(alpha: float, width: int) -> list[float]:
    """alpha, alpha (1 - alpha), ...: acceptance by rank if every sibling were a fresh trial like the first.

    An upper estimate: later siblings are worse guesses, tried against the residual of the target's distribution.
    """
    check_alpha(alpha)
    return [alpha * (1.0 - alpha) ** rank for rank in range(width)]
