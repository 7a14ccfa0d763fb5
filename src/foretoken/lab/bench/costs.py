"""Cost of a drafter from an arm's rounds, and the speed-up that the cost model predicts.

For the cost model in :mod:`foretoken.core.costs` (``docs/theory.md``).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.costs import DrafterCost, TargetCost, speedup


@dataclass(frozen=True)
class DraftRound:
    """Size and draft time of one round.

    Attributes:
        nodes: nodes that the target scored, roots included, summed over the batch.
        depth: depth of the deepest draft; 0 if nothing was drafted.
        draft_s: seconds in the drafter.
    """

    nodes: int
    depth: int
    draft_s: float


def drafter_cost(survival: Sequence[float], rounds: Sequence[DraftRound], batch: int = 1) -> DrafterCost:
    """Cost of a drafter from its rounds.

    ``survival`` has the shares of rounds with at least one, two, ... accepted draft tokens.  At least one round must
    have a draft.  Drafts of different lengths separate the cost of a call from that of a step.  ``batch`` requests were
    served together.
    """
    drafting = [r for r in rounds if r.depth > 0]
    call_s, step_s = _line(rounds)
    levels = sum(r.depth for r in drafting)
    per_depth = sum(max(0, r.nodes - batch) for r in drafting) / batch / levels
    return DrafterCost(call_s, step_s, list(survival), len(drafting) / len(rounds), per_depth)


def _line(rounds: Sequence[DraftRound]) -> tuple[float, float]:
    """Seconds per call and per level: least squares over the medians by depth, weighted by their counts."""
    points = [(depth, statistics.median(times), len(times)) for depth, times in _by_depth(rounds).items()]
    total = sum(weight for _, _, weight in points)
    mean_depth = sum(depth * weight for depth, _, weight in points) / total
    mean_s = sum(seconds * weight for _, seconds, weight in points) / total
    spread = sum(weight * (depth - mean_depth) ** 2 for depth, _, weight in points)
    if spread == 0:  # one depth only: call and step costs cannot be separated
        return 0.0, mean_s / mean_depth
    slope = sum(weight * (depth - mean_depth) * (seconds - mean_s) for depth, seconds, weight in points) / spread
    slope = min(max(slope, 0.0), mean_s / mean_depth)  # neither cost may be negative
    return mean_s - slope * mean_depth, slope


def draft_seconds(rounds: Sequence[DraftRound]) -> dict[int, float]:
    """Mean seconds of drafting, by depth."""
    return {depth: statistics.fmean(times) for depth, times in sorted(_by_depth(rounds).items())}


def _by_depth(rounds: Sequence[DraftRound]) -> dict[int, list[float]]:
    times: dict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        times[round_.depth].append(round_.draft_s)
    return times


def predicted_speedup(
    target: TargetCost, rest_s: float, draft_s: dict[int, float], rounds: Sequence[DraftRound], tokens: int, batch: int
) -> float:
    """Tokens per second over plain decoding's, by the cost model.

    Every round costs v(its nodes), drafting at its depth, and the rest.  A plain round gives every request one token.

    Args:
        rest_s: measured rest of a plain round.
        draft_s: measured seconds by depth of the draft.
        tokens: tokens from the rounds, summed over the batch.
    """
    spent = sum(target.of(r.nodes) + draft_s[r.depth] + rest_s for r in rounds)
    return speedup(tokens / batch, spent, target.of(batch) + rest_s) if spent > 0 else 0.0
