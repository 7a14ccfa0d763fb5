"""Traversal verification of any tree, leaf to root (Weng et al. 2025, https://arxiv.org/abs/2505.12398)."""

from __future__ import annotations

from torch import Tensor

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import (
    Coins,
    SiblingDistributions,
    Verifier,
    is_nothing,
    leftover,
    scaled,
    verdict_at,
)
from foretoken.methods.verifiers.block import BlockVerifier, all_at_once, pass_probability


class TraversalVerifier(Verifier):
    """Give every node a budget, the probability with which it must be kept, and try the deepest nodes first.

    A child of budget-b node v has budget min(1, b p_v(x) / q(x)). When its whole subtree is rejected, v keeps the
    distribution norm([b p_v - q]+) and the budget S / (S + 1 - b), S = sum [b p_v - q]+, for its next child. In the end
    v itself is accepted with its budget. The root's budget is 1. On a chain this is ``block``.
    """

    name = "traversal"
    decides_by = "paths"

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The recursion; target distributions are computed only for visited nodes that can be accepted."""
        verdict = _visit(tree, scores, coins, node=0, budget=1.0)
        if verdict is None:
            raise AssertionError("unreachable: the root is always accepted")
        return verdict

    def draws_last(self, tree: TokenTree) -> bool:
        """True on a chain, as in block verification; in a tree a draw may follow that of a subtree."""
        return tree.is_chain

    def needs_all(self, scores: Scores) -> bool:
        return all_at_once(scores.tree, scores)

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """:meth:`decide`; a chain uses block verification's faster twin with the same random numbers."""
        return BlockVerifier().decide_fast(tree, scores, coins) if tree.is_chain else self.decide(tree, scores, coins)


def _visit(tree: TokenTree, scores: Scores, coins: Coins, node: int, budget: float) -> Verdict | None:
    """Verify the subtree of ``node``; ``None`` when all of it is rejected."""
    children = tree.children[node]
    if not children:
        accepted = node == 0 or coins.accept(budget, node=node)
        return verdict_at(tree, tree.path(node)[1:], coins.draw(scores.p(node))) if accepted else None
    distribution, drawn = scores.p(node), SiblingDistributions(tree)  # [V]
    for child in children:
        token, q = tree.tokens[child], drawn.distribution(child)
        probability = scaled(budget, float(distribution[token]), 1.0 if q is None else float(q[token]))
        if probability > 0.0 and (verdict := _visit(tree, scores, coins, child, probability)) is not None:
            return verdict
        distribution, budget = _after_rejection(distribution, q, token, budget)
        if tree.kind is Kind.WITHOUT_REPLACEMENT:
            drawn.remove(child)
        if budget <= 0.0:
            break
    if node == 0 or coins.accept(budget, node=node):
        return verdict_at(tree, tree.path(node)[1:], coins.draw(distribution))
    return None


def _after_rejection(distribution: Tensor, q: Tensor | None, token: int, budget: float) -> tuple[Tensor, float]:
    """Distribution [V] and budget of a node after the subtree of a child drawn from ``q`` was rejected."""
    residual = leftover(distribution, q, token, budget)
    total = residual.sum()
    weight = float(total)
    if is_nothing(weight, residual):  # at the root by rounding only: it keeps its distribution
        return distribution, pass_probability(0.0, budget)
    return residual / total, pass_probability(weight, budget)
