"""Statistics: do sampled tokens follow the target's distribution?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom of ``counts`` [K] against ``expected`` [K] (same sum).

    Cells with an expectation below 5 are merged, smallest first; a count where nothing is expected gives infinity.
    """
    counts, expected = counts.double(), expected.double()
    impossible = expected <= 0
    if bool(counts[impossible].sum() > 0):
        return math.inf, 1
    order = expected[~impossible].argsort()
    cells = _merged(counts[~impossible][order].tolist(), expected[~impossible][order].tolist())
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), max(len(cells) - 1, 0)


def upper_tail(statistic: float, freedom: int) -> float:
    """Chance that a chi-square variable of ``freedom`` degrees exceeds ``statistic``."""
    if math.isinf(statistic):
        return 0.0
    return _upper(freedom / 2, statistic / 2) if freedom else 1.0


def _upper(shape: float, bound: float) -> float:
    """The regularised upper incomplete gamma function."""
    return float(torch.special.gammaincc(*(torch.tensor(x, dtype=torch.float64) for x in (shape, bound))))


def _merged(counts: Sequence[float], expected: Sequence[float]) -> list[tuple[float, float]]:
    cells: list[tuple[float, float]] = []
    seen = wanted = 0.0
    for count, mean in zip(counts, expected, strict=True):
        seen, wanted = seen + count, wanted + mean
        if wanted >= 5:
            cells.append((seen, wanted))
            seen = wanted = 0.0
    if wanted > 0 and cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
    elif wanted > 0:
        cells.append((seen, wanted))
    return cells


def uniform_place(distribution: Tensor, token: int, u: float) -> float:
    """Where a drawn token stands in its distribution [V], as a number that is uniform in [0, 1) when the distribution
    is right.

    The randomised probability integral transform: the mass of all more likely tokens, plus ``u`` times the token's own
    (ties are ordered by index).  ``u`` is a fresh uniform.  A token of probability zero gives 2: no such draw exists.
    """
    own = distribution[token]
    if float(own) <= 0:
        return 2.0
    before = distribution[distribution > own].sum() + distribution[:token][distribution[:token] == own].sum()
    return float((before + u * own) / distribution.sum())


def uniformity(places: Sequence[float], bins: int = 20) -> tuple[float, int]:
    """Statistic and degrees of freedom of a chi-square test that ``places`` are uniform in [0, 1)."""
    if not places:
        return 0.0, 0
    if max(places) > 1.5:
        return math.inf, 1
    cells = torch.tensor(places, dtype=torch.float64).mul(bins).long().clamp_(0, bins - 1)
    counts = torch.bincount(cells, minlength=bins)
    return chi_square(counts, torch.full((bins,), len(places) / bins, dtype=torch.float64))


# -- power -----------------------------------------------------------------------------------------------------------


def smallest_seen(draws: int, freedom: int, level: float, power: float = 0.9) -> float:
    """The total variation from which on a chi-square test of ``draws`` draws finds a wrong distribution with that
    ``power``.

    A distribution q whose cells differ from p's by a total variation d has a noncentrality of draws * sum (q - p)**2 /
    p, which is at least 4 draws d**2 (Cauchy and Schwarz), so the bound holds for every q.  1 when nothing can be
    found.

    Args:
        draws: independent draws.
        freedom: cells minus one (summed over the tables that are tested together).
        level: p-value below which the test fails.
        power: chance that it does.
    """
    if draws < 1 or freedom < 1:
        return 1.0
    bound = _crossing(lambda x: _upper(freedom / 2, x / 2) <= level)
    noncentrality = _crossing(lambda x: noncentral_tail(bound, freedom, x) >= power)
    return min(1.0, math.sqrt(noncentrality / (4 * draws)))


def noncentral_tail(bound: float, freedom: int, noncentrality: float) -> float:
    """Chance that a noncentral chi-square variable exceeds ``bound``: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = (terms * math.log(mean) - mean - torch.lgamma(terms + 1)).exp() if mean > 0 else (terms == 0).double()
    tails = torch.special.gammaincc(freedom / 2 + terms, torch.tensor(bound / 2, dtype=torch.float64))
    return float((weights * tails).sum())


def _crossing(reached: Callable[[float], bool]) -> float:
    """The smallest positive number from which on ``reached`` holds, to nine digits."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
