"""The draft length with most accepted tokens per second of the batch, zero included: ``auto`` with a single drafter.

SmartSpec / TurboSpec, https://arxiv.org/abs/2406.14066.
"""

from __future__ import annotations

import math
from dataclasses import replace

from foretoken.core import Limits, check_least
from foretoken.methods.controllers.auto import AutoController


class GoodputController(AutoController):
    """One length for the whole batch; a group of drafters counts as one drafter.

    Args:
        k: longest draft; the drafter's own by default.
        memory: rounds after which the weight of a round in the acceptance statistics is 1/e.
    """

    name = "goodput"

    def __init__(self, k: int | None = None, memory: float = 100.0) -> None:
        check_least(self.name, 1, memory=memory)
        self.keep = math.exp(-1.0 / memory)
        super().__init__(k)

    def attach(self, limits: Limits) -> None:
        super().attach(replace(limits, members=()))
