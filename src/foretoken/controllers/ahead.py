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

from foretoken.controllers.hazards import Hazards, coverage, survival

OWN = 40.0
"""How many drafts of a request it takes to believe half of how unlike others it seems."""
OWN_TEXT = 160.0
"""How many tokens of it, where it is about the share that there are guesses for: what repeats comes in long stretches,
so that many tokens are few stretches."""


ALIKE = 64.0
"""As how many drafts what is usual counts where it is about how unlike others a request may be.  Of sampled texts the
built-in draft model finds the first token with a standard deviation of .04 (prose) to .12 (chats) between requests, of
greedy ones of .09 to .20; this says .06 where nothing was seen."""


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
        if len(self.left) == 1 or self.mean <= 0:
            return 1.0
        luck = max(variance, 0.0) * self.mean / tokens
        unknown = (self.mean * self.unknown(member, tokens)) ** 2
        return 1.0 + alone * largest(len(self.left)) * (self.spread**2 + luck + unknown) ** 0.5 / self.mean

    def unknown(self, member: int, tokens: float) -> float:
        """Standard deviation of a request's tokens per round, as a part of them, for what is not known of it yet."""
        return (1.0 - 1.0 / tokens) * self.doubt.get(member, 0.0) ** 0.5


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


def doubt_of(pooled: Sequence[Hazards], general: Sequence[Hazards], requests: int) -> dict[int, float]:
    """How far requests may be unlike what is expected of them (:attr:`Ahead.doubt`): a Beta law with the weight of
    ``ALIKE`` drafts and of those that were seen of them.  Nothing for a single request."""
    found: dict[int, float] = {}
    if requests == 1:
        return found
    for index, (seen, known) in enumerate(zip(pooled, general, strict=True)):
        stands = survival(1, seen, known, weight=OWN * requests)[0]
        tries = seen.drafts / requests
        found[index] = (1.0 - stands) / (max(stands, 1e-3) * (ALIKE + tries + 1.0))
    return found
