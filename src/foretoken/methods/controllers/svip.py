"""Stop rule with a fixed bound on the root of the draft distribution's entropy.

SVIP, Zhang et al. 2024 (arXiv 2411.18462).
"""

from __future__ import annotations

import math

from foretoken.core import Context
from foretoken.methods.controllers.stopping import Stop, StoppingController, entropy


class SvipController(StoppingController):
    """Ends a draft after a token whose distribution has ``sqrt(coefficient * H)`` above a threshold.

    Args:
        threshold: the bar h; 0.3 and the default coefficient end drafts above 0.6 nats.
        coefficient: weight of the entropy H (nats).
        k: longest draft; the drafter's own by default.
    """

    name = "svip"

    def __init__(self, threshold: float = 0.3, coefficient: float = 0.15, k: int | None = None) -> None:
        super().__init__(k)
        if not (math.isfinite(threshold) and threshold >= 0 and math.isfinite(coefficient) and coefficient > 0):
            raise ValueError("svip needs threshold >= 0 and coefficient > 0")
        self.threshold, self.coefficient = threshold, coefficient
        self.highest = threshold**2 / coefficient

    def rule(self, context: Context) -> Stop:
        return lambda distribution, probability: entropy(distribution, probability) > self.highest
