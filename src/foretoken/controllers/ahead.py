"""How long a batch takes whose requests end at different times.

Drafts make them do so, by chance and because some texts are easier than others.  Where nobody waits for the places
that get free, a batch takes as long as its slowest request.  With f_i rounds for request i by its own rate, and s as
the standard deviation that the luck of drafts adds, the last one ends after about

    F = mean f + e(B) sqrt(sd(f)^2 + s^2)      rounds, but between  max f  and  max f + e(B) s,

where e(B) is the expected largest of B standard normals (:func:`largest`).  Rounds get cheaper as requests end: if a
round with a single request costs the part a of one with all, and rounds in between lie on the line between, the batch
takes

    a F + (1 - a) (sum f - F) / (B - 1)        rounds of the full price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from foretoken.controllers.learned import Hazards, coverage, survival

OWN = 40.0
"""How many drafts of a request it takes to believe half of how unlike others it seems."""
OWN_TEXT = 160.0
"""How many tokens of it, where it is about the share that there are guesses for: what repeats comes in long stretches,
so that many tokens are few stretches."""


@dataclass(frozen=True)
class Own:
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
    """

    left: Sequence[int]
    own: Sequence[Mapping[int, Own]] = ()

    @cached_property
    def mean(self) -> float:
        """Tokens of a request on average."""
        return sum(self.left) / len(self.left)

    @cached_property
    def spread(self) -> float:
        """Their standard deviation."""
        return deviation(self.left)

    def waits(self, tokens: float, variance: float, alone: float) -> float:
        """How many times longer the batch takes by luck and by what is left than the average of its requests.

        Args:
            tokens: of a round, on average; ``variance``: of them.
            alone: what a round with a single request costs, as a part of one with all.
        """
        if len(self.left) == 1 or self.mean <= 0:
            return 1.0
        luck = max(variance, 0.0) * self.mean / tokens
        return 1.0 + alone * largest(len(self.left)) * (self.spread**2 + luck) ** 0.5 / self.mean


def batch_rounds(rounds: Sequence[float], luck: float, alone: float) -> float:
    """Rounds of the full price that a batch takes.

    Args:
        rounds: per request, on average.
        luck: standard deviation that chance adds to each.
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
    each: Sequence[Sequence[Hazards]], pooled: Sequence[Hazards], general: Sequence[Hazards]
) -> list[dict[int, Own]]:
    """How the requests of a batch differ from it; nothing for a single one.

    Args:
        each: per request and member, what was seen of it.
        pooled: per member, of all of them.
        general: per member, of all that there ever were.
    """
    if len(each) == 1:
        return []
    usual = {
        index: survival(1, pooled[index], general[index], weight=OWN * len(each))[0]
        for index in range(len(pooled))
        if pooled[index].tries
    }
    return [
        {
            index: Own(
                coverage(seen[index], general[index], weight=OWN_TEXT),
                survival(1, seen[index], general[index], weight=OWN)[0] / stands,
            )
            for index, stands in usual.items()
        }
        for seen in each
    ]
