"""What controllers learn while they serve: what rounds cost on this machine, and how far drafts stand.

Costs are kept relative to the speed of the machine, which drifts (other processes, clocks, longer contexts): every
observation moves one common factor, and only what is left of it moves the cost of what was observed.  Comparing
costs that were seen at different times is then fair.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.controllers.costs import RoundCosts
from foretoken.types import StepRecord

SPEED_RATE = 0.1
"""How fast the common factor follows."""
COST_RATE = 0.05
"""How fast a single cost follows once it is known well."""
WORST = 3.0
"""An observation counts at most as this many times (or this part of) what was expected: pauses are not costs."""


@dataclass
class Cost:
    """One cost in the machine's own unit, and how often it was seen."""

    value: float
    seen: float = 1.0


@dataclass
class Curve:
    """Costs at some sizes; in between they are interpolated, beyond the last one they keep its slope.

    Attributes:
        prior_slope: growth per unit of size, as a share of the first cost, where only one size was seen.
    """

    prior_slope: float
    costs: dict[int, Cost] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def put(self, size: int, cost: Cost) -> None:
        """Set the cost of a size."""
        if size not in self.costs:
            insort(self.sizes, size)
        self.costs[size] = cost

    def at(self, size: int) -> float:
        """The cost of a size; it never falls as the size grows."""
        sizes = self.sizes
        place = bisect_left(sizes, size)
        if place < len(sizes) and sizes[place] == size:
            return self.costs[size].value
        if len(sizes) == 1:
            only = self.costs[sizes[0]].value
            return only * max(0.2, 1.0 + self.prior_slope * (size - sizes[0]))
        high = min(max(place, 1), len(sizes) - 1)
        left, right = sizes[high - 1], sizes[high]
        low_cost, high_cost = self.costs[left].value, self.costs[right].value
        slope = max(0.0, (high_cost - low_cost) / (right - left))
        return max(0.2 * low_cost, low_cost + slope * (size - left))


class LearnedCosts:
    """Seconds of target calls by nodes, of drafts by member and depth, and of the rest of a round.

    Args:
        start: measured costs to start from.
        specs: the members' specs in the order of their indices, to find them in ``start``.
    """

    SKIPPED = 2
    """Rounds at the very beginning that say nothing: caches are cold."""

    def __init__(self, specs: Sequence[str], start: RoundCosts | None = None) -> None:
        self.speed = Cost(1.0, 0.0)
        self.target = Curve(prior_slope=0.01)
        self.drafts: dict[tuple[int, int], Curve] = {}
        self.rest = Cost(0.0, 0.0)
        self._left = 0 if start is not None else self.SKIPPED
        if start is not None:
            self._start_from(start, specs)

    def _start_from(self, start: RoundCosts, specs: Sequence[str]) -> None:
        for nodes, seconds in start.target.seconds.items():
            self.target.put(bucket(nodes), Cost(seconds, 8.0))
        self.rest = Cost(start.rest_s, 8.0)
        for index, spec in enumerate(specs):
            cost = start.drafters.get(spec)
            if cost is not None:
                curve = self.drafts[index, 1] = Curve(prior_slope=0.5)
                for depth in range(1, max(2, len(cost.survival)) + 1):
                    curve.put(depth, Cost(cost.seconds(depth), 8.0))

    @property
    def known(self) -> bool:
        """Whether any target call was seen."""
        return bool(self.target.sizes)

    def target_s(self, nodes: int) -> float:
        """Cost of a call with that many nodes in all."""
        return self.target.at(bucket(nodes))

    def draft_s(self, member: int, depth: int, batch: int) -> float | None:
        """Cost of drafts of a depth for a batch; ``None`` when the member never drafted."""
        if depth == 0:
            return 0.0
        curve = self.drafts.get((member, bucket(batch)))
        if curve is None:
            near = [(abs(other - batch), other) for index, other in self.drafts if index == member]
            if not near:
                return None
            curve = self.drafts[member, min(near)[1]]
        return curve.at(depth)

    def observe(self, record: StepRecord, member: int | None, depth: int, drafting: int) -> None:
        """Learn from a round in which ``drafting`` requests drafted ``depth`` levels with one member (or ``None``)."""
        if self._left > 0:
            self._left -= 1
            return
        self._learn(self.target, bucket(record.round_nodes or record.num_nodes), record.target_s, paced=True)
        if member is not None and depth > 0:
            curve = self.drafts.setdefault((member, bucket(drafting)), Curve(prior_slope=0.5))
            self._learn(curve, depth, record.draft_s, paced=False)
        rest = (record.total_s - record.target_s - record.draft_s) / self.speed.value
        self.rest.seen = min(self.rest.seen + 1, 1 / COST_RATE)
        self.rest.value += (min(rest, WORST * self.rest.value or rest) - self.rest.value) / self.rest.seen

    def _learn(self, curve: Curve, size: int, seconds: float, paced: bool) -> None:
        speed = self.speed
        known = curve.costs.get(size)
        if seconds <= 0:
            return
        if known is None:
            curve.put(size, Cost(seconds / speed.value))
            return
        ratio = min(max(seconds / (speed.value * known.value), 1 / WORST), WORST)
        if paced:
            speed.seen += 1
            speed.value *= ratio ** max(SPEED_RATE, 1.0 / (speed.seen + 1))
        known.seen = min(known.seen + 1, 1 / COST_RATE)
        known.value *= ratio ** (1.0 / known.seen)


def bucket(size: int) -> int:
    """Sizes that are told apart: each up to 16, then steps of an eighth."""
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step


@dataclass
class Hazards:
    """How far drafts stand, as the chance of each further position given that the one before it stood.

    Attributes:
        tries: per position, drafts that reached it and were long enough (older ones count less).
        hits: those that stood there.
        asked: rounds in which a draft was asked for, ``answered`` those with any guess.
    """

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    asked: float = 0.0
    answered: float = 0.0

    def fade(self, keep: float) -> None:
        """Let what was seen count less."""
        self.tries = [value * keep for value in self.tries]
        self.hits = [value * keep for value in self.hits]
        self.asked *= keep
        self.answered *= keep

    def add(self, depth: int, accepted: int) -> None:
        """A draft of ``depth`` levels of which ``accepted`` stood; depth 0 is an answer without a guess."""
        self.asked += 1
        if depth == 0:
            return
        self.answered += 1
        tried = min(depth, accepted + 1)
        while len(self.tries) < tried:
            self.tries.append(0.0)
            self.hits.append(0.0)
        for place in range(tried):
            self.tries[place] += 1
            self.hits[place] += place < accepted


def survival(depth: int, local: Hazards, general: Hazards, prior: float = 0.6, weight: float = 4.0) -> list[float]:
    """[depth] chance that a draft stands at least so far: this request's, drawn towards what is seen in general.

    Args:
        depth: positions.
        local: of this request.
        general: of all requests.
        prior: chance where nothing was seen at all.
        weight: how many tries the general picture is worth beside the local one.
    """
    stands, found = 1.0, []
    later_tries, later_hits = sum(general.tries[1:]), sum(general.hits[1:])
    mine_tries, mine_hits = sum(local.tries[1:]), sum(local.hits[1:])
    tail = (later_hits + 2 * prior) / (later_tries + 2)
    tail = (mine_hits + weight * tail) / (mine_tries + weight)
    for place in range(depth):
        base = prior if place == 0 else tail
        if place < len(general.tries):
            base = (general.hits[place] + 2 * base) / (general.tries[place] + 2)
        if place < len(local.tries):
            base = (local.hits[place] + weight * base) / (local.tries[place] + weight)
        stands *= base
        found.append(stands)
    return found
