"""Speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, 2302.01318)."""

from __future__ import annotations

from foretoken.core import Kind, Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, chain_nodes, drawn_probability, rest_of


class RejectionVerifier(Verifier):
    """Token by token: accept ``x`` with probability min(1, p(x) / q(x)); at the first rejection draw norm([p - q]+)."""

    name = "rejection"
    kinds = frozenset({Kind.IID, Kind.POINT})
    chains_only = True

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        """The rule, position by position; target distributions are computed only up to the first rejection.

        Measured on a CPU, that takes 90 to 170 us for five drafts and V = 8192, and all at once 130 us; filters and
        larger vocabularies favour one by one.
        """
        nodes = chain_nodes(tree, self.name)
        for i, node in enumerate(nodes):
            p, x = scores.p(tree.parents[node]), tree.tokens[node]  # [V]
            if not coins.accept(float(p[x]), drawn_probability(tree, node), node):
                return Verdict(
                    tuple(nodes[:i]), coins.draw(rest_of(p, tree.distribution(node), x)), next_is_bonus=False
                )
        return Verdict(tuple(nodes), coins.draw(scores.p(nodes[-1] if nodes else 0)), next_is_bonus=True)

    def draws_last(self, tree: TokenTree) -> bool:
        return True
