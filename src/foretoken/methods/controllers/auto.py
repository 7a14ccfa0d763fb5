"""The default controller: the drafter and length, or none, with most tokens per second of the batch (goodput).

SmartSpec (https://arxiv.org/abs/2406.14066) over all members of a group: calibrated costs
(:mod:`foretoken.methods.controllers.cost_model`), discounted acceptance statistics
(:mod:`foretoken.methods.controllers.acceptance_model`), the best of all plans
(:mod:`foretoken.methods.controllers.plan`), and exploration by discounted upper confidence bounds (Garivier and
Moulines, https://arxiv.org/abs/0805.3415).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretoken.core import Budget, Context, Limits, StepRecord, check_least
from foretoken.core.costs import RoundCosts, speedup
from foretoken.methods.controllers.acceptance_model import POPULATION_KEEP, AcceptanceModel, DraftCounts
from foretoken.methods.controllers.base import Controller
from foretoken.methods.controllers.cost_model import SAMPLES, CostModel
from foretoken.methods.controllers.plan import Draft, RoundPlan, best_drafts, best_plan, planned

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft lengths to compare."""
KEPT, KNOWN = 8, 8
"""Rounds for which a plan is kept for the same requests, and drafts of evidence that it needs; other plans are
reconsidered every round."""
CLOSE = 1.5
"""Highest estimated speedup at which the cost of plain decoding is measured again."""
CREDIT, EARNED = 0.6, 0.015
"""Exploration credit in plain rounds, and the share of a plain round that each token earns back."""
UNKNOWN, ENDING = 1 << 20, 16
"""Remaining tokens if no limit is known; and the remaining tokens at which measuring ends, because drafts would be
truncated."""


class AutoController(Controller):
    """Maximises goodput over drafters, draft lengths and plain decoding.

    Args:
        k: longest draft; the drafters' own by default.
    """

    name = "auto"
    weighs_costs = uses_costs = True
    keep = POPULATION_KEEP

    def __init__(self, k: int | None = None) -> None:
        check_least(self.name, 1, k=k)
        self.k = k
        self._start: RoundCosts | None = None
        self.attach(Limits("", 5, 64))

    def attach(self, limits: Limits) -> None:
        self.grouped = bool(limits.members)
        self.members = tuple(limits.members) or (limits,)
        longest = [min(member.max_depth, self.k or member.max_depth) for member in self.members]
        self.depths = [[*(depth for depth in DEPTHS if depth < most), most] for most in longest]
        self._reset()

    def start_from(self, costs: RoundCosts) -> None:
        self._start = costs
        self._reset()

    def _reset(self) -> None:
        self.costs = CostModel(self.members, self._start)
        self.acceptance = AcceptanceModel(self.members, self.keep)
        for index, member in enumerate(self.members):
            cost = None if self._start is None else self._start.drafters.get(member.name)
            if cost is not None and cost.survival:
                self.acceptance.start_from(index, cost.survival, cost.proposes)
        self.width = [1.0] * len(self.members)  # draft nodes per requested level
        self.plan = self.chosen = self.rival = RoundPlan()  # current, best, and best with drafts
        self._weighed: list[Draft] = []
        self._budget, self._requests, self._keep = Budget(0, 0), frozenset[int](), 0
        self._to_measure: dict[int, list[tuple[int, int]]] = {}  # by size of the batch
        self._measured: tuple[list[tuple[int, int]], tuple[int, int]] | None = None  # taken from one of these
        self._credit = CREDIT
        self._waited, self._again = 0, False  # choices since plain decoding was measured, and whether to measure again
        self._repeats: dict[int, int] = {}  # number of these measurements, by batch size
        self._measures, self._pads, self._batch, self._records = False, False, 1, list[tuple[Context, StepRecord]]()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def budget(self, context: Context, batch_size: int) -> Budget:
        return self.budgets([context])[0]

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        """One plan for the batch, because a round waits for the drafts of all its members."""
        self._digest()
        requests = frozenset(context.request_id for context in contexts)
        size = len(contexts).bit_length()
        measured = self._next_to_measure(size, contexts)
        alike = size == self._batch.bit_length() and requests <= self._requests
        if measured or self._measures or self._keep <= 0 or not alike:
            self._requests, self._batch = requests, len(contexts)
            self.plan = measured or self._choose(contexts)
            self._keep = KEPT if self._pays(self.plan) else 1
            self._measures = measured is not None or self.plan is not self.chosen
            self._budget = self.plan.budget(self.members, self.grouped)
        self._keep -= 1
        return [self._budget] * len(contexts)

    def _next_to_measure(self, size: int, contexts: Sequence[Context]) -> RoundPlan | None:
        """The next round of the calibration, at a new batch size (within a factor of two): plain decoding, and every
        drafter with a model at 1 and 4 tokens (three times at the first batch size, else once), without what was
        measured before."""
        todo = self._to_measure.get(size)
        if todo is None:
            measured = None if self._start is None else self._start.drafters
            models = [i for i, m in enumerate(self.members) if m.relative_cost and m.name not in (measured or ())]
            lengths = {index: sorted({1, min(4, self.depths[index][-1])}) for index in models}
            plain = [(-1, 0)] if measured is None else []
            times, cold = (1, 1) if self._to_measure else (3, self.costs.SKIPPED)  # from cold rounds nothing is learned
            drafts = [(index, depth) for index in models for depth in lengths[index]]
            todo = self._to_measure[size] = plain * (cold + times) + drafts * times
        batch, self._measured = len(contexts), None
        while todo and max(map(remaining, contexts)) > ENDING:
            member, depth = todo.pop(0)
            if member < 0:
                return RoundPlan()
            if self.costs.draft_s(member, depth, batch) < depth * self.costs.round_s(batch, batch):  # else none pays
                self._measured = todo, (member, depth)
                return RoundPlan((Draft(member, depth, 1.0, 1.0 + depth, 0.0, 1.0),))
        return None

    def _choose(self, contexts: Sequence[Context]) -> RoundPlan:
        self._weighed = [draft for index in range(len(self.members)) for draft in self._drafts(index, contexts)]
        self.chosen, rival = best_plan(self._weighed, len(contexts), self.costs, self._pads)
        self.rival = rival or self.chosen
        if self._credit < 0 and self.chosen.drafts:
            # The exploration credit is used up: choose by expected values, not by upper bounds.
            expected = [replace(draft, hoped=draft.tokens) for draft in self._weighed]
            self.chosen = best_plan(expected, len(contexts), self.costs, self._pads)[0]
        if self._is_doubted(len(contexts)):
            return self.rival
        return RoundPlan() if self._plain_is_due(len(contexts)) else self.chosen

    def _is_doubted(self, batch: int) -> bool:
        """Whether to try drafts that were rejected for a cost no round has confirmed, although they would pay at a
        plain round's cost. Measurements at load may be wrong, and plain rounds do not correct them."""
        if self.chosen.drafts or not self.rival.drafts or self._credit < CREDIT:
            return False
        nodes = batch * max(draft.nodes for draft in self.rival.drafts)
        drafting = sum(draft.seconds for draft in self.rival.drafts)
        plain_s = self.costs.round_s(batch, batch)
        return not self.costs.was_seen(batch, nodes) and self.rival.hoped * plain_s > plain_s + drafting

    def _pays(self, plan: RoundPlan) -> bool:
        """Whether a plan is expected to be as fast as plain decoding by its evidence, not only by its upper bound."""
        return plan.tokens * self._plain_s >= plan.seconds and all(draft.evidence >= KNOWN for draft in plan.drafts)

    def _plain_is_due(self, batch: int) -> bool:
        """Whether to decode one round plainly to measure its cost; two rounds after drafts of a network.

        At first, caches are cold or another process interferes. Drafts are measured again anyway, plain decoding is
        not.
        """
        if self._again:
            self._again = False
            return True
        # A round with more requests than budgets (one with its own tree) yields no measurement of plain decoding at
        # this batch size. Attempts count as well, or it would be due forever.
        rounds = max(self.costs.plain_rounds(batch), self._repeats.get(batch, 0))
        self._waited += 1
        close = self.chosen.goodput * self.costs.round_s(batch, batch) < CLOSE
        if not (self.chosen.drafts and close and rounds < SAMPLES and self._waited > rounds):
            return False
        self._waited, self._repeats[batch] = 0, rounds + 1
        self._again = any(self.members[draft.member].relative_cost for draft in self.chosen.drafts)
        return True

    def _drafts(self, index: int, contexts: Sequence[Context]) -> list[Draft]:
        batch, depths = len(contexts), self._open_depths(index, contexts)
        requests = [(context.sampler.greedy, self.state(context)[index]) for context in contexts]
        outlook = self.acceptance.batch_outlook(index, requests, depths[-1])
        drafts, tokens, squares, first = [], 1.0, 0.0, 0
        for depth in depths:
            for position in range(first, depth):
                tokens += outlook.survival[position]
                squares += (2 * position + 1) * outlook.survival[position]
            first = depth
            # Upper bound: 1.5 standard errors above the mean.
            variance = max(squares - (tokens - 1.0) ** 2, 0.0)
            hoped = tokens + 1.5 * (variance / (outlook.drafts + 1.0)) ** 0.5
            seconds, nodes = self.costs.draft_s(index, depth, batch), 1.0 + depth * self.width[index]
            hoped = min(hoped, 1.0 + depth)
            drafts.append(Draft(index, depth, tokens, nodes, seconds, hoped, outlook.share, outlook.drafts))
        return drafts

    def _open_depths(self, index: int, contexts: Sequence[Context]) -> list[int]:
        """The lengths of a member to compare.

        The engine truncates drafts at the remaining room, so longer ones gain nothing, and the probabilities of a
        hundred million depths take longer than the generation.
        """
        *shorter, longest = self.depths[index]
        room = max(max(map(remaining, contexts)) - 1, DEPTHS[-1])
        return [*shorter, min(longest, room)]

    # -- learning ----------------------------------------------------------------------------------------------------

    def state(self, context: Context) -> list[DraftCounts]:
        """Acceptance counts of a request, by member."""
        counts: list[DraftCounts] | None = context.state.get(self)
        if counts is None:
            counts = context.state[self] = [DraftCounts() for _ in self.members]
        return counts

    def observe(self, context: Context, record: StepRecord) -> None:
        """Collect the round's records, which :meth:`budgets` and :meth:`finish` evaluate together."""
        self._records.append((context, record))

    def finish(self, context: Context) -> None:
        """Evaluate the last round now, because the request's state goes."""
        self._digest()

    def _digest(self) -> None:
        if not self._records:
            return
        records, self._records = self._records, []
        if self._measured is not None and not any(record.allowed for _, record in records):
            todo, pair = self._measured  # no request could draft
            todo.insert(0, pair)
        self._measured = None
        self.acceptance.tick()
        num_asked: dict[tuple[int, int], int] = {}
        for context, record in records:
            before = len(context.tokens) - 1 - record.num_accepted_tokens
            answered = -1 if record.num_draft_tokens == 0 else record.member if self.grouped else 0
            for draft in self.plan.drafts if record.allowed else ():  # else no drafter was asked
                depth = min(draft.depth, record.allowed) if draft.member == answered else 0
                counts = self.state(context)[draft.member]
                self.acceptance.add(context.sampler.greedy, draft.member, counts, depth, record.num_accepted_tokens)
                if draft.member == answered:
                    num_asked[answered, draft.depth] = num_asked.get((answered, draft.depth), 0) + 1
                    width = record.num_draft_tokens / max(depth, 1)
                    self.width[answered] += 0.05 * (width - self.width[answered])
                    break
            self._learn_beside(context, context.tokens[before:])
        num_asked = self._calls(num_asked)
        self._account(records, num_asked)
        record = records[-1][1]
        nodes = [record.num_nodes for _, record in records]
        if len(nodes) == record.batch_size and max(nodes) > min(nodes):
            self._pads = record.round_nodes >= record.batch_size * max(nodes)
        member, depth = next(iter(num_asked)) if len(num_asked) == 1 else (-1, 0)
        self.costs.observe(record, member, depth, sum(num_asked.values()))

    def _calls(self, num_asked: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """Number of requests that were drafted for, by member and depth; override if drafts are cut before they are
        scored."""
        return num_asked

    def _learn_beside(self, context: Context, tokens: Sequence[int]) -> None:
        """Learn from trees of members that were not called, by the tokens that were generated."""
        for member, tree in context.beside.items():
            depth, counts = min(max(tree.depths), len(tokens)), self.state(context)[member]
            self.acceptance.add(context.sampler.greedy, member, counts, depth, tree.matched(tokens))
        context.beside = {}

    def _account(self, records: Sequence[tuple[Context, StepRecord]], drafts: Mapping[tuple[int, int], int]) -> None:
        """Add the round's gain or loss against plain decoding to the credit, by modelled costs, so that pauses of the
        machine do not count.

        The credit never exceeds :data:`CREDIT`, so that no request pays for much exploration (conservative bandits,
        https://arxiv.org/abs/1602.04282, with a limit).
        """
        batch, record = len(records), records[-1][1]
        plain_s = self.costs.round_s(batch, batch)
        seconds = self.costs.round_s(batch, record.round_nodes or record.num_nodes)
        seconds += sum(self.costs.draft_s(member, depth, batch) for member, depth in drafts)
        tokens = sum(1 + record.num_accepted_tokens for _, record in records) / batch
        self._credit = min(self._credit + tokens * (1.0 + EARNED) - seconds / plain_s, CREDIT)

    # -- reports -----------------------------------------------------------------------------------------------------

    def explain(self, context: Context) -> str:
        """Cost and gain of the plan in plain rounds; for plain decoding, those of the best drafts."""
        return self.why

    @property
    def why(self) -> str:
        """The reason in one line; all requests of a batch have the same plan."""
        cost = self.rival.described(self.members, self._plain_s)
        return (
            f"{'drafts' if self.chosen.drafts else 'plain'}: {cost if self.rival.drafts else 'nothing is measured yet'}"
        )

    def report(self) -> dict[str, Any]:
        """The plan with its reason, every member at its best length (costs in plain rounds), and the drift of costs."""
        plain_s, options = self._plain_s, best_drafts(self._weighed, self._batch, self.costs)
        names = [member.name for member in self.members]
        rows = [
            {
                "drafter": names[draft.member],
                "depth": draft.depth,
                "tokens": round(draft.tokens, 3),
                "cost": round(planned([draft], self._batch, self.costs, self._pads).seconds / plain_s, 3),
                "share": round(draft.share, 3),
            }
            for draft in options
        ]
        predicted = speedup(self.chosen.tokens, self.chosen.seconds, plain_s) if self._weighed else None
        return {
            "batch": self._batch,
            "plan": [names[draft.member] for draft in self.chosen.drafts],
            "options": rows,
            "predicted_speedup": None if predicted is None else round(predicted, 3),
            "why": self.why,
            "drift": self.costs.drift,
            "factors": dict(zip(names, self.costs.factors, strict=True)),
        }

    @property
    def _plain_s(self) -> float:
        return self.costs.round_s(self._batch, self._batch)


def remaining(context: Context) -> int:
    """Tokens that a request may still generate."""
    return context.max_length - len(context.tokens) if context.max_length else UNKNOWN
