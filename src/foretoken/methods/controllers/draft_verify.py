"""Stop rule on the draft's largest probability, with a threshold that follows the request's acceptance rate.

Draft & Verify, Zhang et al. 2023 (arXiv 2309.08168).
"""

from __future__ import annotations

from foretoken.core import Context
from foretoken.methods.controllers.stopping import MovingThresholdController, Stop, top


class DraftVerifyController(MovingThresholdController):
    """Ends a draft after a token whose distribution has no probability as high as the threshold.

    Args:
        threshold: first bar of a request; by default 0.8 for greedy requests and 0.5 for others.
    """

    name = "draft_verify"

    def __init__(
        self, threshold: float | None = None, k: int | None = None, aim: float = 0.9, step: float = 0.01
    ) -> None:
        # Higher for greedy requests, whose drafts are always the best token.
        super().__init__((0.8, 0.5) if threshold is None else (threshold, threshold), k, aim, step)

    def rule(self, context: Context) -> Stop:
        bar = self.bar(context).value
        return lambda distribution, probability: top(distribution, probability) < bar
