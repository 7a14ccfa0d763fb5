"""Block verification (Sun et al. 2024, https://arxiv.org/abs/2403.10444)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from torch import Tensor

from foretoken.core import Kind, Scores, TokenTree, Verdict, is_large
from foretoken.methods.verifiers.base import (
    Coins,
    Verifier,
    chain_nodes,
    chain_weights,
    drawn_probability,
    is_nothing,
    leftover,
    scaled,
)


class BlockVerifier(Verifier):
    """Decide over the whole chain: keep the longest prefix whose own test passes, not the run before a failure.

    With ``P_0 = 1`` and ``P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))``, prefix ``i < g`` passes with probability
    ``S_i / (S_i + 1 - P_i)`` where ``S_i = sum [P_i p_{i+1} - q_{i+1}]+``, and the whole chain with ``P_g``.  The next
    token after prefix ``i < g`` is drawn from norm([P_i p_{i+1} - q_{i+1}]+).  No lossless rule accepts more of a
    chain on average.
    """

    name = "block"
    decides_by = "paths"
    kinds = frozenset({Kind.IID, Kind.POINT})
    chains_only = True

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The rule as the paper states it, with tests from the longest prefix down: the first that passes is
        accepted."""
        nodes = [0, *chain_nodes(tree, self.name)]
        last = len(nodes) - 1
        distributions = [scores.p(node) for node in nodes]  # g+1 distributions [V]
        keep = [1.0]  # P_i
        for i in range(last):
            child = nodes[i + 1]
            keep.append(scaled(keep[i], float(distributions[i][tree.tokens[child]]), drawn_probability(tree, child)))
        if last == 0 or (keep[last] > 0.0 and coins.accept(keep[last], node=nodes[last])):
            return Verdict(tuple(nodes[1:]), coins.draw(distributions[last]), next_is_bonus=True)
        for i in range(last - 1, -1, -1):
            if keep[i] == 0.0:
                continue
            child = nodes[i + 1]
            residual = leftover(distributions[i], tree.distribution(child), tree.tokens[child], keep[i])
            total = float(residual.sum())
            if i == 0 or coins.accept(pass_probability(total, keep[i]), node=nodes[i]):
                next_token = coins.draw(distributions[i] if is_nothing(total, residual) else residual)
                return Verdict(tuple(nodes[1 : i + 1]), next_token, next_is_bonus=False)
        raise AssertionError("unreachable: the empty prefix is always accepted")

    def draws_last(self, tree: TokenTree) -> bool:
        return True

    def needs_all(self, scores: Scores) -> bool:
        """True where one call computes all distributions cheaply."""
        return all_at_once(scores.tree, scores)

    def decide_fast(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """:meth:`decide` without vector operations for a test that ``P_i`` alone decides (S_i / (S_i + 1 - P_i) <=
        P_i)."""
        nodes = [0, *chain_nodes(tree, self.name)]
        last = len(nodes) - 1
        distribution, keep = _distributions_and_budgets(tree, scores, nodes)
        if last == 0 or (keep[last] > 0.0 and coins.accept(keep[last], node=nodes[last])):
            return Verdict(tuple(nodes[1:]), coins.draw(distribution(last)), next_is_bonus=True)

        @cache
        def rest_after(i: int) -> tuple[Tensor, float]:
            child = nodes[i + 1]
            residual = leftover(distribution(i), tree.distribution(child), tree.tokens[child], keep[i])
            return residual, float(residual.sum())

        def passes(i: int) -> bool:
            return keep[i] > 0.0 and coins.accept_lazily(
                keep[i], lambda: pass_probability(rest_after(i)[1], keep[i]), nodes[i]
            )

        stop = next((i for i in range(last - 1, 0, -1) if passes(i)), 0)
        residual, total = rest_after(stop)
        next_token = coins.draw(distribution(stop) if is_nothing(total, residual) else residual)
        return Verdict(tuple(nodes[1 : stop + 1]), next_token, next_is_bonus=False)


def pass_probability(residual: float, budget: float) -> float:
    """S / (S + 1 - P): the probability to keep a prefix of budget P none of whose extensions were accepted."""
    total = residual + (1.0 - budget)
    return 1.0 if total <= 0.0 else residual / total


def all_at_once(tree: TokenTree, scores: Scores) -> bool:
    """Whether one call computes the distributions of a chain: on a CPU, six at once cost three single ones for V =
    8192, and six for 150k."""
    return len(tree) > 1 and tree.is_chain and scores.sampler.context_free and not is_large(scores.logits)


def _distributions_and_budgets(
    tree: TokenTree, scores: Scores, nodes: Sequence[int]
) -> tuple[Callable[[int], Tensor], list[float]]:
    """The target distribution after the i-th node [V], and P_0..P_g; no distribution is computed past a budget of
    zero."""
    keep = [1.0]
    if all_at_once(tree, scores):
        distributions = scores.chain_p()  # [g+1, V]
        for p, q in zip(*(scores.weights or chain_weights(tree, distributions)), strict=True):
            keep.append(scaled(keep[-1], p, q))
        return distributions.__getitem__, keep
    for node, child in pairwise(nodes):
        p = float(scores.p(node)[tree.tokens[child]]) if keep[-1] > 0.0 else 0.0
        keep.append(scaled(keep[-1], p, drawn_probability(tree, child)))
    return lambda i: scores.p(nodes[i]), keep
