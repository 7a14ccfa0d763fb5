"""Acceptance per drafter and depth: discounted counts, shrunk from request to population.

The probability that the token at depth i is accepted, given that all before it were, is hits / tries of that depth. A
request's counts are shrunk towards all requests', and a depth with few counts towards the depth before, so that longer
drafts are tried until they fail (Beta priors, counted in drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import mul
from typing import NamedTuple

from foretoken.core import Limits

REQUEST_KEEP = 0.98
"""Discount per round of a request's counts."""
POPULATION_KEEP = 0.998
"""Discount per round of the population's counts; it also forgets drafters that are not called, so that they are
explored again."""
PRIOR, FIRST_WEIGHT, DEPTH_WEIGHT = 0.6, 2.0, 4.0
"""Acceptance probability without data, its weight in drafts, and the weight of the previous depth in drafts."""
REQUEST_WEIGHT, COPIER_WEIGHT = 32.0, 4.0
"""Weight of the population against a request's own counts, in drafts; for a copying drafter, in tokens, because its
acceptance depends on the text: nine in ten in a repetitive list, hardly any in prose."""


@dataclass
class DraftCounts:
    """Outcome counts of drafts: per depth, drafts that reached it (``tries``) and accepted tokens (``hits``); generated
    tokens in rounds where the drafter proposed something (``covered``) or nothing (``bare``)."""

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    covered: float = 0.0
    bare: float = 0.0

    def add(self, depth: int, accepted: int) -> None:
        """Count a round with a draft of ``depth`` tokens, of which ``accepted`` were accepted; depth 0: no proposal."""
        if depth == 0:
            self.bare += accepted + 1
            return
        self.covered += accepted + 1
        reached = min(accepted + 1, depth)
        while len(self.tries) < reached:
            self.tries.append(0.0)
            self.hits.append(0.0)
        for position in range(reached):
            self.tries[position] += 1.0
            self.hits[position] += position < accepted

    def discount(self, keep: float) -> None:
        """Discount all counts."""
        self.tries = [keep * tries for tries in self.tries]
        self.hits = [keep * hits for hits in self.hits]
        self.covered, self.bare = keep * self.covered, keep * self.bare

    @classmethod
    def pooled(cls, parts: Sequence[DraftCounts]) -> DraftCounts:
        """The pooled counts of several requests."""
        tries = [sum(column) for column in zip_longest(*(part.tries for part in parts), fillvalue=0.0)]
        hits = [sum(column) for column in zip_longest(*(part.hits for part in parts), fillvalue=0.0)]
        return cls(tries, hits, sum(part.covered for part in parts), sum(part.bare for part in parts))


class _Outlook(NamedTuple):
    """Expected acceptance of a drafter: per depth the probability that a draft is accepted to that depth, the share of
    the generated tokens for which it proposes, and the weight of the evidence in drafts."""

    survival: list[float]
    share: float
    drafts: float


class AcceptanceModel:
    """Counts of all requests, by drafter, separate for greedy and sampled ones; each round discounts them by
    ``keep``."""

    def __init__(self, members: Sequence[Limits], keep: float = POPULATION_KEEP) -> None:
        self.keep = keep
        self.copies = [not member.relative_cost for member in members]
        self.population = {greedy: [DraftCounts() for _ in members] for greedy in (True, False)}

    def start_from(self, member: int, survival: Sequence[float], proposes: float, drafts: float = 16.0) -> None:
        """Start from earlier measurements, with the weight of this many drafts."""
        for counts in (self.population[greedy][member] for greedy in (True, False)):
            counts.tries = [drafts * before for before in [1.0, *survival][: len(survival)]]
            counts.hits = [drafts * after for after in survival]
            counts.covered, counts.bare = drafts * proposes * (1.0 + sum(survival)), drafts * (1.0 - proposes)

    def tick(self) -> None:
        """Discount the counts of the population after a round."""
        for counts in (*self.population[True], *self.population[False]):
            counts.discount(self.keep)

    def add(self, greedy: bool, member: int, counts: DraftCounts, depth: int, accepted: int) -> None:
        """Count a round of a request whose drafter was called for ``depth`` tokens (0: no proposal)."""
        counts.discount(REQUEST_KEEP)
        counts.add(depth, accepted)
        self.population[greedy][member].add(depth, accepted)

    def outlook(self, greedy: bool, member: int, counts: DraftCounts, depth: int, requests: int = 1) -> _Outlook:
        """Expected acceptance of drafts of up to ``depth``, for requests with these pooled ``counts``."""
        everyone, copies = self.population[greedy][member], self.copies[member]
        weight = (COPIER_WEIGHT if copies else REQUEST_WEIGHT) * requests
        probability, survival, prior = 1.0, [], PRIOR
        for position in range(depth):
            prior = shrunk(everyone, position, prior, DEPTH_WEIGHT if position else FIRST_WEIGHT)
            probability *= prior if copies else shrunk(counts, position, prior, weight)
            survival.append(probability)
        if copies:
            survival = mixed(counts, survival, weight)
        share = (everyone.covered + 1.0) / (everyone.covered + everyone.bare + 1.0)
        share = (counts.covered + weight * share) / (counts.covered + counts.bare + weight)
        return _Outlook(survival, share, everyone.tries[0] if everyone.tries else 0.0)

    def batch_outlook(self, member: int, requests: Sequence[tuple[bool, DraftCounts]], depth: int) -> _Outlook:
        """Expected acceptance in a batch of (greedy, counts): the mean over its greedy and its sampled requests."""
        outlooks, parts = list[_Outlook](), list[float]()
        for greedy in (True, False):
            if own := [counts for kind, counts in requests if kind is greedy]:
                outlooks.append(self.outlook(greedy, member, DraftCounts.pooled(own), depth, len(own)))
                parts.append(len(own) / len(requests))
        if len(outlooks) == 1:
            return outlooks[0]
        survival = [sum(map(mul, parts, column)) for column in zip(*(each.survival for each in outlooks), strict=True)]
        share = sum(map(mul, parts, (each.share for each in outlooks)))
        # The variance of a weighted mean is that of its parts times the squares of their weights.
        drafts = 1.0 / sum(part**2 / (each.drafts + 1.0) for part, each in zip(parts, outlooks, strict=True)) - 1.0
        return _Outlook(survival, share, drafts)


def mixed(counts: DraftCounts, others: Sequence[float], weight: float) -> list[float]:
    """Survival by depth of a copying drafter: a text repeats itself or not, so a request's counts at all depths are
    weighed together against others' whole drafts, with ``weight``.

    Depth by depth, one copied text among many would raise the estimate for every text: a first token accepted once in
    ten times would be followed by others' nine in ten.
    """
    drafts = counts.tries[0] if counts.tries else 0.0
    probability, prior, survival = 1.0, others[0], []
    for position, promised in enumerate(others):
        prior = shrunk(counts, position, prior, DEPTH_WEIGHT if position else 0.0)
        probability *= prior
        survival.append((drafts * probability + weight * promised) / (drafts + weight))
    return survival


def shrunk(counts: DraftCounts, position: int, prior: float, weight: float) -> float:
    """Acceptance probability at a depth, shrunk towards ``prior`` with the weight of ``weight`` tries."""
    if position >= len(counts.tries):
        return prior
    return (counts.hits[position] + weight * prior) / (counts.tries[position] + weight)
