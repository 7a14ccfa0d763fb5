"""Calibration of predicted survival: sequential temperature scaling (STS) of a confidence head, arXiv 2607.05147.

A round's survival at position k is the probability that the draft is accepted up to it, the product of ``sigmoid(z_j /
T_j)`` over the positions j <= k.  Position by position, the temperature with the smallest calibration error is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 15
GRID = tuple(sorted((2.0 ** (step / 8) for step in range(-24, 25)), key=lambda t: abs(t - 1.0)))
"""Temperatures from 1/8 to 8, the nearest to 1 first, which wins a tie."""
LEAST_ROUNDS = 100
"""Rounds without which nothing is fitted."""


def calibration_error(predicted: Tensor, outcomes: Tensor) -> float:
    """Expected calibration error: the mean distance between prediction and outcome over bins of equal width.

    Args:
        predicted: [n] probabilities.
        outcomes: [n] of 0 and 1, or expectations of them.
    """
    bins = (predicted * BINS).long().clamp(0, BINS - 1)
    surplus = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, (predicted - outcomes).double())
    return float(surplus.abs().sum()) / max(len(predicted), 1)


def survivals(log_odds: Tensor, temperatures: list[float]) -> Tensor:
    """Predicted survival [n, b] of rounds with these log-odds [n, b] of acceptance at every position."""
    return torch.sigmoid(log_odds / torch.tensor(temperatures, dtype=log_odds.dtype)).cumprod(-1)


def fit_temperatures(log_odds: Tensor, survived: Tensor, others: tuple[Tensor, Tensor] | None = None) -> list[float]:
    """One temperature for each position, in order; ones if there are too few rounds.

    Args:
        log_odds: [n, b] of acceptance at every position, given that those before it are accepted.
        survived: [n, b], whether, or with which probability, the draft was accepted up to each position.
        others: the same of other rounds: a position whose error there does not shrink keeps the temperature 1.
    """
    if len(log_odds) < LEAST_ROUNDS:
        return [1.0] * log_odds.shape[1]
    sides = [(log_odds, survived), *([] if others is None else [others])]
    sides = [(odds.double().cpu(), outcomes.double().cpu()) for odds, outcomes in sides]
    befores = [torch.ones(len(odds), dtype=torch.float64) for odds, _ in sides]
    temperatures: list[float] = []
    for position in range(log_odds.shape[1]):
        columns = [(odds[:, position], outcomes[:, position]) for odds, outcomes in sides]
        errors = _errors(befores[0], *columns[0], GRID)
        best = min(GRID, key=errors.__getitem__)
        checked = _errors(befores[-1], *columns[-1], (best, 1.0))
        temperatures.append(best if checked[best] < checked[1.0] else 1.0)
        befores = [
            before * torch.sigmoid(odds / temperatures[-1]) for before, (odds, _) in zip(befores, columns, strict=True)
        ]
    return temperatures


def _errors(before: Tensor, odds: Tensor, outcomes: Tensor, temperatures: Sequence[float]) -> dict[float, float]:
    """A position's error by its temperature, behind the predicted survival [n] of the one before it."""
    return {t: calibration_error(before * torch.sigmoid(odds / t), outcomes) for t in temperatures}


def calibration_errors(log_odds: Tensor, survived: Tensor, temperatures: list[float]) -> list[float]:
    """The error of the predicted survival at every position."""
    predicted = survivals(log_odds.double().cpu(), temperatures)
    outcomes = survived.double().cpu()
    return [calibration_error(predicted[:, k], outcomes[:, k]) for k in range(predicted.shape[1])]
