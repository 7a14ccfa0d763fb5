"""A bandit over draft lengths and the members of a group.

UCBSpec of BanditSpec, Hou et al. 2025 (arXiv 2505.15141).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core import Budget, Context, Limits, StepRecord
from foretoken.core.costs import RoundCosts
from foretoken.methods.controllers.base import Controller


@dataclass
class BudgetArm:
    """One arm: a budget (depth 0: plain decoding), the rounds that allowed drafts of its depth, their tokens, and their
    cost in seconds or target steps."""

    budget: Budget
    rounds: int = 0
    tokens: int = 0
    cost: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per cost over all these rounds, which is the real rate; a mean of rates is not."""
        return self.tokens / self.cost if self.cost else 0.0


@dataclass
class Table:
    """The arms, plain decoding first, and the index of the current round's arm."""

    arms: list[BudgetArm] = field(default_factory=list)
    playing: int = 0

    def scores(self, explore: float, delta: float) -> list[float]:
        """Upper confidence bounds, in tokens per plain round's cost; infinite for an arm without rounds."""
        plain, count = self.arms[0].rate or 1.0, len(self.arms)
        longest, time = max(arm.budget.max_depth for arm in self.arms), 1 + sum(arm.rounds for arm in self.arms)

        def score(arm: BudgetArm) -> float:
            return arm.rate / plain + explore * bonus(arm.rounds, time, count, longest, delta)

        return [score(arm) if arm.rounds else math.inf for arm in self.arms]


def bonus(rounds: int, time: int, arms: int, longest: int, delta: float) -> float:
    """UCBSpec's confidence term in round ``time`` for an arm with ``rounds`` rounds."""
    doubt = 1.0 + 2.0 * math.log(arms * time**2 * math.sqrt(1.0 + rounds) / delta)
    return longest / 2.0 * math.sqrt((1.0 + rounds) / rounds**2 * doubt)


class BanditController(Controller):
    """Plays in every round the arm with the highest upper confidence bound on its speed.

    The arms are plain decoding and every length of every member of the drafter (or of a single drafter). An arm's
    reward is tokens per time, relative to plain decoding.

    Args:
        lengths: draft lengths, ``"1|2|4|8"``, beside plain decoding; by default powers of two and the drafter's own.
        explore: factor on the confidence term. The paper's proof needs 1, which explores bad arms for thousands of
            rounds.
        delta: probability that a bound fails.
        c: cost of a draft level in target steps, one number or one per member, ``"0.1|0"``; by default from a profile
            or measured times.
        share: learn from all requests; otherwise from each alone.
    """

    name = "bandit"
    uses_costs = True

    def __init__(
        self, lengths: str = "", explore: float = 0.1, delta: float = 0.05, c: str = "", share: bool = True
    ) -> None:
        if not (math.isfinite(explore) and explore >= 0 and 0 < delta < 1):
            raise ValueError("bandit needs explore >= 0 and 0 < delta < 1")
        self.lengths, self.costs = parse_lengths(lengths), parse_costs(c)
        self.explore, self.delta, self.share = explore, delta, share
        self._tables: dict[int, Table] = {}
        self._measured: RoundCosts | None = None
        self._make_arms(Limits("", 5, 64))

    @property
    def drafts(self) -> bool:
        """False if the only length is 0."""
        return len(self.arms) > 1

    def attach(self, limits: Limits) -> None:
        count = len(limits.members or (limits,))
        if len(self.costs) > 1 and len(self.costs) != count:
            raise ValueError(f"bandit has {len(self.costs)} costs for {count} drafters: give one per drafter")
        self._make_arms(limits)

    def _make_arms(self, limits: Limits) -> None:
        members = limits.members or (limits,)
        self._specs = [member.name for member in members]
        self.arms = [Budget(0, 0)]
        for index, member in enumerate(members):
            name = index if limits.members else None
            self.arms += [Budget(length, member.max_nodes, member=name) for length in self._lengths_of(member)]
        self._tables.clear()

    def start_from(self, costs: RoundCosts) -> None:
        """Use these costs instead of measured times, if they cover every drafter."""
        self._measured = costs

    def _lengths_of(self, limits: Limits) -> list[int]:
        """The drafter's possible draft lengths above 0, shortest first."""
        powers = [2**i for i in range(limits.max_depth.bit_length())]
        lengths = [*powers, limits.max_depth] if self.lengths is None else self.lengths
        return sorted({min(length, limits.max_depth) for length in lengths if length})

    def _table(self, context: Context, batch_size: int) -> Table:
        """The table for about this batch size (within a factor of two), because costs, and so the best arm, depend on
        it."""
        tables: dict[int, Table] = self._tables if self.share else context.state.setdefault(self, {})
        size = batch_size.bit_length()
        if size not in tables:
            tables[size] = Table([BudgetArm(budget) for budget in self.arms])
        return tables[size]

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The best arm's budget, without arms that the request would cut short."""
        return self._play(context, batch_size, self._allowed(context))

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """Nothing is learned within a round, so requests that share a table get the same arm, which suits the one that
        may draft most."""
        allowed = [self._allowed(context) for context in contexts]
        if self.share:
            allowed = [max(allowed)] * len(contexts)
        return [self._play(context, len(contexts), most) for context, most in zip(contexts, allowed, strict=True)]

    def _allowed(self, context: Context) -> int:
        """Most levels of a draft that the request's last round and its remaining room allow."""
        allowed: int = context.state.get((self, "allowed"), max(arm.max_depth for arm in self.arms))
        room = context.max_length - len(context.tokens) - 1  # one token of every round is the target's
        return max(min(allowed, room), 0) if context.max_length else allowed

    def _play(self, context: Context, batch_size: int, allowed: int) -> Budget:
        table = context.state[self, "table"] = self._table(context, batch_size)
        scores = table.scores(self.explore, self.delta)
        # An arm that is always cut short would stay without rounds, and so be played for ever.
        possible = [index for index, arm in enumerate(table.arms) if arm.budget.max_depth <= allowed]
        table.playing = max(possible, key=scores.__getitem__)
        return table.arms[table.playing].budget

    def observe(self, context: Context, record: StepRecord) -> None:
        # Use the table that the arm came from: a round may hold more requests than budgets (one with its own tree), and
        # an arm of another batch size would get this one's cost.
        table: Table | None = context.state.get((self, "table"))
        table = table or self._table(context, record.batch_size)
        context.state[self, "allowed"] = record.allowed
        arm = table.arms[table.playing]
        if record.allowed < arm.budget.max_depth:  # the arm was not played: the request's limit or end cut it short
            return
        arm.rounds += 1
        arm.tokens += 1 + record.num_accepted_tokens
        arm.cost += self._cost(arm.budget, record)

    def _cost(self, budget: Budget, record: StepRecord) -> float:
        """The request's cost of the round: target steps with ``c``, else its share of the round's seconds."""
        index, depth = budget.member or 0, min(record.depth, budget.max_depth)
        if self.costs:
            return 1.0 + self.costs[index if len(self.costs) > 1 else 0] * depth
        if self._measured is not None and all(spec in self._measured.drafters for spec in self._specs):
            return self._measured.round_s(self._specs[index], depth, record.batch_size) / record.batch_size
        return record.total_s / record.batch_size


def parse_lengths(text: str) -> tuple[int, ...] | None:
    """``"1|2|4"`` -> ``(1, 2, 4)``; ``None`` for an empty string.

    Raises:
        ValueError: not integers from 0 on, joined by ``|``.
    """
    parts = text.split("|") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"bandit needs lengths of 0 or more joined by |, for example 1|2|4, not {text!r}")
    return tuple(map(int, parts)) or None


def parse_costs(text: str) -> tuple[float, ...]:
    """``"0.1|0"`` -> ``(0.1, 0.0)``.  Raises ``ValueError`` for all but numbers of at least 0, joined by ``|``."""
    try:
        costs = tuple(map(float, text.split("|"))) if text else ()
    except ValueError:
        costs = (math.nan,)
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"bandit needs costs c of 0 or more, one or one per drafter joined by |, not {text!r}")
    return costs
