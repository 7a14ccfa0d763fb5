"""Lenient speculative sampling (Leviathan et al. 2023, appendix, https://arxiv.org/abs/2211.17192).  Lossy."""

from __future__ import annotations

from torch import Tensor

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, chain_nodes, drawn_probability, is_nothing
from foretoken.methods.verifiers.longest import graded_distribution


class LenientVerifier(Verifier):
    """``rejection`` with the draft distribution scaled by a lenience l: accept with min(1, p(x) / (l q(x))).

    A rejected token is replaced by a draw from norm([p - l q]+).  No token becomes more likely than 1/l times its
    target probability.  At temperature 0 a token is accepted if its probability (softmax of the raw logits) is at least
    l times the largest; l = 1 is the lossless rule.

    Args:
        lenience: factor l on the draft distribution, in (0, 1]; 1 is lossless.
    """

    name = "lenient"
    lossless = False
    kinds = frozenset({Kind.IID, Kind.POINT})
    chains_only = True

    def __init__(self, lenience: float = 0.5) -> None:
        if not 0.0 < lenience <= 1.0:
            raise ValueError(f"lenience must be in (0, 1], not {lenience}")
        self.lenience = lenience

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The rule, position by position; target distributions are computed only up to the first rejection."""
        nodes = chain_nodes(tree, self.name)
        for i, node in enumerate(nodes):
            parent, x = tree.parents[node], tree.tokens[node]
            if scores.sampler.greedy:
                if not self._stands_greedily(scores, parent, x):
                    return Verdict(tuple(nodes[:i]), scores.argmax(parent), next_is_bonus=False)
                continue
            p = scores.p(parent)  # [V]
            if not coins.accept(float(p[x]), self.lenience * drawn_probability(tree, node), node):
                return Verdict(
                    tuple(nodes[:i]), coins.draw(self._residual(p, tree.distribution(node), x)), next_is_bonus=False
                )
        return Verdict(tuple(nodes), coins.draw(scores.p(nodes[-1] if nodes else 0)), next_is_bonus=True)

    def _stands_greedily(self, scores: Scores, node: int, token: int) -> bool:
        if token == scores.argmax(node):
            return True
        p = graded_distribution(scores, node)
        return self.lenience < 1.0 and float(p[token]) >= self.lenience * float(p.amax())

    def _residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor:
        """[p - l q]+ [V], not normalised; ``p`` if that is empty."""
        if q is None:
            residual = p.clone()
            residual[token] = (residual[token] - self.lenience).clamp_min(0.0)
        else:
            residual = (p - q * self.lenience).clamp_min_(0.0)
        return p if is_nothing(float(residual.sum()), residual) else residual
