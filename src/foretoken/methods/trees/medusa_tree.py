"""The best static tree for accuracies by position and rank, built greedily (Medusa, arXiv 2401.10774, section
2.3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.methods.trees.base import Shape
from foretoken.methods.trees.shapes import Choice, medusa_choices

TYPICAL = tuple(tuple(0.5 * 0.75**head * 0.4**rank for rank in range(10)) for head in range(8))
"""Default accuracies by head and rank, used without measurements."""


class MedusaTree(Shape):
    """Adds the node of highest path probability whose parent is in the tree until the tree is full.

    Args:
        nodes: number of draft nodes.
        depth: most levels of the tree.
        accuracies: [K][R] measured probability that the candidate of this rank is right at this position.
    """

    name = "medusa_tree"

    def __init__(self, nodes: int = 16, depth: int = 4, accuracies: Sequence[Sequence[float]] | None = None) -> None:
        if depth < 1 or nodes < 1:
            raise ValueError(f"medusa_tree needs nodes >= 1 and depth >= 1, not {nodes} and {depth}")
        self.nodes, self.accuracies = nodes, (accuracies or TYPICAL)[:depth]

    def choices(self) -> list[Choice]:
        """The nodes in order of addition: by falling value."""
        return medusa_choices(self.accuracies, self.nodes)
