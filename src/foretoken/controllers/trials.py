"""How long plans are kept, and when what is not in use is tried again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import exp

from foretoken.controllers.hazards import Hazards
from foretoken.controllers.learned import USUAL, Cost
from foretoken.controllers.plans import Option
from foretoken.types import Context, StepRecord

REPLAN, LONGEST, LONGEST_PLAIN = 4, 16, 64
"""Rounds that a plan is kept: the first time, and at most, when planning again and again finds the same (plain decoding
longer: it teaches nothing of drafts)."""
FIRST_TRIALS, FIRST_PLAIN = 12, 3
"""Rounds that every drafter gets at the beginning, and plain decoding; models one more, as their first says nothing of
costs."""
HOPELESS = 0.5
"""What does not reach this part of the best one's rate after ``PROBED`` of them gets no more: by then it is warm."""
PROBED, LONG = 5, 4
"""At the beginning a model drafts one token for so many rounds, then so many tokens for as many rounds."""
SPENT, LATER_TRIALS = 0.3, 4
"""What a later trial may lose, in rounds, and the most rounds that it gets: the closer a choice is to the best one, the
longer it is tried, as prices of a few rounds are off by some hundredths, as much as often decides."""
OVERRUN_PRIOR, GAIN_PRIOR, OVERRUN_KEPT, OVERRUN_LASTS = 4.0, 20.0, 40.0, 128.0
"""Rounds of a plan that it takes to believe half of what they took over what was expected, and of what they wrote,
which varies more; how many count; and rounds of others after which what they took counts 1/e."""
MOST = 10.0
"""How many times the mean a single value counts at most."""
FIRST_GAP, LAST_GAP, LAST_FREE_GAP = 32, 1024, 64
"""Rounds between two trials of a choice that is not in use: doubled after each that changed nothing, up to a length
that is shorter for drafters that run no model, in rounds per request."""
CLOSE = 0.8
"""A choice whose rate is not within this part of the best one's is tried again after four times as long, not two."""


@dataclass
class State:
    """A request: how far drafts stood and how much of the text was read, per member, and what it was last asked to do.

    ``bare`` is the length of the text, per member, right after a token for which it had no guess (0: not so), ``tries``
    are its drafts, and ``hits`` those whose first token stood.

    While it is ``fresh``, up to the first round that says something of it, in which it drafts whatever is known of
    others, if none waits for it: it may be unlike them.
    """

    hazards: list[Hazards]
    read: list[int]
    bare: list[int]
    tries: list[int]
    hits: list[int]
    plan: list[Option] = field(default_factory=list)
    fresh: bool = True

    @classmethod
    def of(cls, members: int, length: int) -> State:
        """Of a request whose text is so long, and of which nothing was seen."""
        read, bare, tries, hits = [length] * members, [0] * members, [0] * members, [0] * members
        return cls([Hazards() for _ in range(members)], read, bare, tries, hits)


@dataclass
class Mean:
    """A mean in which what was long ago counts less, and a pause as some usual ones."""

    value: float = 0.0
    seen: float = 0.0

    def count(self, found: float) -> None:
        """One more."""
        if self.seen > REPLAN:
            found = min(found, MOST * self.value)
        self.seen = min(self.seen + 1, LONGEST_PLAIN)
        self.value += (found - self.value) / self.seen


@dataclass
class Round:
    """A round that is still to be learned from.

    Attributes:
        tried: the choice that was tried in it; it is ``cold`` in the first round of its trial.
        planning_s: seconds that planning took in it.
        seen: requests and what they showed, with their lengths afterwards.
    """

    tried: int | None
    cold: bool
    planning_s: float
    seen: list[tuple[Context, StepRecord, int]] = field(default_factory=list)


@dataclass
class Trial:
    """When a choice that is not in use is tried again, how many rounds it then gets (``left``), and in how many of the
    first ones its length is given (``probing``)."""

    due: int
    gap: int = FIRST_GAP
    left: int = FIRST_TRIALS
    probing: int = 2 * PROBED

    def length(self, best: int) -> int:
        """Tokens that a model is to draft: what others cost lies on a line through the first two lengths; afterwards
        what is taken to be best."""
        return best if self.probing <= 0 else LONG if self.probing <= PROBED else 1


@dataclass
class Batch:
    """What is known of batches of about one size.

    Attributes:
        trials: when what is not in use is tried again.
        size: requests.
        age: how far they were when options were last weighed.
        ranked: the options as they were last weighed, and ``plan``, those in use.
        round: of those of such batches, the present one.
        until: the one in which options are weighed again, ``kept`` rounds after the last time.
        expected_s: what a round of the plan is to take when there are ``size`` requests, by what its parts cost, and
            ``expected_tokens`` what it is to write.
        overruns: what rounds of plans took over what was expected of them, by the members that they ask.
        gains: what they wrote over what was expected.
    """

    trials: dict[int, Trial]
    size: int = 1
    age: int = 0
    ranked: list[Option] = field(default_factory=list)
    plan: list[Option] = field(default_factory=list)
    round: int = -1
    until: int = 0
    kept: int = REPLAN
    expected_s: float = 0.0
    expected_tokens: float = 1.0
    overruns: dict[tuple[int, ...], Cost] = field(default_factory=dict)
    gains: dict[tuple[int, ...], Cost] = field(default_factory=dict)

    def overrun(self, plan: Sequence[Option]) -> float:
        """How many times longer rounds of a plan take than its parts say, for what they write: requests that draft
        unlike numbers of tokens take longer together, but texts that repeat themselves more also write more.

        That they write less than expected is no such thing: what is expected follows.  What was not in use for long
        is no longer believed.
        """
        members = tuple(option.member for option in plan if option.member >= 0)
        known = self.overruns.get(members)
        if known is None:
            return 1.0
        more = max(known.value / max(self.gains[members].value, 1.0), 1.0) - 1.0
        return 1.0 + more * exp((known.last - self.round) / OVERRUN_LASTS)

    def took(self, seconds: float, tokens: int) -> None:
        """A round of the plan took so long and wrote so much."""
        if not self.plan or self.expected_s <= 0:
            return
        members = tuple(option.member for option in self.plan)
        for table, found, prior in (
            (self.overruns, min(seconds / self.expected_s, USUAL), OVERRUN_PRIOR),
            (self.gains, tokens / self.expected_tokens, GAIN_PRIOR),
        ):
            known = table.setdefault(members, Cost(1.0, prior))
            known.seen = min(known.seen + 1, OVERRUN_KEPT)
            known.value += (found - known.value) / known.seen
            known.last = self.round

    def follow(self, plan: list[Option], most: int) -> None:
        """From now on; the longer, the longer nothing has changed, but not over ``most`` rounds.

        Other lengths are a small change: they leave it as it is how long a plan is kept.
        """
        if [option.member for option in plan] != [option.member for option in self.plan]:
            self.kept = REPLAN
        elif [option.depth for option in plan] == [option.depth for option in self.plan]:
            self.kept = min(2 * self.kept, LONGEST if plan else LONGEST_PLAIN)
        self.plan, self.until = plan, self.round + min(self.kept, most)

    def due(self, is_ready: Callable[[int, int], bool]) -> int | None:
        """The choice whose turn it is to be tried, if it is ready, being so many rounds late."""
        for choice, trial in self.trials.items():
            late = self.round - trial.due
            if late >= 0 and is_ready(choice, late):
                return choice
        return None

    def reschedule(self, used: Collection[int], tried: int | None, counts: bool, free: Collection[int]) -> None:
        """What was used needs no trial for a while; a trial that changed nothing is repeated later than the last.

        Args:
            used: choices by which tokens were written in the last round.
            tried: the one that was tried; without a guess it cost nothing, and its trial goes on.
            counts: whether the round said something of costs; else the trial of a model goes on, too.
            free: choices that run no model.
        """
        for choice in {option.member for option in self.plan} or {-1}:
            if choice in used and choice != tried:
                trial = self.trials[choice]
                trial.gap = max(int(0.9 * trial.gap), FIRST_GAP)
                trial.due = self.round + trial.gap
        if tried is None or tried not in used:
            return
        trial = self.trials[tried]
        told = counts or tried in free
        trial.left, trial.probing = trial.left - told, trial.probing - told
        if trial.left % REPLAN == 0:
            self.until = self.round  # there is something to think about
        reached = next(option.rate for option in self.ranked if option.member == tried) / self.ranked[0].rate
        if trial.probing <= 0:  # the longer it lasts, the better it is known what it loses
            trial.left = min(trial.left, rounds_of_trial(reached, tried in free))
        if trial.left <= 0 or (trial.probing <= PROBED and reached < HOPELESS):
            self.until = self.round
            close = reached > CLOSE
            longest = min(LAST_FREE_GAP * self.size, LAST_GAP) if tried in free else LAST_GAP
            trial.due, trial.gap = self.round + trial.gap, min(trial.gap * (2 if close else 4), longest)
            trial.left, trial.probing = rounds_of_trial(reached, tried in free), 0


def rounds_of_trial(reached: float, free: bool) -> int:
    """How many rounds a later trial gets of a choice that reaches so much of the best one's rate.

    Few where the choice is ``free``: what it drafts is not its price, but whether one of the requests repeats itself.
    """
    most = 2 if free else LATER_TRIALS
    return min(max(int(SPENT / max(1.0 - reached, 1e-9)), 1), most)
