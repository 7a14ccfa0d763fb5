"""Stop rule on the probability of the drawn token, which stays in the draft.

Transformers' assisted generation (first threshold 0.4, moved by what was accepted); DISCO, arXiv 2405.04304.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from foretoken.core import Context, Limits, StepRecord
from foretoken.methods.controllers.stopping import Stop, StoppingController, levels


class ConfidenceController(StoppingController):
    """A probability threshold on the draft's own tokens, which follows what is accepted.

    After every round the threshold becomes the one with the smallest false-positive rate plus three times the
    false-negative rate over the drafted tokens that were verified: rejected tokens that reach it, accepted ones below.

    Args:
        threshold: drafting ends after a token with a lower draft probability; with ``adapt``, the initial threshold.
        k: longest draft; the drafter's own by default.
        adapt: whether the threshold moves; all requests share it, and only chains update it.
    """

    name = "confidence"

    def __init__(self, threshold: float = 0.4, k: int | None = None, adapt: bool = True) -> None:
        super().__init__(k)
        if not 0 <= threshold <= 1:
            raise ValueError(f"confidence needs a threshold in [0, 1], not {threshold}")
        self.threshold = self._first = threshold
        self.adapt = adapt
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=1000)  # Transformers stores all

    def attach(self, limits: Limits) -> None:
        """Start over, because probabilities of another drafter have another threshold."""
        super().attach(limits)
        self.threshold = self._first
        self._outcomes.clear()

    def rule(self, context: Context) -> Stop:
        threshold = self.threshold
        drafted: list[float] = []
        context.state[self] = drafted

        def stop(distribution: Tensor | None, probability: float) -> bool:
            drafted.append(probability)
            return probability < threshold

        return stop

    def observe(self, context: Context, record: StepRecord) -> None:
        """Learn from a verified chain: its accepted tokens, and the first rejected one."""
        drafted: list[float] = context.state.get(self, [])
        if not self.adapt or not drafted or not len(drafted) == levels(record) == record.num_draft_tokens:
            return
        accepted = record.num_accepted_tokens
        self._outcomes.extend((probability, i < accepted) for i, probability in enumerate(drafted[: accepted + 1]))
        if len(self._outcomes) > 5 and len({is_accepted for _, is_accepted in self._outcomes}) == 2:
            self.threshold = best_threshold(self._outcomes)


def best_threshold(outcomes: Iterable[tuple[float, bool]]) -> float:
    """The threshold with the smallest false-positive rate + 3 false-negative rate; the largest one of equals.

    Args:
        outcomes: probabilities of draft tokens, and whether they were accepted; must contain both outcomes.
    """
    pairs = list(outcomes)
    accepts = np.array([accepted for _, accepted in pairs])
    thresholds, at = np.unique([probability for probability, _ in pairs], return_inverse=True)
    # Per threshold, the largest first, the accepted and the rejected tokens that reach it.
    accepted = np.bincount(at[accepts], minlength=len(thresholds))[::-1].cumsum()
    rejected = np.bincount(at[~accepts], minlength=len(thresholds))[::-1].cumsum()
    false_positive, false_negative = rejected / rejected[-1], (accepted[-1] - accepted) / accepted[-1]
    return float(thresholds[::-1][int(np.argmin(false_positive + 3.0 * false_negative))])
