"""What an arm's rounds say of its drafter: what it costs and promises, and the speed-up that follows.

Made for the cost model in :mod:`foretoken.core.costs`; section 8 of the specification.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.costs import DrafterCost, TargetCost, speedup


@dataclass(frozen=True)
class DraftRound:
    """What one round drafted and what that took.

    Attributes:
        nodes: nodes that the target scored, roots included, summed over the batch.
        depth: levels of the deepest draft; 0 when nothing was guessed.
        draft_s: seconds in the drafter.
    """

    nodes: int
    depth: int
    draft_s: float


def drafter_cost(survival: Sequence[float], rounds: Sequence[DraftRound], batch: int = 1) -> DrafterCost:
    """What a drafter costs, by ``survival``: how often a draft stands at least one, two, ... tokens far.

    Something was drafted in at least one of the rounds.  Where drafts differ in length this tells the cost of a call
    from that of a step.  ``batch`` requests were served together.
    """
    drafting = [r for r in rounds if r.depth > 0]
    call_s, step_s = _line(rounds)
    levels = sum(r.depth for r in drafting)
    per_depth = sum(max(0, r.nodes - batch) for r in drafting) / batch / levels
    return DrafterCost(call_s, step_s, list(survival), len(drafting) / len(rounds), per_depth)


def _line(rounds: Sequence[DraftRound]) -> tuple[float, float]:
    """Seconds per call and per level: least squares over the depths' medians, weighted by how often they occurred."""
    points = [(depth, statistics.median(times), len(times)) for depth, times in _by_depth(rounds).items()]
    total = sum(weight for _, _, weight in points)
    mean_depth = sum(depth * weight for depth, _, weight in points) / total
    mean_s = sum(seconds * weight for _, seconds, weight in points) / total
    spread = sum(weight * (depth - mean_depth) ** 2 for depth, _, weight in points)
    if spread == 0:  # one length only: a call cannot be told from its steps
        return 0.0, mean_s / mean_depth
    slope = sum(weight * (depth - mean_depth) * (seconds - mean_s) for depth, seconds, weight in points) / spread
    slope = min(max(slope, 0.0), mean_s / mean_depth)  # neither a call nor a step costs less than nothing
    return mean_s - slope * mean_depth, slope


def draft_seconds(rounds: Sequence[DraftRound]) -> dict[int, float]:
    """Depth -> mean seconds of drafting that deep."""
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

    Every round costs v(its nodes), drafting its depth, and the rest; a plain round gives every request one token.

    Args:
        rest_s: measured rest of a plain round.
        draft_s: measured seconds by depth of the draft.
        tokens: tokens that they gave, summed over the batch.
    """
    spent = sum(target.of(r.nodes) + draft_s[r.depth] + rest_s for r in rounds)
    return speedup(tokens / batch, spent, target.of(batch) + rest_s) if spent > 0 else 0.0
