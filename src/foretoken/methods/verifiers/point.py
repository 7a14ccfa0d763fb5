"""The point rule for deterministic children (EAGLE-2, https://arxiv.org/abs/2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, is_nothing, walk_down, without


class PointVerifier(Verifier):
    """Try the children one by one: accept with the remaining probability of the token, else remove the token.

    The order of the children does not matter. Any set chosen independently of the target is valid, also pruned or
    reranked. A child's draft distribution is ignored, which is valid only for tokens that were not drawn.
    """

    name = "point"
    kinds = frozenset({Kind.POINT})

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """Rejection with a point mass as the draft distribution: the residual is the distribution without the token."""

        def choose(node: int, children: Sequence[int]) -> int:
            residual = scores.p(node)  # [V]
            for token, child in _distinct(tree, children).items():
                if coins.accept(float(residual[token]), node=child):
                    return token
                residual = without(residual, token)
            return coins.draw(residual)

        return walk_down(tree, choose)

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """:meth:`decide` with one transfer per visited node: tests use scalars, and no distribution is renormalised."""

        def choose(node: int, children: Sequence[int]) -> int:
            p = scores.p(node)  # [V]
            if not children:
                return coins.draw(p)
            tried = _distinct(tree, children)
            index = torch.tensor(list(tried), device=p.device)
            remaining = 1.0
            for (token, child), weight in zip(tried.items(), p[index].tolist(), strict=True):
                if coins.accept(weight, remaining, child):
                    return token
                remaining -= weight
            residual = p.index_fill(0, index, 0.0)
            # Empty up to rounding: the children cover the support, and the last likely one was meant.
            return coins.draw(p if is_nothing(float(residual.sum()), residual) else residual)

        return walk_down(tree, choose)


def _distinct(tree: TokenTree, children: Sequence[int]) -> dict[int, int]:
    """The children's tokens, each with the first child that holds it."""
    first: dict[int, int] = {}
    for child in children:
        first.setdefault(tree.tokens[child], child)
    return first
