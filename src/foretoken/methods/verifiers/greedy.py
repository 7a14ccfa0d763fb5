"""Greedy walk: the longest path of argmax tokens (Stern et al. 2018, https://arxiv.org/abs/1811.03115)."""

from __future__ import annotations

from foretoken.core import Scores, TokenTree, Verdict
from foretoken.methods.verifiers.base import Coins, Verifier, walk_down


class GreedyVerifier(Verifier):
    """Follow the child that holds the argmax token, as long as there is one (temperature 0).

    Needs no draft distribution, so any proposal is valid. All argmaxes are copied to the host in one transfer.
    """

    name = "greedy"
    decides_by = "choices"
    greedy_only = True
    asks_choices = True

    def decide(self, tree: TokenTree, scores: Scores, coins: Coins) -> Verdict:
        return walk_down(tree, lambda node, children: scores.choice(node))
