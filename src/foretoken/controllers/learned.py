"""What controllers learn while they serve of what rounds cost on this machine.

Costs are kept relative to the speed of the machine, which drifts (other processes, clocks, longer contexts): every
observation moves one common factor, and only what is left of it moves the cost of what was observed.  Comparing
costs that were seen at different times is then fair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from foretoken.controllers.costs import RoundCosts
from foretoken.types import StepRecord

K = TypeVar("K")
V = TypeVar("V")

EVEN, EVEN_RATE, EVENEST = 0.97, 0.05, 0.85
"""What plain calls are taken to cost for texts of one length, as a part of what they cost for others; how fast that is
learned, and the least that it can be."""
SPEED_RATE = 0.25
"""How fast the common factor follows."""
OVER_RATE = 0.05
"""How fast it is learned what rounds take over what their parts cost."""
DEARER = 0.4
"""How much of what a round took over what was expected speed and costs learn, beside what one took less: interrupted
rounds are dearer than usual ones, none is cheaper, so that what most rounds take is told better by the shorter ones."""
CHANGED, CHANGE_RATE = 8, 0.5
"""So many surprises in a row, off in one direction, are another speed (bursts of other processes are shorter), and how
fast the common factor then follows."""
PRIOR_WEIGHT = 2.0
"""How many sightings the slope that is expected of a curve is worth."""
LINE_WEIGHT = 2.0
"""How many sightings of a size the line through all sizes is worth: costs jump where kernels change."""
AGED = 128.0
"""Sightings of other sizes after which those of a size count 1/e."""
ENOUGH = 2
"""Target calls for so many requests, of whatever size, from which on they are no longer taken to cost as others do."""
SURPRISE = 0.2
"""Rounds off by more than this (natural logarithm) are taken for pauses, which teach little unless they last."""
COLD = 0.1
"""How many sightings the first one of a size is worth: memory and kernels are made for it."""
SURE = 4
"""Sightings from which on a cost is no longer taken to be what is wrong."""
OLD = 6.0
"""Sightings that all before a trial are worth in it."""
COST_RATE = 0.05
"""How fast a single cost follows once it is known well."""
REST_FIXED = 2.0
"""As how many requests what does not depend on their number counts in the rest of a round, where no batch of a size was
seen: of the built-in target 3.5 parts for one request, 6.5 for four, 10.5 for eight."""
READING = 0.03
"""What a model takes to read one token more, as a part of a draft of one token, until it was seen."""
WORST = 3.0
USUAL = 1.5
"""An observation counts at most as this many times (or this part of) what was expected: pauses are not costs.  The
second number is for costs that were seen more than once."""


@dataclass
class Cost:
    """One cost in the machine's own unit, and what is known of it.

    Attributes:
        seen: sightings that it is worth, or was when it was last seen.
        times: sightings there were.
        last: when, in sightings of its curve.
    """

    value: float
    seen: float = 1.0
    times: int = 1
    last: float = 0.0


@dataclass
class Curve:
    """Costs by size: a line through all that was seen, and at each size what was seen of it there.

    Attributes:
        growing: share of the cost of size 1 that is taken to grow with the size as long as little was seen.
        costs: what was seen, by size.
        sightings: how often anything was.
        is_warm: whether anything of it was seen more than once.
    """

    growing: float
    costs: dict[int, Cost] = field(default_factory=dict)
    sightings: float = 0.0
    is_warm: bool = False
    _line: tuple[float, float] | None = None
    _found: dict[int, float] = field(default_factory=dict)

    def put(self, size: int, cost: Cost) -> None:
        """Set the cost of a size."""
        self.costs[size] = cost
        self.sightings += cost.seen
        cost.last, cost.times = self.sightings, max(cost.times, int(cost.seen))
        self.is_warm = self.is_warm or cost.seen >= 1
        self._line = None

    def move(self, size: int, ratio: float) -> None:
        """A size was seen again, at ``ratio`` times what was known."""
        known = self.costs[size]
        known.seen = min(self.weight(known) + 1, 1 / COST_RATE)
        known.times += 1
        self.sightings += 1
        known.last = self.sightings
        self.is_warm = True
        # What is cold, or interrupted, is dearer than what is usual, never cheaper.
        part = min(2.0 / (known.seen + 1.0), 1.0) * (DEARER if ratio > 1 else 1.0)
        known.value *= ratio if ratio < 1 and known.times <= SURE else ratio**part
        self._line = None

    def warm(self, size: int) -> Cost | None:
        """What was seen of a size, if more than its first time."""
        known = self.costs.get(size)
        return known if known is not None and known.seen >= 1 else None

    def at(self, size: int) -> float:
        """The cost of a size, seen or not."""
        if self._line is None:
            self._line = self._fit()
            self._found.clear()
        found = self._found.get(size)
        if found is None:
            found = self._found[size] = self._at(self._line, size)
        return found

    def _at(self, line: tuple[float, float], size: int) -> float:
        base, slope = line
        fitted = base + slope * size
        known = self.costs.get(size)
        if known is None:
            return fitted
        seen = self.weight(known)
        if known.value < fitted:  # however long ago: nothing takes less than it costs
            fitted += (known.value - fitted) * known.seen / (known.seen + LINE_WEIGHT)
        elif seen >= SURE:  # else it was long ago: a price that is too high keeps everybody away
            fitted += (known.value - fitted) * seen / (seen + LINE_WEIGHT)
        return fitted

    def weight(self, cost: Cost) -> float:
        """How many sightings a cost is worth now."""
        return cost.seen * math.exp((cost.last - self.sightings) / AGED)

    def _fit(self) -> tuple[float, float]:
        """Least squares, the slope drawn towards ``growing``; never falling, and never below what is constant."""
        weight = size = value = spread = shared = 0.0
        for x, cost in self.costs.items():
            seen = self.weight(cost)
            part = seen * x
            weight, size, value = weight + seen, size + part, value + seen * cost.value
            spread, shared = spread + part * x, shared + part * cost.value
        size, value = size / weight, value / weight
        spread, shared = spread - weight * size * size, shared - weight * size * value
        prior = PRIOR_WEIGHT * size * size
        usual = value * self.growing / (1.0 + self.growing * (size - 1.0))
        slope = (shared + prior * usual) / (spread + prior)
        slope = min(max(slope, 0.0), value / size)
        return value - slope * size, slope


class LearnedCosts:
    """Seconds of target calls by nodes, of drafts by member and depth, and of the rest of a round.

    Args:
        start: measured costs to start from.
        specs: the members' specs in the order of their indices, to find them in ``start``.
        free: members that run no model: their drafts are taken to cost the same, whatever their length.
    """

    SKIPPED = 2
    """Rounds at the very beginning that say nothing: caches are cold."""

    def __init__(self, specs: Sequence[str], start: RoundCosts | None = None, free: Collection[int] = ()) -> None:
        self.speed = Cost(1.0, 0.0)
        self.over = 1.0  # what rounds take over what their parts cost, on average: some are interrupted
        self.target = self._call_curve()
        self.calls: dict[int, Curve] = {}  # of the target, by requests
        self.even = EVEN  # what a plain call takes for texts of one length, as a part of what it takes for others
        self.drafts: dict[tuple[int, int], Curve] = {}
        self.rest: dict[int, Curve] = {}
        self.reading: dict[int, Cost] = {}  # seconds for each token that others wrote, by member
        self._free = free
        self._left = 0 if start is not None else self.SKIPPED
        self._kind: tuple[int | None, bool, bool] | None = None
        self._sizes = (0, 0)
        self._off, self._surprises = 0.0, 0
        if start is not None:
            self._start_from(start, specs)

    def _start_from(self, start: RoundCosts, specs: Sequence[str]) -> None:
        for nodes, seconds in start.target.seconds.items():
            self.target.put(bucket(nodes), Cost(seconds, 8.0))
        self.rest[1] = Curve(growing=0.04)
        self.rest[1].put(1, Cost(start.rest_s, 8.0))
        for index, spec in enumerate(specs):
            cost = start.drafters.get(spec)
            if cost is not None:
                curve = self.drafts[index, 1] = self._draft_curve(index)
                for depth in range(1, max(2, len(cost.survival)) + 1):
                    curve.put(depth, Cost(cost.seconds(depth), 8.0))

    def _call_curve(self) -> Curve:
        return Curve(growing=0.015)

    def _draft_curve(self, member: int) -> Curve:
        return Curve(growing=0.0 if member in self._free else 0.7)

    @property
    def known(self) -> bool:
        """Whether any target call was seen."""
        return bool(self.target.costs)

    def knows(self, record: StepRecord) -> bool:
        """Whether calls with so many nodes were seen before, so that kernels for them are there."""
        return self.target.warm(nodes_of(record)) is not None

    def target_s(self, nodes: int, batch: int = 0, even: bool = False) -> float:
        """Cost of a call with that many nodes in all, for that many requests: each has a text of its own to read.
        Plain decoding is cheaper where texts are ``even``, all of one length: keys and values are written at once."""
        own = self.calls.get(bucket(batch))
        curve = own if own is not None and own.sightings >= ENOUGH else self.target
        return curve.at(bucket(nodes)) * (self.even if even else 1.0)

    def rest_s(self, batch: int, nodes: int) -> float:
        """Cost of all that is neither drafting nor the target's call: it grows with requests and with their nodes."""
        if not self.rest:
            return 0.0
        size = bucket(batch)
        if size in self.rest:
            return self.rest[size].at(bucket(nodes))
        near = min(self.rest, key=lambda other: abs(other - batch))
        scale = (batch + REST_FIXED) / (near + REST_FIXED)
        return self.rest[near].at(bucket(round(nodes * near / batch))) * scale

    def draft_s(self, member: int, depth: int, batch: int) -> float | None:
        """Cost of drafts of a depth for a batch; ``None`` when the member never drafted.

        For batches of a size that was not seen, or once, they are taken to cost as much more or less than for others
        as plain calls of the target do.
        """
        if depth == 0:
            return 0.0
        curve = self.drafts.get((member, bucket(batch)))
        if curve is not None and curve.is_warm:
            return curve.at(depth)
        others = [
            (not other.is_warm, abs(size - batch), size) for (i, size), other in self.drafts.items() if i == member
        ]
        if not others:
            return None
        near = min(others)[-1]
        scale = 1.0
        if self.known:
            scale = self.target_s(batch, batch) / self.target_s(near, near)
        return self.drafts[member, near].at(depth) * scale

    def observe(
        self,
        record: StepRecord,
        member: int | None,
        depth: int,
        drafting: int,
        planning_s: float = 0.0,
        even: bool = False,
        tried: bool = False,
    ) -> None:
        """Learn from a round in which ``drafting`` requests drafted ``depth`` levels with one member (or ``None``).

        ``planning_s`` of its drafting were planning: plans are not made in every round, and are no part of a price.
        ``even`` is as for :meth:`target_s`; a round of what is ``tried`` says nothing of the machine's speed.
        """
        if self._left > 0:
            self._left -= 1
            return
        rest_s = record.total_s - record.target_s - record.draft_s
        draft_s = record.draft_s - planning_s
        nodes = nodes_of(record)
        size = bucket(record.batch_size)
        own = found_in(self.calls, size, self._call_curve)
        known, other = (own, self.target) if own.warm(nodes) else (self.target, own)
        target_s = record.target_s / (self.even if even else 1.0)
        seen = [(known, nodes, target_s)]
        if rest_s > 0:
            seen.append((found_in(self.rest, size, partial(Curve, growing=0.04)), nodes, rest_s))
        if member is not None and depth > 0 and draft_s > 0:
            curve = found_in(self.drafts, (member, bucket(drafting)), partial(self._draft_curve, member))
            seen.append((curve, depth, draft_s))
        kind = (member, record.round_nodes > record.batch_size, even)
        alike = kind == self._kind and not tried
        trust = self._pace(seen, alike)
        # Of what is left in a second round with as many nodes half belongs to the speed, too: what is in use would else
        # follow the machine, and what is not would look dearer or cheaper by as much.
        left = self._off_by(seen) ** 0.5 if alike and (depth, nodes) == self._sizes else 1.0
        self._kind, self._sizes = kind, (depth, nodes)
        usual = known.warm(nodes)
        if not alike and even and usual is not None and target_s > 0:
            off = min(max(target_s / (self.speed.value * usual.value), 1 / USUAL), USUAL)
            self.even = min(max(self.even * off**EVEN_RATE, EVENEST), 1.0)
        for curve, size, seconds in [*seen, (other, nodes, target_s)]:
            if seconds > 0:
                self._learn(curve, size, seconds / left, trust, tried)

    def observe_reading(
        self, record: StepRecord, member: int, depth: int, drafting: int, tokens: int, planning_s: float = 0.0
    ) -> None:
        """Learn from a round in which a model had to read ``tokens`` that others had written, and then drafted."""
        usual = self.draft_s(member, depth, drafting)
        if usual is None:
            return
        known = self.reading.setdefault(member, Cost(self.reading_s(member, 1), PRIOR_WEIGHT))
        found = (record.draft_s - planning_s) / self.speed.value - usual
        known.seen = min(known.seen + 1, 1 / COST_RATE)
        known.value += (min(max(found / tokens, 0.0), WORST * known.value) - known.value) / known.seen

    def reading_s(self, member: int, tokens: int) -> float:
        """What it takes a model to read tokens that others have written, beside its usual draft."""
        known = self.reading.get(member)
        return tokens * (READING * (self.draft_s(member, 1, 1) or 0.0) if known is None else known.value)

    def _pace(self, seen: Sequence[tuple[Curve, int, float]], alike: bool) -> float | None:
        """Follow the machine's speed; how far the round can be trusted to say anything else (1: as expected).

        Of two rounds ``alike`` the second one tells of the machine; one of another kind than the last tells of what it
        costs itself, and the more so the less it was expected (``None``).
        """
        off = math.log(self._off_by(seen))
        if off == 0.0:
            return 1.0
        surprise = abs(off) / SURPRISE
        if not alike:
            return None if surprise > 1 else 1.0
        self.speed.seen += 1
        self._surprises = 0 if surprise <= 1 else 1 + (self._surprises if off * self._off > 0 else 0)
        self._off = off
        taken = min(max(math.exp(off), 1 / USUAL), USUAL)
        self.over += (taken - self.over) * max(OVER_RATE, 1.0 / (self.speed.seen + 1))
        # A surprise is a pause, of which speed and costs learn little, and alike; several are another speed.
        again = self._surprises >= CHANGED
        trust = 0.0 if again else trusted(off)
        off = min(max(off, -math.log(WORST)), math.log(WORST)) * (DEARER if off > 0 and not again else 1.0)
        rate = CHANGE_RATE if again else trust * max(SPEED_RATE, 1.0 / (self.speed.seen + 1))
        self.speed.value *= math.exp(off * rate)
        return trust

    def _off_by(self, seen: Sequence[tuple[Curve, int, float]]) -> float:
        """What the parts that are known took, over what was expected."""
        known = [(s, cost.value) for curve, size, s in seen if (cost := curve.warm(size)) and cost.times > SURE]
        expected = self.speed.value * sum(value for _, value in known)
        taken = sum(seconds for seconds, _ in known)
        return taken / expected if expected > 0 and taken > 0 else 1.0

    def _learn(self, curve: Curve, size: int, seconds: float, trust: float | None, tried: bool) -> None:
        known = curve.costs.get(size)
        if known is None or known.value <= 0:
            curve.put(size, Cost(seconds / self.speed.value, COLD))
            return
        if trust is None:
            known.seen = min(known.seen, SURE)
        worst = WORST if known.seen < 2 else USUAL
        ratio = seconds / (self.speed.value * known.value)
        if trust is not None and known.seen > SURE and ratio > 0:
            # Of a pause speed and costs must learn alike, or costs drift; a part may be off by more than the whole.
            ratio **= min(trust, trusted(math.log(ratio) / 2))
        if tried:  # what was not in use for long may have changed: the last trial counts as much as all before it
            known.seen = min(known.seen, OLD)
        if tried and ratio < math.exp(-SURPRISE):
            # Nothing takes less than it costs: what was believed is old, or was seen while caches were cold.
            known.seen = min(known.seen, 1.0)
        elif known.seen >= SURE:
            ratio = max(ratio, 1 / worst)
        curve.move(size, min(ratio, worst))


def trusted(off: float) -> float:
    """How far a round can be trusted that was off by so much (natural logarithm)."""
    return 1.0 / (1.0 + (off / SURPRISE) ** 2)


def found_in(table: dict[K, V], key: K, made: Callable[[], V]) -> V:
    """What a table has under a key, made and put there if it has nothing (``setdefault`` would make it every time)."""
    found = table.get(key)
    if found is None:
        found = table[key] = made()
    return found


def nodes_of(record: StepRecord) -> int:
    """Nodes of a round, as they are told apart."""
    return bucket(record.round_nodes or record.num_nodes)


@cache
def bucket(size: int) -> int:
    """Sizes that are told apart: each up to 16, then steps of an eighth."""
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step
