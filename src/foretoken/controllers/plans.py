"""Plans: which drafters are asked, in which order and for how much, and what a batch gains per second by it.

A text has stretches in which a drafter has guesses (n-grams: where something repeats) and others in which it has none.
How much of the *text* lies in which does not depend on what is drafted there, so a plan is judged by it:

    rounds per token  R = sum over options of (share of the text) / (tokens of such a round)
    seconds           T = target(nodes of the batch) + drafts that any of the requests asked for + rest
    tokens per second = B / (R T)

With one request that is the best option for every stretch by itself.  In a batch a draft for one request is waited for
by all, and plain decoding for a few may pay more.

Drafts make requests of equal length end at different times.  Where nobody waits for the places that get free, the batch
takes as long as its slowest request: with L tokens left, E = 1/R tokens a round on average and s as their standard
deviation, the largest of B sums of L/E rounds is about 1 + e(B) s / sqrt(L E) times the average one, where e(B) is the
expected largest of B standard normals (:func:`largest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

UNEVEN = 1.1
"""What drafts cost at most by requests ending at different times: the estimate is rough, and must not stand in the way
of finding out about drafts that gain much."""


@dataclass(frozen=True)
class Option:
    """One way to spend a round.

    Attributes:
        member: who drafts; -1 is plain decoding.
        depth: levels.
        tokens: expected where there is a guess.
        nodes: that the target scores for one request, the root included.
        draft_s: seconds of drafting for the batch.
        seconds: of such a round, when all requests spend it so.
        share: of the text that is not covered by better options, how much this one has guesses for.
        variance: of the tokens.
        seen: drafts that the expectation rests on.
    """

    member: int
    depth: int
    tokens: float
    nodes: float
    draft_s: float
    seconds: float
    share: float = 1.0
    variance: float = 0.0
    seen: float = 1.0

    @property
    def rate(self) -> float:
        """Tokens per second and request where there is a guess."""
        return self.tokens / self.seconds

    @property
    def error(self) -> float:
        """Standard error of the tokens, as a part of them."""
        return (max(self.variance, 0.0) / self.seen) ** 0.5 / self.tokens


@dataclass(frozen=True)
class Ahead:
    """Tokens that the requests of a batch may still write: on average, and their standard deviation."""

    left: float
    spread: float = 0.0

    @classmethod
    def of(cls, left: Sequence[int]) -> Ahead:
        """From the tokens that each request has left."""
        mean = sum(left) / len(left)
        return cls(mean, (sum((one - mean) ** 2 for one in left) / len(left)) ** 0.5)


def plans_of(ranked: Sequence[Option]) -> list[list[Option]]:
    """Plans worth weighing: the best options down to some place, and each option alone; all end in plain decoding.

    Args:
        ranked: options by their rate, plain decoding among them.
    """
    place = next(i for i, option in enumerate(ranked) if option.member < 0)
    plain, able = ranked[place], list(ranked[:place])
    prefixes = [able[:count] for count in range(len(able) + 1)]
    return [[*plan, plain] for plan in [*prefixes, *([option] for option in able[1:])]]


def rate_of(
    plan: Sequence[Option],
    batch: int,
    target_s: Callable[[int], float],
    rest_s: Callable[[int], float],
    ahead: Ahead | None = None,
    pads: bool = False,
) -> float:
    """Tokens per second and request of a plan that ends in plain decoding.

    Args:
        plan: options in the order in which they are asked.
        batch: requests.
        target_s: seconds of a target call by its nodes.
        rest_s: seconds of a round beside drafting and the target, by its nodes.
        ahead: what the requests still may write, when nobody waits for their places (``None``: somebody does).
        pads: whether the target runs as many nodes for every request as for the one with most.
    """
    tokens, parts = rounds_of(plan)
    nodes = max(1, round(batch * sum(part * option.nodes for part, option in zip(parts, plan, strict=True))))
    seconds, reached, squares = rest_s(nodes), 1.0, 0.0
    for part, option in zip(parts, plan, strict=True):
        seconds += option.draft_s * (1.0 - (1.0 - min(reached, 1.0)) ** batch)
        reached = max(0.0, reached - part)
        squares += part * (option.variance + option.tokens**2)
    if pads:
        none = 1.0  # chance that no request has more nodes
        for part, option in sorted(zip(parts, plan, strict=True), key=lambda pair: -pair[1].nodes):
            fewer = max(0.0, none - part)
            seconds += (none**batch - fewer**batch) * target_s(max(1, round(batch * option.nodes)))
            none = fewer
    else:
        seconds += target_s(nodes)
    return tokens / (seconds * uneven(tokens, squares - tokens**2, batch, ahead))


def rounds_of(plan: Sequence[Option]) -> tuple[float, list[float]]:
    """Tokens of a round on average, and which part of the rounds is spent by each option."""
    rounds, rest = [], 1.0
    for option in plan:
        share = 1.0 if option.member < 0 else option.share
        rounds.append(rest * share / option.tokens)
        rest *= 1.0 - share
    tokens = 1.0 / sum(rounds)
    return tokens, [part * tokens for part in rounds]


def error_of(plan: Sequence[Option]) -> float:
    """Standard error of a round's tokens, as a part of them: the options' own, root mean square over the rounds.

    It does not get smaller by having several options, as it would if requests were all alike.
    """
    _, parts = rounds_of(plan)
    return sum(part * option.error**2 for part, option in zip(parts, plan, strict=True)) ** 0.5


def uneven(tokens: float, variance: float, batch: int, ahead: Ahead | None) -> float:
    """How many times longer drafts let the slowest of a batch take, against plain decoding, than tokens a round say.

    Args:
        tokens: of a round, on average; ``variance``: of them.
        batch: requests.
        ahead: ``None`` when the places of those that end are taken by others.
    """
    if ahead is None or ahead.left <= 0:
        return 1.0
    reach = largest(batch)
    spread = (ahead.spread**2 + max(variance, 0.0) * ahead.left / tokens) ** 0.5
    return min((ahead.left + reach * spread) / (ahead.left + reach * ahead.spread), UNEVEN)


@cache
def largest(count: int) -> float:
    """Expected largest of ``count`` standard normals (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def or_any(plan: Sequence[Option], ranked: Sequence[Option], fresh: bool) -> list[Option]:
    """The plan; for a ``fresh`` request one token of the best draft that there is, if the plan has none."""
    return list(plan) or ([replace(next(o for o in ranked if o.member >= 0), depth=1)] if fresh else [])
