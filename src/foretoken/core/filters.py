"""Top-k, top-p and min-p filters of distributions.

On a CPU only a few hundred candidates of a row are examined. Sorting a vocabulary of 50,000 to 150,000 tokens takes 6
to 20 ms there, as long as the forward of a small model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core import NON_FINITE, NonFiniteLogitsError

DEPTHS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-16)
"""Thresholds of the candidate search: a probability, or a share of the largest one. The first is mostly enough and
leaves few tokens."""
Row = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Filters:
    """Filters in Transformers' order; the remaining distribution is normalised after each.

    Attributes:
        top_k: keep the k most likely tokens, and ties with the last of them; 0 keeps all.
        top_p: keep the most likely tokens up to this mass, lower ids first among ties; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def filtered(self, scores: Tensor, temperature: float) -> Tensor:
        """[N, V] filtered distributions of scores [N, V] on a CPU."""
        distributions = torch.zeros_like(scores)
        for row, result in zip(scores.numpy(), distributions.numpy(), strict=True):
            ids, weights = self.remaining(row, temperature)
            result[ids] = weights
        return distributions

    def logs(self, scores: Tensor, temperature: float) -> Tensor:
        """[N, V] their logarithms, -inf for dropped tokens. (The logarithms of 150,000 zeros take 4 ms.)"""
        logs = torch.full_like(scores, -torch.inf)
        for row, result in zip(scores.numpy(), logs.numpy(), strict=True):
            ids, weights = self.remaining(row, temperature)
            with np.errstate(divide="ignore"):  # the smallest weights may be 0 after normalisation
                result[ids] = np.log(weights)
        return logs

    def remaining(self, scores: Row, temperature: float) -> tuple[Row, Row]:
        """The kept tokens for scores [V], in order of their ids, and their probabilities. Raises
        ``NonFiniteLogitsError`` for NaN, or without a finite score."""
        best = scores.max()
        if not np.isfinite(best):
            raise NonFiniteLogitsError(NON_FINITE)
        ids, weights, total = self._candidates(scores, best, max(temperature, np.finfo(scores.dtype).tiny))
        if 0 < self.top_k < len(ids):  # a high temperature makes weights equal, though the scores are not
            near = scores[ids]
            likely = near >= np.partition(near, -self.top_k)[-self.top_k]
            ids, weights = ids[likely], weights[likely]
        weights = weights / (weights.sum() if total is None else total)
        if self.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            ordered = weights[order]
            before = ordered.cumsum(dtype=np.float64) - ordered
            order = np.sort(order[: max(1, int(np.searchsorted(before, self.top_p)))])
            ids, weights = ids[order], weights[order]
            weights /= weights.sum()
        if self.min_p > 0:
            likely = weights >= self.min_p * weights.max()
            ids, weights = ids[likely], weights[likely]
            weights /= weights.sum()
        return ids, weights

    def _candidates(self, scores: Row, best: Any, temperature: float) -> tuple[Row, Row, float | None]:
        """A superset of the kept tokens in order of their ids, their weights (the largest is 1), and the total weight
        of all tokens, which only top-p without top-k needs."""
        has_top_k = 0 < self.top_k < len(scores)
        if self.top_p < 1 and not has_top_k:
            weights = _weights(scores, best, temperature)
            total = float(weights.sum())
            for least in DEPTHS:
                ids = np.flatnonzero(weights >= least * total)
                near = weights[ids]
                if float(near.sum(dtype=np.float64)) > (self.top_p + 1e-5) * total:  # float32 sums are off by less
                    return ids, near, total
            least = (1 - self.top_p) / (2 * len(weights)) * total
            ids = np.flatnonzero(weights >= least)  # all others have less than half of the mass that may be dropped
            return ids, weights[ids], total
        share_of_min_p = self.min_p / 2 or self.min_p  # half of the smallest float is 0, which has no logarithm
        count, shares = (self.top_k, DEPTHS) if has_top_k else (1, (share_of_min_p,) if self.min_p > 0 else ())
        for share in shares:
            ids = np.flatnonzero(scores >= scores.dtype.type(best + temperature * np.log(share)))
            if len(ids) >= count:
                break
        else:
            ids = np.arange(len(scores))
        weights = _weights(scores[ids], best, temperature)
        possible = weights > 0
        return ids[possible], weights[possible], None

    def cut(self, distributions: Tensor, scores: Tensor) -> Tensor:
        """[N, V] filtered distributions, from distributions [N, V] and their scores [N, V]: the plain form, for a
        device."""
        if self.top_k > 0:  # by scores: a high temperature makes different probabilities equal
            threshold = scores.topk(min(self.top_k, scores.shape[-1]), -1).values[..., -1:]
            distributions = _normalised(distributions.where(scores >= threshold, 0.0))
        if self.top_p < 1:
            ordered, order = distributions.sort(dim=-1, descending=True, stable=True)
            keep = ordered.cumsum(-1) - ordered < self.top_p
            keep[..., 0] = True
            distributions = _normalised(distributions.where(torch.zeros_like(keep).scatter(-1, order, keep), 0.0))
        if self.min_p > 0:
            least = self.min_p * distributions.max(-1, keepdim=True).values
            distributions = _normalised(distributions.where(distributions >= least, 0.0))
        return distributions


def _weights(scores: Row, best: Any, temperature: float) -> Row:
    """Weights proportional to the probabilities, from scores of which the largest is ``best``."""
    with np.errstate(over="ignore"):  # to -inf
        weights = scores - best
        if temperature != 1:
            weights /= temperature
    return np.exp(weights, out=weights)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
