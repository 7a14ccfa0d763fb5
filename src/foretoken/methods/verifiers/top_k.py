"""Top-k acceptance (blockwise parallel decoding, Stern et al. 2018, https://arxiv.org/abs/1811.03115).  Lossy."""

from __future__ import annotations

from torch import Tensor

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier
from foretoken.methods.verifiers.longest import close, graded_distribution, longest_run


class TopKVerifier(Verifier):
    """Accept ``x`` if fewer than k tokens are more likely under the target, and its probability is not 0.

    The longest run over all paths is accepted. Tokens are ranked by the distribution that the request samples from; at
    temperature 0 by the raw logits. ``k=1`` at temperature 0 is exact greedy except for ties.

    Args:
        k: number of the target's most likely tokens that are accepted; at least 1.
        sample_next: draw the token after the accepted run from p, instead of taking its argmax.
    """

    name = "top_k"
    decides_by = "paths"
    lossless = False

    def __init__(self, k: int = 3, sample_next: bool = False) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        self.k, self.sample_next = k, sample_next

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def accepts(node: int, p: Tensor, token: int) -> bool:
            weight = p[token]
            return float(weight) > 0.0 and int((p > weight).sum()) < self.k

        path = longest_run(tree, lambda node: graded_distribution(scores, node), accepts)
        return close(tree, scores, coins, path, self.sample_next)
