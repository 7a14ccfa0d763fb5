"""Distance acceptance for ordinal outputs (Stern et al. 2018, https://arxiv.org/abs/1811.03115).  Lossy."""

from __future__ import annotations

from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.longest import close, graded_distribution, is_forbidden, longest_run


class DistanceVerifier(Verifier):
    """Accept ``x`` if |x - argmax p| <= eps: for vocabularies whose ids are ordered values, as pixel intensities.

    The longest run over all paths is accepted, and the next position is conditioned on the kept token, not on the
    argmax. ``eps=0`` at temperature 0 is exact greedy.

    Args:
        eps: largest accepted difference of token ids; at least 0.
        sample_next: draw the token after the accepted run from p, instead of taking its argmax.
    """

    name = "distance"
    decides_by = "paths"
    lossless = False

    def __init__(self, eps: int = 2, sample_next: bool = False) -> None:
        if eps < 0:
            raise ValueError(f"eps must be at least 0, not {eps}")
        self.eps, self.sample_next = eps, sample_next

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def accepts(node: int, p: Tensor, token: int) -> bool:
            return abs(token - scores.argmax(node)) <= self.eps and not is_forbidden(scores, p, token)

        path = longest_run(tree, lambda node: graded_distribution(scores, node), accepts)
        return close(tree, scores, coins, path, self.sample_next)
