"""Plans: which drafters are asked, in which order and for how much, and what a batch gains per second by it.

A text has stretches in which a drafter has guesses (n-grams: where something repeats) and others in which it has none.
How much of the *text* lies in which does not depend on what is drafted there, so a plan is judged by it:

    rounds per token  R = sum over options of (share of the text) / (tokens of such a round)
    seconds           T = target(nodes of the batch) + drafts that any of the requests asked for + rest
    tokens per second = B / (R T)

With one request that is the best option for every stretch by itself.  In a batch a draft for one request is waited for
by all, and plain decoding for a few may pay more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.controllers.learned import Hazards

REPLAN = 4
"""Rounds that a plan is kept."""
FIRST_TRIALS = 2
"""Rounds that every choice gets at the beginning."""
FIRST_GAP, LAST_GAP = 32, 1024
"""Rounds between two trials of a choice that is not in use: doubled after each that changed nothing."""


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
    """

    member: int
    depth: int
    tokens: float
    nodes: float
    draft_s: float
    seconds: float
    share: float = 1.0

    @property
    def rate(self) -> float:
        """Tokens per second and request where there is a guess."""
        return self.tokens / self.seconds


def plans_of(ranked: Sequence[Option]) -> list[list[Option]]:
    """Plans worth weighing: the best options down to some place, and each option alone; all end in plain decoding.

    Args:
        ranked: options by their rate, plain decoding among them.
    """
    place = next(i for i, option in enumerate(ranked) if option.member < 0)
    plain, able = ranked[place], list(ranked[:place])
    prefixes = [able[:count] for count in range(len(able) + 1)]
    return [[*plan, plain] for plan in [*prefixes, *([option] for option in able[1:])]]


def rate_of(plan: Sequence[Option], batch: int, target_s: Callable[[int], float], rest_s: float) -> float:
    """Tokens per second and request of a plan that ends in plain decoding.

    Args:
        plan: options in the order in which they are asked.
        batch: requests.
        target_s: seconds of a target call by its nodes.
        rest_s: seconds of a round beside drafting and the target.
    """
    rounds, left = [], 1.0
    for option in plan:
        share = 1.0 if option.member < 0 else option.share
        rounds.append(left * share / option.tokens)
        left *= 1.0 - share
    per_token = sum(rounds)
    nodes = sum(part * option.nodes for part, option in zip(rounds, plan, strict=True)) / per_token
    seconds, reached = target_s(max(1, round(batch * nodes))) + rest_s, 1.0
    for part, option in zip(rounds, plan, strict=True):
        seconds += option.draft_s * (1.0 - (1.0 - min(reached, 1.0)) ** batch)
        reached = max(0.0, reached - part / per_token)
    return 1.0 / (per_token * seconds)


@dataclass
class State:
    """A request: how far drafts stood, per member, and what it was last asked to do.

    While it is ``fresh``, in its first round, it drafts whatever is known of others: it may be unlike them.  A plan
    of its own, made ``age`` rounds ago, is for reproducible requests only.
    """

    hazards: list[Hazards]
    plan: list[Option] = field(default_factory=list)
    age: int = REPLAN
    fresh: bool = True


@dataclass
class Batch:
    """What is known of batches of about one size: the plan in use, and when what is not in use is tried again."""

    trials: dict[int, Trial]
    ranked: list[Option] = field(default_factory=list)
    plan: list[Option] = field(default_factory=list)
    age: int = REPLAN


@dataclass
class Trial:
    """When a choice that is not in use is tried again, and how many rounds it then gets."""

    due: int
    gap: int = FIRST_GAP
    left: int = FIRST_TRIALS


def or_any(plan: Sequence[Option], ranked: Sequence[Option], fresh: bool) -> list[Option]:
    """The plan; for a ``fresh`` request the best draft that there is, if the plan has none."""
    return list(plan) or ([next(option for option in ranked if option.member >= 0)] if fresh else [])
