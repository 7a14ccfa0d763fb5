"""Picks drafter and length by what rounds cost here and how far drafts stand, and drafts nothing where that pays more.

Goodput (SmartSpec, https://arxiv.org/abs/2406.14066) over all members of a group, with costs that are measured while
serving, an order of members for rounds in which the first one has no guess, and trials of what is not in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest

from foretoken.controllers.base import Controller
from foretoken.controllers.costs import DrafterCost, RoundCosts, TargetCost
from foretoken.controllers.learned import Hazards, LearnedCosts, survival
from foretoken.types import Budget, Context, Limits, StepRecord

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths that are weighed."""
PLAIN = Budget(0, 0)
REPLAN = 4
"""Rounds that a plan is kept."""
FIRST_TRIALS = 2
"""Rounds that every choice gets at the beginning."""
FIRST_GAP, LAST_GAP = 32, 1024
"""Rounds between two trials of a choice that is not in use: doubled after each that changed nothing."""
LOCAL_KEEP, GENERAL_KEEP = 0.98, 0.998
"""What a round is worth one round later, for its own request and in general."""


@dataclass(frozen=True)
class Option:
    """One way to spend a round.

    Attributes:
        member: who drafts; -1 is plain decoding.
        depth: levels.
        tokens: expected when there is a guess.
        seconds: of such a round.
    """

    member: int
    depth: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second where there is a guess."""
        return self.tokens / self.seconds


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
    age: int = REPLAN


@dataclass
class Trial:
    """When a choice that is not in use is tried again, and how many rounds it then gets."""

    due: int
    gap: int = FIRST_GAP
    left: int = FIRST_TRIALS


class AutoController(Controller):
    """The default controller.

    Members are asked in the order of their tokens per second in rounds in which they have a guess, down to plain
    decoding: where the best one has none, the text goes on there at the rate of the next.  Every member, and plain
    decoding, is tried again now and then, more and more rarely while that changes nothing.

    A sampled request with a seed is planned by its own past and by fixed costs (a profile's, else by the members'
    sizes), so that its seed goes on to fix its output.

    Args:
        k: longest draft; the drafters' own by default.
    """

    name = "auto"

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 1:
            raise ValueError(f"auto needs k >= 1, not {k}")
        self.k = k
        self._start: RoundCosts | None = None
        self._round = 0
        self._tried: int | None = None
        self._records: list[tuple[Context, StepRecord]] = []
        self.attach(Limits("", 5, 64))

    def attach(self, limits: Limits) -> None:
        """Learn who can draft, and how deep."""
        self.grouped = bool(limits.members)
        self.members = tuple(limits.members) or (limits,)
        self.depths = [self._depths(member.max_depth) for member in self.members]
        self._reset()

    def _depths(self, deepest: int) -> list[int]:
        deepest = min(deepest, self.k or deepest)
        return sorted({d for d in DEPTHS if d < deepest} | {deepest})

    def start_from(self, costs: RoundCosts) -> None:
        """Begin with costs and acceptances that were measured before."""
        self._start = costs
        self._reset()

    def _reset(self) -> None:
        specs = [member.name for member in self.members]
        self.costs = LearnedCosts(specs, self._start)
        self.nominal = LearnedCosts(specs, self._start or nominal_costs(self.members))
        self.general = {greedy: [self._known(spec) for spec in specs] for greedy in (True, False)}
        self.fixed = [self._known(spec) for spec in specs]
        self.nodes: list[dict[int, float]] = [{} for _ in specs]
        self.batches: dict[int, Batch] = {}

    def _known(self, spec: str) -> Hazards:
        """What a profile says of a member."""
        found = Hazards()
        cost = None if self._start is None else self._start.drafters.get(spec)
        if cost is not None:
            stands = [1.0, *cost.survival]
            found.tries = [16.0 * before for before in stands[:-1]]
            found.hits = [16.0 * after for after in stands[1:]]
            found.asked, found.answered = 16.0, 16.0 * cost.proposes
        return found

    # -- choosing ----------------------------------------------------------------------------------------------------

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The budget of one request."""
        return self.budgets([context])[0]

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """One plan for the batch (drafts of several members would all be waited for); seeded requests their own."""
        self._digest()
        self._round += 1
        shared = [context for context in contexts if not context.reproducible]
        if shared:
            self._plan_batch(shared, len(contexts))
        for context in contexts:
            if context.reproducible:
                self._plan_alone(self.state(context))
        return [self._as_budget(self.state(context).plan) for context in contexts]

    def _plan_alone(self, state: State) -> None:
        if state.age >= REPLAN:
            ranked = self._ranked(state.hazards, self.nominal, self.fixed, 1)
            state.plan, state.age = down_to_plain(ranked, state.fresh), REPLAN - 1 if state.fresh else 0
        state.age, state.fresh = state.age + 1, False

    def _plan_batch(self, contexts: Sequence[Context], size: int) -> None:
        batch = self._batch(size)
        greedy = contexts[0].maker.greedy
        if batch.age >= REPLAN:
            seen = [self.state(context).hazards for context in contexts]
            local = [pooled([hazards[index] for hazards in seen]) for index in range(len(self.members))]
            batch.ranked = self._ranked(local, self.costs, self.general[greedy], size)
            batch.age = 0
        batch.age += 1
        self._tried = self._due(batch.trials)
        for context in contexts:
            state = self.state(context)
            state.plan = down_to_plain(batch.ranked, state.fresh)
            if self._tried is not None:
                tried = next(option for option in batch.ranked if option.member == self._tried)
                state.plan = [tried, *(option for option in state.plan if option is not tried)]
            state.fresh = False

    def _batch(self, size: int) -> Batch:
        """Batches of other sizes are another world."""
        found = self.batches.get(size.bit_length())
        if found is None:
            choices = [*range(len(self.members)), -1]
            trials = {choice: Trial(self._round + FIRST_TRIALS * place) for place, choice in enumerate(choices)}
            found = self.batches[size.bit_length()] = Batch(trials)
        return found

    def _due(self, trials: dict[int, Trial]) -> int | None:
        """The choice whose turn it is to be tried."""
        return next((choice for choice, trial in trials.items() if self._round >= trial.due), None)

    def state(self, context: Context) -> State:
        """What is known of a request."""
        found: State | None = context.state.get(self)
        if found is None:
            found = context.state[self] = State([Hazards() for _ in self.members])
        return found

    def _as_budget(self, plan: Sequence[Option]) -> Budget:
        """The first option, with the others for when it has no guess; nothing is asked behind plain decoding."""
        drafting = list(takewhile(lambda option: option.member >= 0, plan))
        budget: Budget | None = None
        for option in reversed(drafting):
            member = option.member if self.grouped else None
            nodes = self.members[option.member].max_nodes
            budget = Budget(option.depth, max(nodes, option.depth), member=member, otherwise=budget)
        return budget or PLAIN

    def _ranked(
        self, local: Sequence[Hazards], costs: LearnedCosts, general: Sequence[Hazards], batch: int
    ) -> list[Option]:
        """Every member at its best length, and plain decoding, in the order of their tokens per second."""
        plain_s = costs.target_s(batch) + costs.rest_s(batch) if costs.known else 1.0
        options = [
            max(self._options(index, local[index], general[index], costs, batch), key=lambda option: option.rate)
            for index in range(len(self.members))
        ]
        return sorted([*options, Option(-1, 0, 1.0, plain_s)], key=lambda option: -option.rate)

    def _options(self, index: int, local: Hazards, general: Hazards, costs: LearnedCosts, batch: int) -> list[Option]:
        """What a member can be asked for."""
        depths, nodes = self.depths[index], self.nodes[index]
        stands = survival(depths[-1], local, general)
        found, tokens, done = [], 1.0, 0
        for depth in depths:
            tokens += sum(stands[done:depth])
            done = depth
            seconds = self._seconds(index, depth, nodes.get(depth, 1.0 + depth), costs, batch)
            found.append(Option(index, depth, tokens, seconds))
        return found

    def _seconds(self, index: int, depth: int, nodes: float, costs: LearnedCosts, batch: int) -> float:
        """A round in which a member drafts for the whole batch; by its size while nothing was measured."""
        target_s = costs.target_s(round(batch * nodes)) if costs.known else 1.0
        draft_s = costs.draft_s(index, depth, batch)
        if draft_s is None:
            draft_s = self.members[index].relative_cost * depth * target_s
        return target_s + draft_s + costs.rest_s(batch)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, context: Context, record: StepRecord) -> None:
        """Keep the record until its round is complete."""
        self._records.append((context, record))

    def finish(self, context: Context) -> None:
        """Nothing is kept of a request but what it taught."""

    def _digest(self) -> None:
        """Learn from the last round."""
        if not self._records:
            return
        asked: list[tuple[int, int]] = []
        for context, record in self._records:
            plan = self.state(context).plan
            drafted = self._who(record)
            for option in plan:
                if option.member < 0:
                    break
                answers = option.member == drafted
                self._learn(context, option, record, answers)
                if answers:
                    asked.append((drafted, option.depth))
                    break
        record = self._records[-1][1]
        if len(set(asked)) <= 1:  # what a mixture of drafts costs says nothing of its parts
            member, depth = asked[0] if asked else (None, 0)
            self.costs.observe(record, member, depth, len(asked))
        self._reschedule(self._batch(record.batch_size), {member for member, _ in asked} or {-1})
        self._records.clear()

    def _who(self, record: StepRecord) -> int:
        if record.num_draft_tokens == 0:
            return -1
        return record.member if self.grouped else 0

    def _learn(self, context: Context, option: Option, record: StepRecord, answers: bool) -> None:
        depth = option.depth if answers else 0
        local = self.state(context).hazards[option.member]
        general = self.general[context.maker.greedy][option.member]
        for hazards, keep in ((local, LOCAL_KEEP), (general, GENERAL_KEEP)):
            hazards.fade(keep)
            hazards.add(depth, record.num_accepted_tokens)
        if answers:
            nodes = self.nodes[option.member]
            before = nodes.get(depth, float(record.num_nodes))
            nodes[depth] = before + 0.2 * (record.num_nodes - before)

    def _reschedule(self, batch: Batch, used: set[int]) -> None:
        """What was used needs no trial for a while; a trial that changed nothing is repeated later than the last."""
        trials = batch.trials
        if not batch.ranked:  # seeded requests only
            return
        planned = {option.member for option in down_to_plain(batch.ranked, fresh=False)} or {-1}
        for choice in used & planned:
            if choice != self._tried:
                trials[choice].due, trials[choice].gap = self._round + FIRST_GAP, FIRST_GAP
        if self._tried in used:  # a trial without a guess is none: it cost nothing, and goes on
            trial = trials[self._tried]
            trial.left -= 1
            if trial.left <= 0:
                trial.due, trial.gap, trial.left = self._round + trial.gap, min(2 * trial.gap, LAST_GAP), 1


def down_to_plain(ranked: Sequence[Option], fresh: bool) -> list[Option]:
    """What is worth asking, in order; a ``fresh`` request drafts in any case."""
    place = next(i for i, option in enumerate(ranked) if option.member < 0)
    return list(ranked[:place]) or (list(ranked[1:2]) if fresh else [])


def pooled(parts: Sequence[Hazards]) -> Hazards:
    """What several requests saw together."""
    whole = Hazards()
    for part in parts:
        whole.tries = [a + b for a, b in zip_longest(whole.tries, part.tries, fillvalue=0.0)]
        whole.hits = [a + b for a, b in zip_longest(whole.hits, part.hits, fillvalue=0.0)]
    return whole


def nominal_costs(members: Sequence[Limits]) -> RoundCosts:
    """Costs by size alone, in target calls: a call costs little more with more nodes, a draft by its model's size."""
    drafters = {
        member.name: replace(DrafterCost(0.01, member.relative_cost), survival=(), proposes=1.0) for member in members
    }
    return RoundCosts(TargetCost({1: 1.0, 65: 1.64}), drafters)
