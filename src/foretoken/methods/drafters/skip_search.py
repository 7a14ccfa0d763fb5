"""The search for a set of sublayers to skip, one measurement at a time, during generation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretoken.methods.drafters.skip_sets import SkipSet

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]


class SkipSearch:
    """Search with random sets of a given size, and regularly one suggested by past scores; the best so far is kept.

    The generator of candidates has a fixed seed: the same scores give the same search.

    Args:
        ratio: share of all sublayers that a candidate skips.
        keep: layers at each end that always run.
        goal: the score above which the search ends.
        most: maximum measurements.
        patience: maximum measurements without a gain.

    Attributes:
        best: the set in use; initially both sublayers of every odd layer.
        best_score: its score; -1 before it was measured.
        rounds: number of rounds (set by the caller).
    """

    def __init__(
        self,
        num_layers: int,
        ratio: float = 0.45,
        keep: int = 1,
        goal: float = 0.95,
        most: int = 1000,
        patience: int = 300,
    ) -> None:
        middle = range(keep, num_layers - keep)
        self.sublayers = [(sublayer, layer) for sublayer in ("attention", "mlp") for layer in middle]
        self.size = min(round(ratio * 2 * num_layers), len(self.sublayers), 2 * num_layers - 1)
        self.goal, self.most, self.patience = goal, most, patience
        self.best = SkipSet.odd(num_layers, keep)
        self.best_score = -1.0
        self.rounds = self.measured = self.stale = 0
        self._rng = np.random.default_rng(0)
        self._tried: list[Bits] = []
        self._scores: list[float] = []

    @property
    def done(self) -> bool:
        tried_enough = self.measured >= self.most or self.stale >= self.patience
        return self.best_score > self.goal or tried_enough or self.size < 1

    def candidate(self) -> SkipSet:
        """The next set to measure; the first is the one in use."""
        if self.measured == 0:
            return self.best
        bits = self._suggested() if self.measured % 25 == 0 else self._random()
        return self._set(bits)

    def record(self, skips: SkipSet, score: float) -> None:
        """Record a measurement; the better set is kept."""
        self._tried.append(self._bits(skips))
        self._scores.append(score)
        self.measured += 1
        self.stale += 1
        if score > self.best_score:
            self.best, self.best_score, self.stale = skips, score, 0

    def _random(self) -> Bits:
        bits = np.zeros(len(self.sublayers), np.bool_)
        bits[self._rng.choice(len(self.sublayers), self.size, replace=False)] = True
        return bits

    def _suggested(self, random_sets: int = 256, latest: int = 200, kappa: float = 2.5) -> Bits:
        """The random set with the highest upper confidence bound, ``kappa`` standard deviations above the mean, under a
        Gaussian process of the latest scores."""
        pool = np.stack([self._random() for _ in range(random_sets)])
        mean, deviation = posterior(np.stack(self._tried[-latest:]), np.asarray(self._scores[-latest:]), pool)
        return pool[int((mean + kappa * deviation).argmax())]

    def _set(self, bits: Bits) -> SkipSet:
        chosen = [sublayer for sublayer, bit in zip(self.sublayers, bits, strict=True) if bit]
        attention, mlp = (frozenset(n for kind, n in chosen if kind == name) for name in ("attention", "mlp"))
        return SkipSet(attention, mlp)

    def _bits(self, skips: SkipSet) -> Bits:
        return np.array([layer in getattr(skips, kind) for kind, layer in self.sublayers], np.bool_)


def posterior(x: Bits, y: Floats, pool: Bits, noise: float = 1e-2) -> tuple[Floats, Floats]:
    """Mean and standard deviation [p] of a Gaussian process at the sets ``pool`` [p, m].

    It is conditioned on the scores ``y`` [n] of the sets ``x`` [n, m], with relative ``noise``.  Its kernel falls
    exponentially with the share of sublayers in which two sets differ.
    """
    scale = float(y.std()) or 1.0
    across = _kernel(pool, x)
    solved = np.linalg.solve(_kernel(x, x) + noise * np.eye(len(x)), across.T)  # [n, p]
    mean = y.mean() + solved.T @ (y - y.mean())
    variance = 1.0 - (across * solved.T).sum(1)
    return mean, scale * np.sqrt(variance.clip(min=0.0))


def _kernel(a: Bits, b: Bits) -> Floats:
    differing = (a[:, None, :] != b[None, :, :]).mean(-1)
    return np.exp(-4.0 * differing)
