"""What rounds come to: per request, or over an interval of an engine's log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.report.show.run import Shown

HEADS = ("", "rounds", "drafted", "accepted", "rate", "tokens a round", "tokens/s", "accepted by position")


@dataclass(frozen=True)
class Total:
    """Rounds together; ``None`` is not told.

    Attributes:
        name: of the request, or of the interval.
        rounds: how many.
        drafted, accepted: draft tokens.
        tokens_per_round: accepted ones and the target's own.
        acceptance_rate: accepted over drafted.
        tokens_per_s: speed.
        per_position: share of the rounds in which at least the first, second, ... draft token was accepted.
    """

    name: str
    rounds: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    tokens_per_round: float | None = None
    acceptance_rate: float | None = None
    tokens_per_s: float | None = None
    per_position: Sequence[float] = ()

    @property
    def cells(self) -> list[str]:
        """The cells of a table with :data:`HEADS`; what follows from other figures is worked out."""
        rate, length = self.acceptance_rate, self.tokens_per_round
        if rate is None and self.drafted and self.accepted is not None:
            rate = self.accepted / self.drafted
        if length is None and self.rounds and self.accepted is not None:
            length = 1.0 + self.accepted / self.rounds
        counts = [_as(value, ".0f") for value in (self.rounds, self.drafted, self.accepted)]
        positions = " ".join(f"{share:.2f}" for share in self.per_position)
        return [self.name, *counts, _as(rate, ".0%"), _as(length, ".2f"), _as(self.tokens_per_s, ".1f"), positions]


def _as(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def total_of(name: str, run: Shown) -> Total:
    """The total of a request whose rounds are known."""
    accepted = [len(one.trace.accepted) for one in run.rounds]
    count, deepest = len(accepted), max(accepted, default=0)
    shares = [sum(length > depth for length in accepted) / count for depth in range(deepest)]
    seconds = sum(one.trace.draft_s + one.trace.target_s for one in run.rounds)
    timed = all(one.trace.target_s for one in run.rounds)
    tokens = sum(accepted) + count
    return Total(
        name,
        count,
        sum(one.drafted for one in run.rounds),
        sum(accepted),
        tokens_per_s=tokens / seconds if timed and seconds > 0 else None,
        per_position=tuple(shares),
    )
