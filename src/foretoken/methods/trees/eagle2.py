"""Dynamic trees: expand the likeliest nodes of every level, keep the likeliest of all (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from foretoken.methods.trees.base import Candidates, Growth


class Eagle2(Growth):
    """Expands the ``width`` best new nodes of each level; in the end all candidates are ranked again.

    A node's score is the sum of the draft log-probabilities on its path, which approximates its log acceptance
    probability.
    """

    name = "eagle2"

    def frontier(self, candidates: Candidates, first: int, width: int, nodes: int) -> list[int]:
        return sorted(range(first, len(candidates)), key=lambda node: (-candidates.scores[node], node))[:width]
