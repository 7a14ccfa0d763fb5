"""Stop drafting after a token that the draft itself finds unlikely; the drawn token stays in the draft.

Transformers' assisted generation (threshold 0.4); DISCO, arXiv 2405.04304.
"""

from __future__ import annotations

from foretoken.controllers.base import Controller
from foretoken.types import Budget, Context, Limits


class ConfidenceController(Controller):
    """A probability threshold on the draft's own tokens.

    Args:
        threshold: drafting ends after a token whose draft probability is below this.
        k: longest draft; the drafter's own by default.
    """

    name = "confidence"

    def __init__(self, threshold: float = 0.4, k: int | None = None) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"confidence needs a threshold in [0, 1], not {threshold}")
        if k is not None and k < 1:
            raise ValueError(f"confidence needs k >= 1, not {k}")
        self.threshold, self.k = threshold, k
        self._budget = Budget(k or 5, 64, threshold)

    def attach(self, limits: Limits) -> None:
        """Take the length from the drafter when it was not given."""
        self._budget = Budget(self.k or limits.max_depth, limits.max_nodes, self.threshold)

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The constant budget with its threshold."""
        return self._budget
