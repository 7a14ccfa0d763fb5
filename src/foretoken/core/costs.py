"""Cost and expected tokens of a round, measured by ``foretoken tune`` or learned while serving.

    expected tokens E = 1 + sum over depths of the probability that the draft is accepted to that depth
    round time      T = target(nodes of the batch) + draft(member, depth) + rest

``docs/theory.md`` derives it; SmartSpec, arXiv 2406.14066, uses it for batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def speedup(tokens: float, round_s: float, plain_s: float) -> float:
    """Tokens per second over those of plain decoding.

    Args:
        tokens: tokens per round of one request, the target's own included.
        round_s: seconds of the round, or its cost in any unit.
        plain_s: the same for a plain round of as many requests, which yields one token each.
    """
    return tokens * plain_s / round_s


def continued(survival: Sequence[float], depth: int) -> list[float]:
    """The first ``depth`` entries of a survival vector; beyond the measured depths the last ratio goes on."""
    entries = [float(share) for share in survival[:depth]]
    if not entries:
        return [0.0] * depth
    before = entries[-2] if len(entries) > 1 else 1.0
    ratio = min(entries[-1] / before, 1.0) if before > 0 else 0.0
    while len(entries) < depth:
        entries.append(entries[-1] * ratio)
    return entries


@dataclass(frozen=True)
class TargetCost:
    """Median seconds of a target call by its number of nodes over the whole batch: v(n) in absolute units."""

    seconds: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) < 1 or min(self.seconds.values()) <= 0:
            raise ValueError("a target's cost needs positive seconds for node counts from 1 on")

    def of(self, nodes: int) -> float:
        """Seconds for ``nodes``: interpolated between measured counts, extrapolated along the last slope."""
        counts = sorted(self.seconds)
        index = bisect_left(counts, nodes)
        if index == 0:
            return self.seconds[counts[0]]
        if len(counts) == 1:
            return self.seconds[counts[0]] * max(1.0, nodes / counts[0])
        high = min(index, len(counts) - 1)
        left, right = counts[high - 1], counts[high]
        slope = (self.seconds[right] - self.seconds[left]) / (right - left)
        return self.seconds[left] + max(slope, 0.0) * (nodes - left)

    def relative(self, nodes: int) -> float:
        """v(n): the cost of ``nodes`` in single-node calls."""
        return self.of(nodes) / self.of(1)


@dataclass(frozen=True)
class DrafterCost:
    """Cost and acceptance of a drafter.

    Attributes:
        call_s: seconds per round, independent of the length.
        step_s: seconds per depth of the draft.
        survival: per depth (1 first) the probability that a draft is accepted to that depth, over all rounds that
            called it.
        proposes: share of the rounds in which it proposed anything.
        nodes_per_depth: draft nodes per depth (1 for a chain).
    """

    call_s: float
    step_s: float
    survival: Sequence[float] = ()
    proposes: float = 1.0
    nodes_per_depth: float = 1.0

    def seconds(self, depth: int) -> float:
        """Seconds to draft ``depth`` levels; 0 for depth 0."""
        return self.call_s + self.step_s * depth if depth > 0 else 0.0

    def expected_tokens(self, depth: int) -> float:
        """Tokens of a round with drafts of ``depth``, the target's own included."""
        return 1.0 + sum(continued(self.survival, depth))


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a target and of the drafters (by spec) measured with it; ``rest_s`` are a round's seconds outside
    drafting and the target call."""

    target: TargetCost
    drafters: Mapping[str, DrafterCost] = field(default_factory=dict)
    rest_s: float = 0.0

    def round_s(self, spec: str | None, depth: int, batch: int = 1) -> float:
        """Seconds of a round of ``batch`` requests with drafts of ``depth`` levels; ``None`` is plain."""
        if spec is None or depth == 0:
            return self.target.of(batch) + self.rest_s
        drafter = self.drafters[spec]
        nodes = batch * (1 + round(drafter.nodes_per_depth * depth * drafter.proposes))
        return self.target.of(nodes) + drafter.seconds(depth) + self.rest_s

    def speedup(self, spec: str | None, depth: int, batch: int = 1) -> float:
        """Predicted tokens per second over those of plain decoding."""
        tokens = 1.0 if spec is None or depth == 0 else self.drafters[spec].expected_tokens(depth)
        return speedup(tokens, self.round_s(spec, depth, batch), self.round_s(None, 0, batch))

    def as_dict(self) -> dict[str, Any]:
        """The form stored in a profile."""
        return {
            "target_s": {str(n): s for n, s in sorted(self.target.seconds.items())},
            "rest_s": self.rest_s,
            "drafters": {spec: {**vars(cost), "survival": list(cost.survival)} for spec, cost in self.drafters.items()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RoundCosts:
        """The inverse of :meth:`as_dict`. Raises ``ValueError`` for missing values and wrong types."""
        try:
            target = TargetCost({int(n): float(s) for n, s in stored["target_s"].items()})
            drafters = {}
            for spec, cost in stored["drafters"].items():
                numbers = {key: float(value) for key, value in cost.items() if key != "survival"}
                drafters[spec] = DrafterCost(
                    **numbers, survival=[float(probability) for probability in cost.get("survival", ())]
                )
            return cls(target, drafters, float(stored["rest_s"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these are not measured costs: {error}") from None
