"""How long a batch takes whose requests end at different times.

Drafts make them do so, by chance and because some texts are easier than others.  Where nobody waits for the places
that get free, a batch takes as long as its slowest request.  With f_i rounds for request i by its own rate, and s as
the standard deviation that the luck of drafts adds, and what is not known yet of the requests, the last one ends after
about

    F = mean f + e(B) sqrt(sd(f)^2 + s^2)      rounds, but between  max f  and  max f + e(B) s,

where e(B) is the expected largest of B standard normals (:func:`largest`).  Rounds get cheaper as requests end: if a
round with a single request costs the part a of one with all, and rounds in between lie on the line between, the batch
takes

    a F + (1 - a) (sum f - F) / (B - 1)        rounds of the full price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import NormalDist
from typing import NamedTuple

from foretoken.controllers.hazards import Hazards, coverage, covered, shrunk, survival

ALIKE = 64.0
"""As how many drafts what is usual counts where it is about how unlike others a request is, while little was seen of
that: so many drafts of its own it takes to believe half of how unlike it seems.  Of sampled texts the built-in draft
model finds the first token with a standard deviation of .03 (prose) to .11 (chats) between requests; this says .06."""
LEAST_ALIKE, MOST_ALIKE = 8.0, 512.0
"""The least and the most that it is taken for, whatever is seen."""
ALIKE_PRIOR, ALIKE_KEEP = 16000.0, 0.99
"""Pairs of drafts of one request that the first guess is worth, as many as four requests with 64 each have; and what
a request is worth one request later."""
OWN_TEXT = 160.0
"""How many tokens of a request it takes to believe half of how unlike others it seems where it is about the share that
there are guesses for: what repeats comes in long stretches, so that many tokens are few stretches."""


@dataclass
class Alike:
    """How alike requests are to a member, by those that ended: how often the first token of a draft stands is taken to
    differ between them as in a Beta law, which then is a correlation between drafts of one request.

    Attributes:
        shared: sum over requests of (hits - expected)^2 / variance of a draft, less its expectation if all were alike.
        pairs: sum over requests of drafts squared.
    """

    shared: float = ALIKE_PRIOR / (ALIKE + 1.0)
    pairs: float = ALIKE_PRIOR

    def count(self, tries: int, hits: int, usual: float) -> None:
        """A request ended of whose drafts so many stood, where ``usual`` is the share of all."""
        spread = usual * (1.0 - usual)
        if tries < 2 or spread <= 0:
            return
        self.shared = ALIKE_KEEP * self.shared + (hits - tries * usual) ** 2 / spread - tries
        self.pairs = ALIKE_KEEP * self.pairs + tries * tries

    @property
    def weight(self) -> float:
        """As how many drafts what is usual counts for a request."""
        correlation = max(self.shared, 0.0) / self.pairs
        return min(max(1.0 / max(correlation, 1e-9) - 1.0, LEAST_ALIKE), MOST_ALIKE)


class Own(NamedTuple):
    """What a request is like to a member: the share of its text that there are guesses for, and how often the first
    token of a draft stands there, as a multiple of what is usual."""

    share: float = 1.0
    stands: float = 1.0


@dataclass(frozen=True)
class Ahead:
    """What a batch may still write.

    Attributes:
        left: tokens, per request.
        own: per request, what it is like to the members that were asked for it; the others find it usual.
        doubt: by member, the variance of how often the first token stands for a request, as a multiple of what is
            expected of it, for what is not known of it yet.
    """

    left: Sequence[int]
    own: Sequence[Mapping[int, Own]] = ()
    doubt: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def mean(self) -> float:
        """Tokens of a request on average."""
        return sum(self.left) / len(self.left)

    @cached_property
    def spread(self) -> float:
        """Their standard deviation."""
        return deviation(self.left)

    def waits(self, member: int, tokens: float, variance: float, alone: float) -> float:
        """How many times longer the batch takes by luck and by what is left than the average of its requests.

        Args:
            member: that drafts.
            tokens: of a round, on average; ``variance``: of them.
            alone: what a round with a single request costs, as a part of one with all.
        """
        if self.mean <= 0:
            return 1.0
        wasted = 1.0 + overshoot(tokens, variance) / self.mean
        if len(self.left) == 1:
            return wasted
        luck = max(variance, 0.0) * self.mean / tokens
        unknown = (self.mean * self.unknown(member, tokens, variance)) ** 2
        return wasted + alone * largest(len(self.left)) * (self.spread**2 + luck + unknown) ** 0.5 / self.mean

    def unknown(self, member: int, tokens: float, variance: float) -> float:
        """Standard deviation of a request's tokens per round, as a part of them, for what is not known of it yet."""
        return (1.0 - 1.0 / tokens) * place_of(tokens, variance) * self.doubt.get(member, 0.0) ** 0.5


def overshoot(tokens: float, variance: float) -> float:
    """Tokens that the last round of a request drafts in vain, on average: (E T^2 / E T - 1) / 2 (renewal theory), half
    of which costs nothing, as drafts are cut short there."""
    return (variance / tokens + tokens - 1.0) / 4.0


def place_of(tokens: float, variance: float) -> float:
    """Mean place in a draft of the tokens that stand, which is how much more they change, in parts of them, than the
    chance of each place does: Σ i S_i / Σ S_i, as Σ (2i - 1) S_i is the variance and the squared mean."""
    standing = tokens - 1.0
    return max((variance / standing + standing + 1.0) / 2.0, 1.0) if standing > 0 else 1.0


def batch_rounds(rounds: Sequence[float], luck: float, alone: float) -> float:
    """Rounds of the full price that a batch takes.

    Args:
        rounds: per request, on average.
        luck: standard deviation that chance adds to each, and what is not known of it.
        alone: what a round with a single request costs, as a part of one with all.
    """
    count, whole = len(rounds), sum(rounds)
    if count == 1:
        return whole
    reach = largest(count)
    last = whole / count + reach * (deviation(rounds) ** 2 + luck**2) ** 0.5
    last = max(min(last, max(rounds) + reach * luck), max(rounds))
    return alone * last + (1.0 - alone) * max(whole - last, 0.0) / (count - 1)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of all that there are."""
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


@cache
def largest(count: int) -> float:
    """Expected largest of ``count`` standard normals (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def own_of(
    each: Sequence[Sequence[Hazards]],
    pooled: Sequence[Hazards],
    general: Sequence[Hazards],
    alike: Sequence[float] = (),
) -> list[dict[int, Own]]:
    """How the requests of a batch differ from it; nothing for a single one.

    Args:
        each: per request and member, what was seen of it.
        pooled: per member, of all of them.
        general: per member, of all that there ever were.
        alike: per member, :attr:`Alike.weight`.
    """
    if len(each) == 1:
        return []
    weights = alike or [ALIKE] * len(pooled)
    found: list[dict[int, Own]] = [{} for _ in each]
    for index, (whole, known, weight) in enumerate(zip(pooled, general, weights, strict=True)):
        if not whole.tries:
            continue
        usual, share = survival(1, Hazards(), known)[0], coverage(Hazards(), known)
        stands = shrunk(whole, 0, usual, weight * len(each))
        for own, seen in zip(found, each, strict=True):
            mine = seen[index]
            own[index] = Own(covered(mine, share, OWN_TEXT), shrunk(mine, 0, usual, weight) / stands)
    return found


def doubt_of(
    pooled: Sequence[Hazards], general: Sequence[Hazards], requests: int, alike: Sequence[float] = ()
) -> dict[int, float]:
    """How far requests may be unlike what is expected of them (:attr:`Ahead.doubt`): a Beta law with the weight of
    ``alike`` drafts (per member) and of those that were seen of them.  Nothing for a single request."""
    found: dict[int, float] = {}
    if requests == 1:
        return found
    for index, (seen, known) in enumerate(zip(pooled, general, strict=True)):
        weight = alike[index] if alike else ALIKE
        stands = survival(1, seen, known, weight=weight * requests)[0]
        tries = seen.drafts / requests
        found[index] = (1.0 - stands) / (max(stands, 1e-3) * (weight + tries + 1.0))
    return found
