"""Recursive rejection for children drawn without replacement (RSD, https://arxiv.org/abs/2402.14160; Sequoia,
https://arxiv.org/abs/2402.12374).
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, SiblingDistributions, Verifier, rest_of, walk_down


class WithoutReplacementVerifier(Verifier):
    """As ``multi_round``, but each child is tested against the distribution it was drawn from *given its earlier
    siblings*.

    Children must come in sampling order. Without the tried tokens, the draft distribution fits the residual better, so
    more is accepted than with independent draws.
    """

    name = "without_replacement"
    kinds = frozenset({Kind.WITHOUT_REPLACEMENT, Kind.POINT})

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            residual, drawn = scores.p(node), SiblingDistributions(tree)
            for child in children:
                token, q = tree.tokens[child], drawn.distribution(child)  # q: [V]
                if coins.accept(float(residual[token]), 1.0 if q is None else float(q[token]), child):
                    return token
                residual = rest_of(residual, q, token)
                drawn.remove(child)
            return coins.draw(residual)

        return walk_down(tree, choose)
