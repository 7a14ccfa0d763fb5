"""How many draft tokens are accepted, per drafter and depth: discounted counts, shrunk from request to population.

The chance that the token at depth i is accepted, given that those before it were, is hits / tries of that depth.  A
request's own counts are shrunk towards those of all requests, and a depth of which little is known towards the depth
before it, so that longer drafts are tried until they disappoint (Beta priors, counted in drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from foretoken.core import Limits

REQUEST_KEEP = 0.98
"""What a round is worth one round later, within its request."""
POPULATION_KEEP = 0.998
"""The same for all requests together: also what was not asked is forgotten, and so explored again."""
PRIOR, FIRST_WEIGHT, DEPTH_WEIGHT = 0.6, 2.0, 4.0
"""Chance where nothing is known and the drafts that it is worth; drafts that the depth before one is worth."""
REQUEST_WEIGHT, COPIER_WEIGHT = 32.0, 4.0
"""Drafts, and tokens of the text, that the population is worth beside a request's own; of a drafter that copies, whose
luck is that of the text: a list that repeats itself is copied nine times in ten, prose hardly ever."""


@dataclass
class DraftCounts:
    """What became of drafts: per depth those that were to go there and did (``tries``), and those whose token there
    was accepted (``hits``); tokens of the text where the drafter had a guess (``covered``) or none (``bare``)."""

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    covered: float = 0.0
    bare: float = 0.0

    def add(self, depth: int, accepted: int) -> None:
        """A round that was asked for ``depth`` tokens and wrote ``accepted`` + 1; depth 0: there was no guess."""
        if depth == 0:
            self.bare += accepted + 1
            return
        self.covered += accepted + 1
        reached = min(accepted + 1, depth)
        while len(self.tries) < reached:
            self.tries.append(0.0)
            self.hits.append(0.0)
        for place in range(reached):
            self.tries[place] += 1.0
            self.hits[place] += place < accepted

    def discount(self, keep: float) -> None:
        """Let all counts be worth less."""
        self.tries = [keep * tries for tries in self.tries]
        self.hits = [keep * hits for hits in self.hits]
        self.covered, self.bare = keep * self.covered, keep * self.bare

    @classmethod
    def pooled(cls, parts: Sequence[DraftCounts]) -> DraftCounts:
        """Those of several requests together."""
        tries = [sum(column) for column in zip_longest(*(part.tries for part in parts), fillvalue=0.0)]
        hits = [sum(column) for column in zip_longest(*(part.hits for part in parts), fillvalue=0.0)]
        return cls(tries, hits, sum(part.covered for part in parts), sum(part.bare for part in parts))


class _Outlook(NamedTuple):
    """What a drafter promises: per depth the chance that a draft is accepted at least so far, the share of the text for
    which it has a guess, and the drafts of the population that this rests on."""

    survival: list[float]
    share: float
    drafts: float


class AcceptanceModel:
    """Counts of all requests, by drafter, apart for greedy and sampled ones; one round later they count ``keep``."""

    def __init__(self, members: Sequence[Limits], keep: float = POPULATION_KEEP) -> None:
        self.keep = keep
        self.copies = [not member.relative_cost for member in members]
        self.population = {greedy: [DraftCounts() for _ in members] for greedy in (True, False)}

    def start_from(self, member: int, survival: Sequence[float], proposes: float, drafts: float = 16.0) -> None:
        """Begin with what was measured before, worth so many drafts."""
        for counts in (self.population[greedy][member] for greedy in (True, False)):
            counts.tries = [drafts * before for before in [1.0, *survival][: len(survival)]]
            counts.hits = [drafts * after for after in survival]
            counts.covered, counts.bare = drafts * proposes * (1.0 + sum(survival)), drafts * (1.0 - proposes)

    def tick(self) -> None:
        """A round has passed: what was seen before is worth less."""
        for counts in (*self.population[True], *self.population[False]):
            counts.discount(self.keep)

    def add(self, greedy: bool, member: int, counts: DraftCounts, depth: int, accepted: int) -> None:
        """A round of a request in which a drafter was asked for ``depth`` tokens (0: it had no guess)."""
        counts.discount(REQUEST_KEEP)
        counts.add(depth, accepted)
        self.population[greedy][member].add(depth, accepted)

    def outlook(self, greedy: bool, member: int, counts: DraftCounts, depth: int, requests: int = 1) -> _Outlook:
        """For drafts of up to ``depth`` of requests that have these ``counts`` together."""
        everyone, copies = self.population[greedy][member], self.copies[member]
        weight = (COPIER_WEIGHT if copies else REQUEST_WEIGHT) * requests
        chance, survival, prior = 1.0, [], PRIOR
        for place in range(depth):
            prior = shrunk(everyone, place, prior, DEPTH_WEIGHT if place else FIRST_WEIGHT)
            chance *= prior if copies else shrunk(counts, place, prior, weight)
            survival.append(chance)
        if copies:
            survival = mixed(counts, survival, weight)
        share = (everyone.covered + 1.0) / (everyone.covered + everyone.bare + 1.0)
        share = (counts.covered + weight * share) / (counts.covered + counts.bare + weight)
        return _Outlook(survival, share, everyone.tries[0] if everyone.tries else 0.0)


def mixed(counts: DraftCounts, others: Sequence[float], weight: float) -> list[float]:
    """Survival by depth of a drafter that copies: a text repeats itself or does not, so that a request's own drafts
    count at all depths against the whole drafts of others, worth ``weight``.

    Depth by depth, one copied text among many would promise long drafts to every text: a first token that is accepted
    once in ten times would be followed by others' nine in ten.
    """
    drafts = counts.tries[0] if counts.tries else 0.0
    chance, prior, survival = 1.0, others[0], []
    for place, promised in enumerate(others):
        prior = shrunk(counts, place, prior, DEPTH_WEIGHT if place else 0.0)
        chance *= prior
        survival.append((drafts * chance + weight * promised) / (drafts + weight))
    return survival


def shrunk(counts: DraftCounts, place: int, prior: float, weight: float) -> float:
    """Chance at a depth, drawn towards ``prior`` as by ``weight`` further tries."""
    if place >= len(counts.tries):
        return prior
    return (counts.hits[place] + weight * prior) / (counts.tries[place] + weight)
