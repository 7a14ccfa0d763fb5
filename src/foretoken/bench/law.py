"""Statistics: do sampled tokens follow the target's law?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """P-value of a goodness-of-fit test of ``counts`` [K] against ``expected`` [K] (same sum).

    Cells with an expectation below 5 are merged, smallest first; a count where nothing is expected gives 0.
    """
    counts, expected = counts.double(), expected.double()
    impossible = expected <= 0
    if bool(counts[impossible].sum() > 0):
        return 0.0
    order = expected[~impossible].argsort()
    cells = _merged(counts[~impossible][order].tolist(), expected[~impossible][order].tolist())
    if len(cells) < 2:
        return 1.0
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


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


def uniform_place(law: Tensor, token: int, u: float) -> float:
    """Where a drawn token stands in its law [V], as a number that is uniform in [0, 1) when the law is right.

    The randomised probability integral transform: the mass of all more likely tokens, plus ``u`` times the token's own
    (ties are ordered by index).  ``u`` is a fresh uniform.  A token of probability zero gives 2: no such draw exists.
    """
    own = law[token]
    if float(own) <= 0:
        return 2.0
    before = law[law > own].sum() + law[:token][law[:token] == own].sum()
    return float((before + u * own) / law.sum())


def uniformity_p(places: Sequence[float], bins: int = 20) -> float:
    """P-value of a chi-square test that ``places`` are uniform in [0, 1)."""
    if not places:
        return 1.0
    if max(places) > 1.5:
        return 0.0
    cells = torch.tensor(places, dtype=torch.float64).mul(bins).long().clamp_(0, bins - 1)
    counts = torch.bincount(cells, minlength=bins)
    return chi_square_p(counts, torch.full((bins,), len(places) / bins, dtype=torch.float64))
