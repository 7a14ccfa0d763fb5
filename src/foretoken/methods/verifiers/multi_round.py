"""Multi-round rejection for independent children (SpecInfer, https://arxiv.org/abs/2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, drawn_probability, rest_of, walk_down


class MultiRoundVerifier(Verifier):
    """Rejection sampling child by child, each against its own draft distribution, on the previous child's residual.

    ``r = p``; child ``c`` drawn from ``q_c`` is accepted with probability min(1, r(c) / q_c(c)); else r = norm([r -
    q_c]+). Duplicates are separate trials, and children of several drafters may be siblings.
    """

    name = "multi_round"
    kinds = frozenset({Kind.IID, Kind.POINT})

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            residual = scores.p(node)  # [V]
            for child in children:
                token = tree.tokens[child]
                if coins.accept(float(residual[token]), drawn_probability(tree, child), child):
                    return token
                residual = rest_of(residual, tree.distribution(child), token)
            return coins.draw(residual)

        return walk_down(tree, choose)
