"""The tree of most expected tokens for a given size, as deep as another level pays (OPT-Tree, arXiv 2406.17276)."""

from __future__ import annotations

import math

from foretoken.methods.trees.base import Candidates, Growth


class OptTree(Growth):
    """Expands every node among the best n of all; drafting ends when a level adds too little to their sum.

    With E_d the sum of the n largest path probabilities after d levels, level d + 1 is drafted while ``E_d - E_(d-1) >
    threshold``. A node outside the best n has no descendant inside, so expanding only the best loses nothing: the
    result is the best tree of n nodes and d levels over the offered children.

    Args:
        threshold: tokens that a level must have added for another one to be drafted: what a draft step costs, in
            tokens that plain decoding would have written meanwhile.
    """

    name = "opt_tree"

    def __init__(self, threshold: float = 0.2) -> None:
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"opt_tree needs threshold >= 0 and finite, not {threshold}")
        self.threshold = threshold

    def frontier(self, candidates: Candidates, first: int, width: int, nodes: int) -> list[int]:
        """The nodes of the last level that are among the best, if that level was worth its step."""
        best = candidates.best(nodes)
        gain = sum(candidates.values(best)) - sum(candidates.values(candidates.best(nodes, before=first)))
        return [node for node in best if node >= first] if gain > self.threshold else []
