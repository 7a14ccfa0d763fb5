"""Typical acceptance (Medusa, https://arxiv.org/abs/2401.10774).  Lossy when sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.longest import close, longest_run


class TypicalVerifier(Verifier):
    """Accept ``x`` if p(x) > min(eps, delta exp(-H(p))): the less certain the target, the lower the threshold.

    The longest run over all paths is accepted.  At temperature 0 the entropy is 0 and only the argmax passes: exact
    greedy.

    Args:
        eps: the bar for a nearly certain target, in (0, 1) (Medusa's ``posterior_threshold``).
        delta: scale of the entropy-dependent bar, above 0 (Medusa's ``posterior_alpha``; usually sqrt(eps)).
        sample_next: draw the token after the accepted run from p, instead of taking its argmax as Medusa does.
    """

    name = "typical"
    decides_by = "paths"
    lossless = False

    def __init__(self, eps: float = 0.09, delta: float = 0.3, sample_next: bool = False) -> None:
        if not 0.0 < eps < 1.0:
            raise ValueError(f"eps must be in (0, 1), not {eps}")
        if not (delta > 0.0 and math.isfinite(delta)):
            raise ValueError(f"delta must be above 0 and finite, not {delta}")
        self.eps, self.delta, self.sample_next = eps, delta, sample_next

    def threshold(self, p: Tensor) -> float:
        """Lowest accepted probability (exclusive) under the distribution ``p`` [V]; the entropy is in nats."""
        return min(self.eps, self.delta * math.exp(-float(torch.special.entr(p).sum())))

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        bars: dict[int, float] = {}

        def accepts(node: int, p: Tensor, token: int) -> bool:
            if node not in bars:
                bars[node] = self.threshold(p)
            return float(p[token]) > bars[node]

        return close(tree, scores, coins, longest_run(tree, scores.p, accepts), self.sample_next)
