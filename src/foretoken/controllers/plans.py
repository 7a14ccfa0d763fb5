"""Plans: which drafters are asked, in which order and for how much, and what a batch gains per second by it.

A text has stretches in which a drafter has guesses (n-grams: where something repeats) and others in which it has none.
How much of the *text* lies in which does not depend on what is drafted there, so a plan is judged by it:

    rounds per token  R = sum over options of (share of the text) / (tokens of such a round)
    seconds           T = target(nodes of the batch) + drafts that any of the requests asked for + rest
    tokens per second = B / (R T)

With one request that is the best option for every stretch by itself.  In a batch a draft for one request is waited for
by all, and plain decoding for a few may pay more.

A draft of a member that is asked after others runs on where their stretch ends, into text that they would have guessed:
such tokens save their rounds, not its own (:meth:`Option.tokens_without`).

Where nobody waits for the places that get free, the batch takes as long as its slowest request
(:mod:`foretoken.controllers.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.controllers.ahead import Ahead, Own, batch_rounds, overshoot
from foretoken.controllers.hazards import still_bare

FALLING = 3
"""Lengths in a row that are worth less after which none is looked at: rates are noisy."""


@dataclass(slots=True)  # not frozen: a dozen are made for every plan, which takes three times as long with frozen ones
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
        alone: what such a round costs with a single request, as a part of ``seconds``.
        stands: [depth] chance that so many tokens stand.
        stays: chance that it has no guess one token after a place where it had none.
        shorter: other options of the member, with fewer levels.
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
    alone: float = 1.0
    stands: tuple[float, ...] = ()
    stays: float = 1.0
    shorter: tuple[Option, ...] = ()

    @property
    def rate(self) -> float:
        """Tokens per second and request where there is a guess."""
        return self.tokens / self.seconds

    @property
    def error(self) -> float:
        """Standard error of the tokens, as a part of them."""
        return (max(self.variance, 0.0) / self.seen) ** 0.5 / self.tokens

    def tokens_without(self, bare: float, stays: float) -> float:
        """Tokens of a round that begins where others have no guess, as far as they would still have none.

        Args:
            bare: share of the text that they have no guesses for.
            stays: chance that they have none one token after such a place (:func:`.still_bare`).
        """
        if stays >= 1.0 or bare >= 1.0 or not self.stands:
            return self.tokens
        chances = still_bare(bare, stays, len(self.stands) + 1)
        return sum(stands * still for stands, still in zip((1.0, *self.stands), chances, strict=True))


def best_of(options: Iterator[Option], worth: Callable[[Option], float]) -> Option:
    """The option worth most, with those before it as its shorter ones.  Longer and longer drafts pay more up to a
    length, then less: once ``FALLING`` in a row were not worth more than the best one, no further is looked at."""
    looked = [next(options)]
    most, fallen, place = worth(looked[0]), 0, 0
    for option in options:
        looked.append(option)
        if (value := worth(option)) > most:
            most, fallen, place = value, 0, len(looked) - 1
        elif (fallen := fallen + 1) >= FALLING:
            break
    found = looked[place]
    found.shorter = tuple(looked[:place])
    return found


def plans_of(ranked: Sequence[Option]) -> list[list[Option]]:
    """Plans worth weighing: the best options down to some place, and each option alone; all end in plain decoding.

    Args:
        ranked: options by their rate, plain decoding among them.
    """
    place = next(i for i, option in enumerate(ranked) if option.member < 0)
    plain, able = ranked[place], list(ranked[:place])
    prefix: list[Option] = []
    plans = [[plain], *([option, plain] for option in able[1:])]
    for option in able:
        prefix.append(_after(prefix, option))
        plans.append([*prefix, plain])
    return plans


def _after(before: Sequence[Option], option: Option) -> Option:
    """The option, or a shorter one of its member that is worth more where those ``before`` have no guess."""
    bare, stays = _bare(before)
    if stays >= 1.0 or bare >= 1.0:
        return option

    def worth(one: Option) -> float:
        within = one.tokens_without(bare, stays)
        return within / max(one.seconds - (one.tokens - within) / before[0].rate, 1e-9)

    return max((*option.shorter, option), key=worth)


def _bare(options: Sequence[Option]) -> tuple[float, float]:
    """Share of the text that none has a guess for, and the chance that it goes on so."""
    bare, stays = 1.0, 1.0
    for option in options:
        bare, stays = bare * (1.0 - option.share), min(stays, option.stays)
    return bare, stays


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
        ahead: what the requests may still write, when nobody waits for their places (``None``: somebody does).
        pads: whether the target runs as many nodes for every request as for the one with most.
    """
    tokens, parts = rounds_of(plan)
    seconds = seconds_of(plan, batch, target_s, rest_s, pads, parts)
    if ahead is None or ahead.mean <= 0:
        return tokens / seconds
    squares = sum(part * (option.variance + option.tokens**2) for part, option in zip(parts, plan, strict=True))
    alone = sum(part * option.alone for part, option in zip(parts, plan, strict=True))
    luck = max(squares - tokens**2, 0.0) * ahead.mean / tokens**3
    luck += (ahead.mean / tokens) ** 2 * sum(
        (part * ahead.unknown(option.member, option.tokens, option.variance)) ** 2
        for part, option in zip(parts, plan, strict=True)
    )
    rounds = rounds_left(plan, ahead) if ahead.own else [left / tokens for left in ahead.left]
    last = overshoot(tokens, squares - tokens**2) / tokens
    return ahead.mean / (seconds * batch_rounds([one + last for one in rounds], luck**0.5, alone))


def seconds_of(
    plan: Sequence[Option],
    batch: int,
    target_s: Callable[[int], float],
    rest_s: Callable[[int], float],
    pads: bool = False,
    parts: Sequence[float] = (),
) -> float:
    """Seconds of a round of a plan, on average; arguments as for :func:`rate_of`, and :func:`rounds_of` its options."""
    parts = parts or rounds_of(plan)[1]
    nodes = max(1, round(batch * sum(part * option.nodes for part, option in zip(parts, plan, strict=True))))
    seconds, reached = rest_s(nodes), 1.0
    for part, option in zip(parts, plan, strict=True):
        seconds += option.draft_s * (1.0 - (1.0 - min(reached, 1.0)) ** batch)
        reached = max(0.0, reached - part)
    if not pads:
        return seconds + target_s(nodes)
    none = 1.0  # chance that no request has more nodes
    for part, option in sorted(zip(parts, plan, strict=True), key=lambda pair: -pair[1].nodes):
        fewer = max(0.0, none - part)
        seconds += (none**batch - fewer**batch) * target_s(max(1, round(batch * option.nodes)))
        none = fewer
    return seconds


def rounds_of(plan: Sequence[Option]) -> tuple[float, list[float]]:
    """Tokens of a round on average, and which part of the rounds is spent by each option."""
    rounds = _rounds_per_token(plan, {})
    tokens = 1.0 / sum(rounds)
    return tokens, [part * tokens for part in rounds]


def rounds_left(plan: Sequence[Option], ahead: Ahead) -> list[float]:
    """Rounds that each request still takes, by what it is like."""
    return [left * sum(_rounds_per_token(plan, own)) for left, own in zip(ahead.left, ahead.own, strict=True)]


def _rounds_per_token(plan: Sequence[Option], own: Mapping[int, Own]) -> list[float]:
    """By option; ``own`` is what the request is like, where that is known."""
    rounds: list[float] = []
    bare, stays = 1.0, 1.0
    for option in plan:
        share, stands = own.get(option.member) or (option.share if option.member >= 0 else 1.0, 1.0)
        tokens = within = 1.0 + (option.tokens - 1.0) * stands
        if rounds and option.stands:
            within = 1.0 + (option.tokens_without(bare, stays) - 1.0) * stands
        spent = bare * share / within
        if within < tokens:  # the rest are tokens that the others need not write
            kept = max(1.0 - spent * (tokens - within) / (1.0 - bare), 0.0)
            rounds = [kept * part for part in rounds]
        rounds.append(spent)
        bare, stays = bare * (1.0 - share), min(stays, option.stays)
    return rounds


def error_of(plan: Sequence[Option]) -> float:
    """Standard error of a round's tokens, as a part of them: the options' own, root mean square over the rounds.

    It does not get smaller by having several options, as it would if requests were all alike.
    """
    _, parts = rounds_of(plan)
    return sum(part * option.error**2 for part, option in zip(parts, plan, strict=True)) ** 0.5


def or_any(plan: list[Option], ranked: Sequence[Option], fresh: bool) -> list[Option]:
    """The plan; for a ``fresh`` request one token of the best draft that there is, if the plan has none."""
    return plan or ([replace(next(o for o in ranked if o.member >= 0), depth=1)] if fresh else [])
