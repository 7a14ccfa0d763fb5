"""Stop rule on a lower bound of the acceptance rate by the draft distribution's entropy.

AdaEDL, Agrawal et al. 2024 (arXiv 2410.18351).
"""

from __future__ import annotations

import math

from foretoken.core import Context
from foretoken.methods.controllers.stopping import MovingThresholdController, Stop, entropy


class AdaedlController(MovingThresholdController):
    """Ends a draft after a token whose acceptance estimate ``1 - sqrt(gamma * H)`` is below the threshold.

    Args:
        gamma: weight of the entropy H (nats) in the estimate.
        threshold: first bar (lambda) of a request.
    """

    name = "adaedl"

    def __init__(
        self, gamma: float = 0.2, threshold: float = 0.4, k: int | None = None, aim: float = 0.9, step: float = 0.01
    ) -> None:
        if not (math.isfinite(gamma) and gamma >= 0):
            raise ValueError(f"adaedl needs gamma >= 0, not {gamma}")
        super().__init__((threshold, threshold), k, aim, step)
        self.gamma = gamma

    def rule(self, context: Context) -> Stop:
        bar = self.bar(context).value
        return lambda distribution, probability: (
            1.0 - math.sqrt(self.gamma * max(entropy(distribution, probability), 0.0)) < bar
        )
