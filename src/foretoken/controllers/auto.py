"""Picks drafter and length by what rounds cost here and how far drafts stand, and drafts nothing where that pays more.

Goodput (SmartSpec, https://arxiv.org/abs/2406.14066) over all members of a group, with costs that are measured while
serving, an order of members for rounds in which the first one has no guess, and trials of what is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any

from foretoken.controllers.ahead import LEAST_ALIKE, Ahead, Alike, doubt_of, own_of
from foretoken.controllers.base import Controller
from foretoken.controllers.costs import RoundCosts
from foretoken.controllers.explaining import as_report, in_words
from foretoken.controllers.hazards import Hazards, at_age, coverage, pooled, survival
from foretoken.controllers.learned import LearnedCosts, found_in
from foretoken.controllers.plans import Option, best_of, error_of, or_any, plans_of, rate_of, rounds_of, seconds_of
from foretoken.controllers.trials import (
    FIRST_GAP,
    FIRST_PLAIN,
    FIRST_TRIALS,
    LATER_TRIALS,
    LONGEST_PLAIN,
    PROBED,
    REPLAN,
    Batch,
    Mean,
    Round,
    State,
    Trial,
)
from foretoken.types import Budget, Context, Limits, StepRecord

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths that are weighed."""
PLAIN = Budget(0, 0)
UNKNOWN = 1 << 20
"""Tokens left where nobody says."""
ENDING = 16
"""With no more tokens than these left nothing is tried."""
NEAR, WAIT = 16, 256
"""Tokens that a model may have to read, besides those of its last draft, for a trial to be cheap; and rounds that the
trial of one that has more to read waits for a better occasion."""
CAUGHT_UP = 2
"""Such tokens with which the time that it takes is still a usual one."""
PADDING = 24
"""Rows of padding in a round from which on it can be told whether the target leaves padding out."""
ALWAYS = 0.97
"""Share of the text from which on a drafter has always guesses: its rounds are all alike, and their cost is known."""
PRIOR_TRIES = 2.0
"""How many drafts the first guess about acceptance is worth."""
SPARE = 8
"""Of rounds of plain decoding, while the plan is kept, one in so many is learned from: they are all alike."""
SETTLED, FEW = 4, 4
"""Tokens at the beginning of an output that are unlike the rest, and drafts from which on nothing is learned of drafts
there: of sampled prose the built-in draft model finds .46 to .58 of the first two tokens, then up to .7."""
OLDER = 2
"""Doublings of texts after which they are planned for anew."""
SAME = 1.01
"""By how much another plan must promise more than the one in use to take its place: new plans are made sooner again."""
LOCAL_KEEP, GENERAL_KEEP = 0.98, 0.9995
"""What a round is worth one round later, for its own request and in general."""


class AutoController(Controller):
    """The default controller.

    Members are ranked by their tokens per second in rounds in which they have a guess; of the plans that ask the best
    ones in this order, down to plain decoding, the one with most tokens per second of the batch is followed
    (:mod:`foretoken.controllers.plans`).  Every member, and plain decoding, is tried again now and then, more and more
    rarely while that changes nothing.

    Args:
        k: longest draft; the drafters' own by default.
    """

    name = "auto"

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 1:
            raise ValueError(f"auto needs k >= 1, not {k}")
        self.k = k
        self._start: RoundCosts | None = None
        self._tried: int | None = None
        self._cold, self._waiting, self._steady, self._pads, self._even = False, False, False, False, False
        self._pending: list[Round] = []
        self._is_new = True
        self._planning_s = 0.0
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
        self._free = {index for index, member in enumerate(self.members) if member.relative_cost == 0}
        self.costs = LearnedCosts(specs, self._start, self._free)
        self.general = {greedy: [self._known(spec) for spec in specs] for greedy in (True, False)}
        self.ages: dict[tuple[bool, int, int], Hazards] = {}
        self.alike = {greedy: [Alike() for _ in specs] for greedy in (True, False)}
        self.nodes: list[dict[int, Mean]] = [{} for _ in specs]  # of drafts by member and depth
        self.batches: dict[int, Batch] = {}
        self._last: Batch | None = None
        self._single: dict[tuple[int, int], float] = {}
        self._thought = (Mean(), Mean())  # seconds of planning in rounds of plain decoding and in others
        self._given: dict[int, Budget] = {}  # by request, for a batch that was planned as a whole

    def _known(self, spec: str) -> Hazards:
        """What a profile says of a member."""
        found = Hazards()
        cost = None if self._start is None else self._start.drafters.get(spec)
        if cost is not None:
            stands = [1.0, *cost.survival]
            found.tries = [16.0 * before for before in stands[:-1]]
            found.hits = [16.0 * after for after in stands[1:]]
            tokens = cost.expected_tokens(len(cost.survival))
            found.covered, found.bare = 16.0 * cost.proposes * tokens, 16.0 * (1.0 - cost.proposes)
        return found

    # -- choosing ----------------------------------------------------------------------------------------------------

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The budget of one request."""
        return self.budgets([context])[0]

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """One plan for the batch: drafts of several members would all be waited for."""
        began = perf_counter()
        if self._tried is None and self._given:
            self._thought[next(iter(self._given.values())).max_depth > 0].count(self._planning_s)
        self._is_new = True
        budgets = self._planned(contexts)
        self._planning_s = perf_counter() - began
        return budgets

    def _planned(self, contexts: Sequence[Context]) -> list[Budget]:
        batch = self._batch(len(contexts))
        batch.round += 1
        requests = [context.request_id for context in contexts]
        if age_among(contexts) // OLDER > batch.age // OLDER:
            batch.until = batch.round  # texts are unlike what they were
        # Where requests have ended, and none has come, the others go on as they did.
        alike = batch is self._last and all(request in self._given for request in requests)
        keeps = alike and self._steady and batch.round < batch.until
        # Planning and learning take time, and rounds may be short: what is seen is learned when it is needed.
        if keeps and self._due(batch, contexts) is None:
            return self._keep(batch, requests)
        self._digest()
        tried = self._due(batch, contexts)  # what was used meanwhile needs no trial
        if keeps and tried is None and batch.round < batch.until:
            return self._keep(batch, requests)
        if not alike:
            batch.until = batch.round  # what others are to do says little of these
            self._single.clear()
        self._cold = tried is not None and tried != self._tried
        self._tried, self.watches, self._last = tried, True, batch
        alone = len(contexts) == 1 and self.state(contexts[0]).fresh  # it drafts soon, whatever the plan
        self._steady = tried is None and not alone
        self._plan_batch(batch, contexts)
        made: dict[int, Budget] = {}  # most requests have the same plan
        plans = [self.state(context).plan for context in contexts]
        budgets = [found_in(made, id(plan), partial(self._as_budget, plan)) for plan in plans]
        self._given = dict(zip(requests, budgets, strict=True))
        return budgets

    def _keep(self, batch: Batch, requests: Sequence[int]) -> list[Budget]:
        """The budgets of the last round once more."""
        self._tried, self._cold, self.watches = None, False, bool(batch.plan) or batch.round % SPARE == 0
        return [self._given[request] for request in requests]

    def _plan_batch(self, batch: Batch, contexts: Sequence[Context]) -> None:
        size, states = len(contexts), [self.state(context) for context in contexts]
        if batch.round >= batch.until:
            self._even = is_even([len(context.tokens) for context in contexts])
            local = [pooled([state.hazards[index] for state in states]) for index in range(len(self.members))]
            general = self._general(contexts)
            left = [remaining(context) for context in contexts]
            catching_up = [self._catching_up_s(index, contexts, left) for index in range(len(self.members))]
            ahead, alike = None, [one.weight for one in self.alike[contexts[0].maker.greedy]]
            if not self._waiting and max(left) < UNKNOWN:
                own = own_of([state.hazards for state in states], local, general, alike)
                ahead = Ahead(left, own, doubt_of(local, general, len(states), alike))
            batch.ranked = self._ranked(local, self.costs, general, size, ahead, catching_up, alike)
            plan = self._best(batch.ranked, self.costs, size, ahead, self._pads, batch.overrun, batch.plan)
            batch.size, batch.age = size, age_among(contexts)
            batch.expected_s, batch.expected_tokens = self._expected(plan, batch.ranked, size)
            # The fewer tokens are left, the less pays what makes requests end at different times.
            batch.follow(plan, max(REPLAN, max(left) // 4) if plan and size > 1 else LONGEST_PLAIN)
        if size == 1 and states[0].fresh:
            batch.until = min(batch.until, batch.round + REPLAN)
        for context, state in zip(contexts, states, strict=True):
            settled = written(context) >= SETTLED
            state.plan = or_any(batch.plan, batch.ranked, state.fresh and settled and size == 1)
            if self._tried is not None:
                tried = next(option for option in batch.ranked if option.member == self._tried)
                if tried.member >= 0 and tried.member not in self._free:
                    length = batch.trials[self._tried].length(tried.depth)
                    tried = replace(tried, depth=min(length, self.depths[self._tried][-1]))
                state.plan = [tried, *(option for option in state.plan if option is not tried)]
            state.fresh = state.fresh and not settled

    def _catching_up_s(self, index: int, contexts: Sequence[Context], left: Sequence[int]) -> float:
        """What it takes, for every token that a request may still write, that the member has to read what was written
        since it was last asked."""
        if index in self._free:
            return 0.0
        unread = sum(max(len(context.tokens) - self.state(context).read[index], 0) for context in contexts)
        return self.costs.reading_s(index, unread) * len(left) / max(sum(left), 1)

    def _general(self, contexts: Sequence[Context]) -> list[Hazards]:
        """What is known of the members in general, for requests that have written as much as these: n-grams find the
        more, the longer a text gets."""
        greedy, age = contexts[0].maker.greedy, age_among(contexts)
        alike = [self.ages.get((greedy, index, age)) for index in range(len(self.members))]
        return [at_age(known, same) if same else known for known, same in zip(self.general[greedy], alike, strict=True)]

    def _batch(self, size: int) -> Batch:
        """Batches of other sizes are another world, but not an unknown one: what costs say of them is tried later."""
        found = self.batches.get(size.bit_length())
        if found is None:
            wait, count = (FIRST_GAP, 1) if self.batches else (0, FIRST_TRIALS)
            choices = [*range(len(self.members)), -1]
            plain = min(count, FIRST_PLAIN)
            trials = {
                choice: Trial(wait + place, left=count if choice >= 0 else plain, probing=2 * PROBED * (count > 1))
                for place, choice in enumerate(choices)
            }
            found = self.batches[size.bit_length()] = Batch(trials, size)
        return found

    def _due(self, batch: Batch, contexts: Sequence[Context]) -> int | None:
        """The choice whose turn it is to be tried; none when the last request is about to end.

        Where texts are of one length, drafts change that, which makes all rounds to come dearer: but for the first
        ones, their trials wait.
        """
        if all(batch.round < trial.due for trial in batch.trials.values()):
            return None
        left = max(remaining(context) for context in contexts)
        if left <= ENDING:
            return None
        lengths = [len(context.tokens) for context in contexts]
        return batch.due(
            lambda choice, late: (
                self._is_ready(choice, late, contexts, left)
                and (choice < 0 or late >= WAIT or batch.trials[choice].left > LATER_TRIALS or not is_even(lengths))
            )
        )

    def _is_ready(self, choice: int, late: int, contexts: Sequence[Context], left: int) -> bool:
        """Whether a trial costs little.

        A model that was not asked for a while has to read all that was written since: its trial waits for the first
        tokens of new requests, but not for the very first ones, which say little; if none comes within ``WAIT`` rounds,
        for one that goes on for longer than what is to be read.
        """
        if choice < 0 or choice in self._free:
            return True
        behind = max(len(context.tokens) - self.state(context).read[choice] for context in contexts)
        first = self._batch(len(contexts)).trials[choice].left > LATER_TRIALS
        settled = first or max(map(written, contexts)) >= SETTLED
        return (settled and behind <= NEAR) or (late >= WAIT and behind <= left)

    def state(self, context: Context) -> State:
        """What is known of a request."""
        found: State | None = context.state.get(self)
        if found is None:
            found = State.of(len(self.members), len(context.tokens))
            context.state[self] = found
        return found

    def _as_budget(self, plan: Sequence[Option]) -> Budget:
        """The first option, with the others for when it has no guess; nothing is asked behind a trial of none."""
        drafting = list(takewhile(lambda option: option.member >= 0, plan))
        budget: Budget | None = None
        for option in reversed(drafting):
            member = option.member if self.grouped else None
            nodes = self.members[option.member].max_nodes
            budget = Budget(option.depth, max(nodes, option.depth), member=member, otherwise=budget)
        return budget or PLAIN

    def _ranked(
        self,
        local: Sequence[Hazards],
        costs: LearnedCosts,
        general: Sequence[Hazards],
        batch: int,
        ahead: Ahead | None = None,
        catching_up: Sequence[float] = (),
        alike: Sequence[float] = (),
    ) -> list[Option]:
        """Every member at its best length, and plain decoding, in the order of their tokens per second."""
        late, weight = catching_up or [0.0] * len(self.members), alike or [LEAST_ALIKE] * len(self.members)

        def worth(option: Option) -> float:
            if ahead is None:
                return option.rate
            return option.rate / ahead.waits(option.member, option.tokens, option.variance, option.alone)

        options = [
            best_of(self._options(index, local[index], general[index], costs, batch, late[index], weight[index]), worth)
            for index in range(len(self.members))
        ]
        plain_s = self._seconds(-1, 0, 1.0, costs, batch)[1]
        alone = min(self._single_s(-1, 0, 1.0) / plain_s, 1.0) if batch > 1 else 1.0
        plain = Option(-1, 0, 1.0, 1.0, 0.0, plain_s, alone=alone)
        return sorted([*options, plain], key=worth, reverse=True)

    def _options(
        self,
        index: int,
        local: Hazards,
        general: Hazards,
        costs: LearnedCosts,
        batch: int,
        late: float = 0.0,
        alike: float = LEAST_ALIKE,
    ) -> Iterator[Option]:
        """What a member can be asked for, from short to long."""
        depths, known = self.depths[index], self.nodes[index]
        # What several requests show together is drawn towards the general picture as each of them is.
        stands = survival(depths[-1], local, general, weight=alike * batch)
        share = coverage(local, general, weight=16.0 * batch)
        tokens, squares, done = 1.0, 0.0, 0
        seen = PRIOR_TRIES + general.drafts
        stays = general.stays
        for depth in depths:
            for place in range(done, depth):
                tokens += stands[place]
                squares += (2 * place + 1) * stands[place]
            done = depth
            nodes = known[depth].value if depth in known else nodes_like(known, depth)
            draft_s, seconds = self._seconds(index, depth, nodes, costs, batch)
            alone = min(self._single_s(index, depth, nodes) / seconds, 1.0) if batch > 1 else 1.0
            variance = squares - (tokens - 1.0) ** 2
            draft_s, seconds = draft_s + late * tokens, seconds + late * tokens
            stood = tuple(stands[:depth])
            yield Option(index, depth, tokens, nodes, draft_s, seconds, share, variance, seen, alone, stood, stays)

    def _seconds(self, index: int, depth: int, nodes: float, costs: LearnedCosts, batch: int) -> tuple[float, float]:
        """Of a draft, and of a whole round in which all requests get one."""
        even = self._even and index < 0
        target_s = costs.target_s(round(batch * nodes), batch, even) if costs.known else 1.0
        draft_s = costs.draft_s(index, depth, batch)
        if draft_s is None:  # by its size, while nothing was measured
            draft_s = self.members[index].relative_cost * depth * target_s
        rest_s = costs.rest_s(batch, round(batch * nodes)) + (self._planning(costs) if index >= 0 else 0.0)
        return draft_s, target_s + draft_s + rest_s

    def _single_s(self, index: int, depth: int, nodes: float) -> float:
        """Of a whole round of a single request: nothing is learned of these while there are the same several ones."""
        known = self._single.get((index, depth))
        if known is None:
            known = self._single[index, depth] = self._seconds(index, depth, nodes, self.costs, 1)[1]
        return known

    def _planning(self, costs: LearnedCosts) -> float:
        """What planning takes more where there are drafts than where there are none: it is learned from every round."""
        plain, drafting = self._thought
        if min(plain.seen, drafting.seen) < REPLAN:
            return 0.0
        return max(drafting.value - plain.value, 0.0) / costs.speed.value

    def _best(
        self,
        ranked: Sequence[Option],
        costs: LearnedCosts,
        batch: int,
        ahead: Ahead | None = None,
        pads: bool = False,
        overrun: Callable[[Sequence[Option]], float] = lambda plan: 1.0,
        current: Sequence[Option] = (),
    ) -> list[Option]:
        """The plan with most tokens per second, without the plain decoding at its end; in doubt the current one."""
        if not costs.known:
            return [option for option in ranked if option.member >= 0]
        planning_s, even = self._planning(costs), self._even

        def worth(plan: Sequence[Option]) -> float:
            more = planning_s if len(plan) > 1 else 0.0
            target_s = partial(costs.target_s, batch=batch, even=even and len(plan) == 1)
            return rate_of(plan, batch, target_s, lambda n: costs.rest_s(batch, n) + more, ahead, pads) / overrun(plan)

        *drafting, plain = sorted(plans_of(ranked), key=len, reverse=True)
        if not drafting:
            return []
        asked = [option.member for option in current]
        worths = [(worth(plan), plan) for plan in drafting]
        most, best = max(worths, key=lambda one: one[0] * (SAME if [o.member for o in one[1][:-1]] == asked else 1.0))
        # Estimates are noisy, and the best of several is too good.
        return best[:-1] if most * (1.0 - error_of(best)) > worth(plain) else []

    def _expected(self, plan: Sequence[Option], ranked: Sequence[Option], size: int) -> tuple[float, float]:
        """What a round of a plan that was just made takes, by its parts, in the costs' own unit, and what it writes."""
        if not self.costs.known or all(option.share > ALWAYS for option in plan):
            return 0.0, 0.0  # nothing to be learned from
        whole = [*plan, next(option for option in ranked if option.member < 0)]
        target_s, rest_s = partial(self.costs.target_s, batch=size), partial(self.costs.rest_s, size)
        return seconds_of(whole, size, target_s, rest_s, self._pads), size * rounds_of(whole)[0]

    # -- telling -----------------------------------------------------------------------------------------------------

    def explain(self, context: Context) -> str:
        """Why a request drafts, or does not, in one line."""
        batch = self._last
        return "" if batch is None else in_words(batch.plan, batch.ranked, [member.name for member in self.members])

    def report(self) -> dict[str, Any]:
        """The plan in use and what the options cost and bring (:func:`.explaining.as_report`)."""
        batch = self._last
        names = [member.name for member in self.members]
        return as_report((), (), names, 0) if batch is None else as_report(batch.plan, batch.ranked, names, batch.size)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, context: Context, record: StepRecord) -> None:
        """Keep the record until something depends on it."""
        if self.watches:
            if self._is_new:
                self._pending.append(Round(self._tried, self._cold, self._planning_s))
                self._is_new = False
            self._pending[-1].seen.append((context, record, len(context.tokens)))

    def finish(self, context: Context) -> None:
        """Learn from its last rounds now: nothing is kept of a request but what it taught."""
        self._digest()
        greedy, state = context.maker.greedy, self.state(context)
        for index, (tries, known) in enumerate(zip(state.tries, self.general[greedy], strict=True)):
            if tries:
                self.alike[greedy][index].count(tries, state.hits[index], known.hits[0] / known.tries[0])

    def _digest(self) -> None:
        """Learn from the rounds since the last time."""
        pending, self._pending = self._pending, []
        for seen in pending:
            self._learn_round(seen)

    def _learn_round(self, seen: Round) -> None:
        asked: list[tuple[int, int]] = []
        most_behind = behind = 0
        for context, record, length in seen.seen:
            state, drafted = self.state(context), self._who(record)
            before = length - 1 - record.num_accepted_tokens
            for option in state.plan:
                if option.member < 0:
                    break
                answers = option.member == drafted
                unread = before - state.read[option.member]
                self._learn(context, state, option, record, answers, length)
                most_behind = max(most_behind, unread)
                if answers:
                    asked.append((drafted, option.depth))
                    behind += unread
                    break
        record = seen.seen[-1][1]
        self._waiting = record.waiting > 0
        counts = [record.num_nodes for _, record, _ in seen.seen]
        if len(counts) == record.batch_size and len(counts) * max(counts) - sum(counts) >= PADDING:
            self._pads = record.round_nodes >= record.batch_size * max(counts)
        # What a mixture of drafts cost says nothing of its parts.
        member, depth = asked[0] if len(set(asked)) == 1 else (None, 0)
        usual = self.costs.knows(record)
        # The first round of a trial finds cold caches, and what a drafter takes that has to catch up is not its price.
        priced = most_behind <= CAUGHT_UP and not seen.cold
        if priced:
            starts = [length - 1 - record.num_accepted_tokens for _, record, length in seen.seen]
            even = not asked and len(starts) == record.batch_size and is_even(starts)
            self.costs.observe(record, member, depth, len(asked), seen.planning_s, even, seen.tried is not None)
        elif member is not None and member not in self._free and behind > 0 and not seen.cold:
            self.costs.observe_reading(record, member, depth, len(asked), behind, seen.planning_s)
        batch = self._batch(record.batch_size)
        if usual and seen.tried is None and record.batch_size == batch.size:
            tokens = sum(1 + record.num_accepted_tokens for _, record, _ in seen.seen)
            batch.took((record.total_s - seen.planning_s) / (self.costs.speed.value * self.costs.over), tokens)
        batch.reschedule({member for member, _ in asked} or {-1}, seen.tried, priced, self._free)

    def _who(self, record: StepRecord) -> int:
        if record.num_draft_tokens == 0:
            return -1
        return record.member if self.grouped else 0

    def _learn(
        self, context: Context, state: State, option: Option, record: StepRecord, answers: bool, length: int
    ) -> None:
        member, greedy, accepted = option.member, context.maker.greedy, record.num_accepted_tokens
        tokens = 1 + accepted
        before = length - tokens
        age = before - context.prompt_length
        left = remaining(context, before)
        depth = min(option.depth, left - 1) if answers else 0  # a draft is cut short where the text ends
        local, general = state.hazards[member], self.general[greedy][member]
        early = age < SETTLED and general.drafts >= FEW
        bare = 0.0 if answers else general.bare_tokens(tokens)
        settled = 0 if early else depth
        local.count(LOCAL_KEEP, settled, accepted, tokens - bare, bare)
        general.count(GENERAL_KEEP, settled, accepted, tokens - bare, bare)
        if answers and not early:
            state.tries[member] += 1
            state.hits[member] += accepted > 0
        if state.bare[member] == before:
            general.go_on(answers)
        state.bare[member] = length if tokens == 1 and not answers else 0
        alike = found_in(self.ages, (greedy, member, age_of(age)), Hazards)
        alike.count(GENERAL_KEEP, depth, accepted, tokens - bare, bare)
        state.read[member] = length
        if answers and left > option.depth:
            found_in(self.nodes[member], depth, Mean).count(record.num_nodes)


def remaining(context: Context, length: int = 0) -> int:
    """Tokens that a request may still write, or could when it had this ``length``."""
    return context.max_length - (length or len(context.tokens)) if context.max_length else UNKNOWN


def nodes_like(known: Mapping[int, Mean], depth: int) -> float:
    """Nodes of a draft of a depth that was not asked for, the root included: as many per level as of the nearest one
    that was.  Guesses may be shorter than what is asked for, and trees are wider."""
    if not known:
        return 1.0 + depth
    near = min(known, key=lambda seen: abs(seen - depth))
    return 1.0 + depth * (known[near].value - 1.0) / near


def is_even(lengths: Sequence[int]) -> bool:
    """Whether several texts have one length."""
    return len(lengths) > 1 and len(set(lengths)) == 1


def written(context: Context) -> int:
    """Tokens that a request has written."""
    return len(context.tokens) - context.prompt_length


def age_of(tokens: int) -> int:
    """How far a request is, by the tokens that it has written: a step for each doubling."""
    return max(tokens, 0).bit_length()


def age_among(contexts: Sequence[Context]) -> int:
    """How far several requests are on average."""
    return age_of(sum(map(written, contexts)) // len(contexts))
