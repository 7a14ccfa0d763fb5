"""Naive matching: one target draw per node ("NSS" in SpecTr, https://arxiv.org/abs/2310.15141)."""

from __future__ import annotations

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, walk_down


class MatchVerifier(Verifier):
    """Draw ``y ~ p`` at a node as plain decoding would; go to the child that equals it, else stop with ``y``.

    Lossless for any candidates, because ``y`` is independent of them. For a point-mass child it accepts exactly as
    often as the best rule; for sampled drafts it accepts less than ``rejection``.
    """

    name = "match"
    decides_by = "choices"

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        return walk_down(tree, lambda node, children: coins.draw(scores.p(node)))
