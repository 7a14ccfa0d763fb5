"""Top-k, top-p and min-p: which tokens of a distribution stay.

On a CPU only the candidates of a row are looked at, a few hundred of a vocabulary of 50,000 to 150,000 tokens: sorting
all of it takes 6 to 20 ms there, as long as the forward of a small model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def filtered(distributions: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Apply top-k, top-p and min-p to distributions [N, V] in Transformers' order, renormalising after each.

    Args:
        distributions: as the temperature leaves them.
        top_k: keep the k most likely tokens, and those that are as likely as the last of them; 0 keeps all.
        top_p: keep the most likely tokens up to this mass, of equally likely ones those of lower ids; 1 keeps all.
        min_p: drop tokens less likely than so many times the most likely one; 0 keeps all.
    """

    def cut(rows: Tensor) -> Tensor:
        return _cut(rows, top_k, top_p, min_p)

    if distributions.device.type != "cpu":
        return cut(distributions)
    filtered = torch.zeros_like(distributions)
    for row, result in zip(distributions.numpy(), filtered, strict=True):
        _cut_candidates(row, result, _least(row, top_k, top_p, min_p), cut)
    return filtered


def _least(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """A positive weight that all tokens which stay of a distribution [V] have: a bound that takes one pass."""
    least = min_p * float(row.max()) / 2
    if 0 < top_k < len(row):
        least = float(np.partition(row, -top_k)[-top_k])
    elif top_p < 1:  # all tokens below have less than half of the mass that may be left out
        least = (1 - top_p) / (2 * len(row))
    return max(least, float(np.finfo(row.dtype).smallest_subnormal))


def _cut_candidates(row: np.ndarray, result: Tensor, least: float, cut: Callable[[Tensor], Tensor]) -> None:
    """Cut the tokens of at least a weight, which are in the order of their ids, and put them into ``result`` [V]."""
    ids = np.flatnonzero(row >= least)
    result.numpy()[ids] = cut(torch.from_numpy(row[ids])[None])[0].numpy()


def _cut(distributions: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The plain form, on distributions [N, V] or on what is left of them."""
    if top_k > 0:
        threshold = distributions.topk(min(top_k, distributions.shape[-1]), -1).values[..., -1:]
        distributions = _normalised(distributions.where(distributions >= threshold, 0.0))
    if top_p < 1:
        ordered, order = distributions.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        keep = before < top_p
        keep[..., 0] = True
        distributions = _normalised(distributions.where(torch.zeros_like(keep).scatter(-1, order, keep), 0.0))
    if min_p > 0:
        distributions = _normalised(
            distributions.where(distributions >= min_p * distributions.max(-1, keepdim=True).values, 0.0)
        )
    return distributions


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
