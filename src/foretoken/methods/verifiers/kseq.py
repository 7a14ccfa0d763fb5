"""K-SEQ: one joint threshold for k independent children (SpecTr, https://arxiv.org/abs/2310.15141)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, is_nothing, walk_down, without


class KseqVerifier(Verifier):
    """Test each of k children of one distribution with p(c) / (rho q(c)), where rho in [1, k] spreads the target over
    them.

    ``beta(rho) = sum min(q, p / rho)`` is the probability that a test passes; rho is the smallest value for which the
    accepted mass ``1 - (1 - beta)^k`` fits below ``rho beta``. If all fail, the token is drawn from the residual of p;
    it may equal a child, and then the walk continues there. Children of different distributions are handled one
    distribution at a time.
    """

    name = "kseq"
    kinds = frozenset({Kind.IID})

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        def choose(node: int, children: Sequence[int]) -> int:
            residual = scores.p(node)  # [V]
            for group in _groups(tree, children):
                tokens, q = [tree.tokens[child] for child in group], tree.distribution(group[0])
                if q is None:
                    if coins.accept(float(residual[tokens[0]]), node=group[0]):
                        return tokens[0]
                    residual = without(residual, tokens[0])
                    continue
                rho = threshold(residual, q, len(group))
                for child, token in zip(group, tokens, strict=True):
                    if coins.accept(float(residual[token]), rho * float(q[token]), child):
                        return token
                residual = _residual(residual, q, len(group), rho)
            return coins.draw(residual)

        return walk_down(tree, choose)


def threshold(p: Tensor, q: Tensor, k: int) -> float:
    """The smallest lossless rho in [1, k] for distributions [V], rounded up so that the residual stays non-negative."""
    low, high = 1.0, float(k)
    if k == 1:
        return 1.0
    for _ in range(16):  # bisections
        rho = 0.5 * (low + high)
        beta = overlap(p, q, rho)
        if 1.0 - (1.0 - beta) ** k >= rho * beta:
            low = rho
        else:
            high = rho
    return high


def overlap(p: Tensor, q: Tensor, rho: float) -> float:
    """beta(rho) = sum min(q, p / rho): the probability that one draw from q passes the test."""
    return float(torch.minimum(q, p / rho).sum())


def _residual(p: Tensor, q: Tensor, k: int, rho: float) -> Tensor:
    """norm([p - min(q, p / rho) (1 - (1 - beta)^k) / beta]+) [V]; ``p`` if the residual or the overlap is empty."""
    shared = torch.minimum(q, p / rho)
    beta = float(shared.sum())
    if beta <= 0.0:
        return p
    residual = (p - shared * ((1.0 - (1.0 - beta) ** k) / beta)).clamp_min_(0.0)
    total = residual.sum()
    return p if is_nothing(float(total), residual) else residual / total


def _groups(tree: TokenTree, children: Sequence[int]) -> list[list[int]]:
    """Children grouped by distribution, in order of first appearance; each point mass is its own group."""
    groups: list[list[int]] = []
    for child in children:
        group = next((g for g in groups if _same(tree.distribution(child), tree.distribution(g[0]))), None)
        if group is None:
            groups.append([child])
        else:
            group.append(child)
    return groups


def _same(distribution: Tensor | None, other: Tensor | None) -> bool:
    if distribution is None or other is None:
        return False
    # Siblings with the same token have one distribution below them, computed for each, not always to the same bits.
    return distribution.data_ptr() == other.data_ptr() or float((distribution - other).abs().sum()) <= 1e-6
