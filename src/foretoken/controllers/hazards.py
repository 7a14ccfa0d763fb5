"""What controllers learn of drafts: how far they stand, and how much of the text there are guesses for.

Counts of older rounds weigh less; what a single request shows is drawn towards what all of them show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

UNSEEN = 4.0
"""As how many places that it went on the chance counts that text without guesses goes on."""
LARGEST_UNIT = 1e6
"""What a round may count before counts are put in rounds again."""


@dataclass
class Hazards:
    """How far drafts stand, as the chance of each further position given that the one before it stood.

    Attributes:
        tries: per position, drafts that reached it and were long enough (older ones count less).
        hits: those that stood there.
        covered: tokens of the text that it had guesses for, ``bare`` those that it had none for, where it was asked.
        ended: places right after one without a guess where there was one, ``stayed`` those where there was none; both
            are counted in general only.
        unit: what a round counts now, in all of these.
    """

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    covered: float = 0.0
    bare: float = 0.0
    ended: float = 0.0
    stayed: float = 0.0
    unit: float = 1.0

    def fade(self, keep: float) -> None:
        """Let what was seen count less: what comes counts more, which takes no time."""
        self.unit /= keep
        if self.unit > LARGEST_UNIT:
            one = 1.0 / self.unit
            self.ended, self.stayed = self.ended * one, self.stayed * one
            self.tries, self.hits, self.covered, self.bare = self.in_rounds()
            self.unit = 1.0

    def in_rounds(self) -> tuple[list[float], list[float], float, float]:
        """Tries, hits, covered and bare, where a round counts 1 now."""
        one = 1.0 / self.unit
        return [t * one for t in self.tries], [h * one for h in self.hits], self.covered * one, self.bare * one

    def add(self, depth: int, accepted: int) -> None:
        """A draft of ``depth`` levels of which ``accepted`` stood; depth 0 is an answer without a guess."""
        tries, hits, unit = self.tries, self.hits, self.unit
        tried = accepted + 1 if accepted < depth else depth
        while len(tries) < tried:
            tries.append(0.0)
            hits.append(0.0)
        for place in range(tried):
            tries[place] += unit
        for place in range(accepted if accepted < depth else depth):
            hits[place] += unit

    def count(self, keep: float, depth: int, accepted: int, covered: float, bare: float) -> None:
        """A round: what was seen fades, then :meth:`add` and :meth:`write`, in one call, as there are many."""
        self.unit /= keep
        if self.unit > LARGEST_UNIT:
            self.fade(1.0)
        if depth:
            self.add(depth, accepted)
        self.covered += covered * self.unit
        self.bare += bare * self.unit

    @property
    def drafts(self) -> float:
        """Drafts that were seen."""
        return self.tries[0] / self.unit if self.tries else 0.0

    def write(self, covered: float, bare: float) -> None:
        """Tokens that were written where it had guesses and where it had none."""
        self.covered += covered * self.unit
        self.bare += bare * self.unit

    def go_on(self, answered: bool) -> None:
        """Whether it had a guess one token after a place where it had none."""
        if answered:
            self.ended += self.unit
        else:
            self.stayed += self.unit

    @property
    def stays(self) -> float:
        """Chance that it has no guess one token after a place where it had none; 1 while that was not seen."""
        return 1.0 - self.ended / (self.ended + self.stayed + UNSEEN * self.unit)

    def bare_tokens(self, tokens: int) -> float:
        """How many of some tokens are such as it has no guesses for, the first one being so."""
        stays = self.stays
        if tokens == 1 or stays >= 1.0:
            return tokens
        return sum(still_bare((self.bare + self.unit) / (self.covered + self.bare + self.unit), stays, tokens))


def still_bare(bare: float, stays: float, places: int) -> list[float]:
    """[places] chance that there is no guess at a place without one, one token later, two tokens later, and so on, as
    in a Markov chain of two states.

    Args:
        bare: share of the text without guesses, to which the chance tends.
        stays: chance that there is none one token later; below ``bare`` it counts as ``bare``.
    """
    if bare >= 1.0:
        return [1.0] * places
    goes_on = max(stays - bare, 0.0) / (1.0 - bare)
    return [bare + (1.0 - bare) * goes_on**place for place in range(places)]


def pooled(parts: Sequence[Hazards]) -> Hazards:
    """What several requests saw together."""
    places = max((len(part.tries) for part in parts), default=0)
    whole = Hazards([0.0] * places, [0.0] * places)
    for part in parts:
        one = 1.0 / part.unit
        for place, (tries, hits) in enumerate(zip(part.tries, part.hits, strict=True)):
            whole.tries[place] += tries * one
            whole.hits[place] += hits * one
        whole.covered += part.covered * one
        whole.bare += part.bare * one
    return whole


def coverage(local: Hazards, general: Hazards, weight: float = 16.0) -> float:
    """Share of the text that there are guesses for: this request's, drawn towards what is seen in general."""
    return covered(local, (general.covered + general.unit) / (general.covered + general.bare + general.unit), weight)


def covered(seen: Hazards, usual: float, weight: float) -> float:
    """Share of the text that there were guesses for, drawn towards the ``usual`` one as by ``weight`` tokens."""
    weight *= seen.unit
    return (seen.covered + weight * usual) / (seen.covered + seen.bare + weight)


def at_age(general: Hazards, alike: Hazards, weight: float = 16.0) -> Hazards:
    """The general picture, but as requests found it that had written as much: how far drafts stood then, and how much
    of the text there were guesses for.

    Args:
        general: of all requests.
        alike: what those drafted and wrote next.
        weight: how many drafts, and tokens of the text, the general picture is worth beside it.
    """
    whole = general.covered + general.bare + general.unit
    weight *= alike.unit
    share = alike.covered + weight * (general.covered + general.unit) / whole
    share /= alike.covered + alike.bare + weight
    hits = list(general.hits)
    for place, (tries, stood) in enumerate(zip(general.tries, alike.tries, strict=False)):
        found = alike.hits[place] + weight * general.hits[place] / tries if tries > 0 else alike.hits[place]
        hits[place] = tries * found / (stood + weight)
    return replace(general, hits=hits, covered=share * whole - general.unit, bare=(1.0 - share) * whole)


def survival(depth: int, local: Hazards, general: Hazards, prior: float = 0.6, weight: float = 8.0) -> list[float]:
    """[depth] chance that a draft stands at least so far: this request's, drawn towards what is seen in general.

    A position of which little is seen is taken to be like the one before it: longer drafts are then tried until they
    disappoint.

    Args:
        depth: positions.
        local: of this request.
        general: of all requests.
        prior: chance where nothing was seen at all.
        weight: how many tries the general picture is worth beside the local one.
    """
    stands, found, before = 1.0, [], prior
    for place in range(depth):
        before = shrunk(general, place, before, 2.0 if place == 0 else 4.0)
        stands *= shrunk(local, place, before, weight)
        found.append(stands)
    return found


def shrunk(seen: Hazards, place: int, prior: float, weight: float) -> float:
    """Chance that a draft stands at a position where it stood before: the share that did, drawn towards ``prior`` as by
    ``weight`` further tries."""
    if place >= len(seen.tries):
        return prior
    weight *= seen.unit
    total = seen.tries[place] + weight
    return (seen.hits[place] + weight * prior) / total if total > 0 else prior
