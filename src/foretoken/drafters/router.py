"""One of several drafters guesses in each round: the one that has been writing most tokens for its cost.

A bandit over drafters, as BanditSpec (https://arxiv.org/abs/2505.15141) plays it with UCB; here old rounds count less
(discounted UCB, https://arxiv.org/abs/0805.3415), because text changes, and what drafting costs is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.drafters.base import BuildContext, Drafter
from foretoken.drafters.group import GroupDrafter, Part, Proposal, ask
from foretoken.models.base import LanguageModel
from foretoken.types import Budget, Context, Kind, Limits, Scores, TokenTree, Verdict

UNKNOWN_COST = 0.1
"""Cost of a draft token of a model whose size is not known, in target steps."""


@dataclass
class Record:
    """What a member has done for one request; a round counts less the older it is.

    Attributes:
        rounds: rounds that it drafted for.
        drafted: draft tokens in them.
        accepted: those that stood.
    """

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def fade(self, keep: float) -> None:
        """A round has passed."""
        self.rounds, self.drafted, self.accepted = self.rounds * keep, self.drafted * keep, self.accepted * keep

    def add(self, drafted: int, accepted: int) -> None:
        """A round that it drafted for."""
        self.rounds, self.drafted, self.accepted = self.rounds + 1, self.drafted + drafted, self.accepted + accepted


class RouterDrafter(GroupDrafter):
    """Lets the member draft that promises most tokens per target step; when it has nothing to say, the next best.

    The choice looks at nothing but the request's own past.

    Args:
        drafters: the members, those that are tried first first.
        costs: per member what one draft token costs, in target steps; by default :func:`cost_of`.
        explore: how much uncertainty is worth, in tokens; 0 never goes back to a member out of curiosity.
        prior: accepted tokens that a member is credited with for one round before its first.
        memory: rounds after which a round counts 1/e.
        target: the model that is drafted for, whose size the default costs need.

    Raises:
        ValueError: an option outside its range, no member, one member twice, or different vocabularies.
    """

    name = "router"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Sequence[float] = (),
        explore: float = 0.5,
        prior: float = 1.0,
        memory: float = 5.0,
        target: LanguageModel | None = None,
    ) -> None:
        super().__init__(drafters)
        if costs and len(costs) != len(drafters):
            raise ValueError(f"router has {len(costs)} costs for {len(drafters)} drafters: give one per drafter")
        if not all(math.isfinite(c) and c >= 0 for c in (*costs, explore, prior)):
            raise ValueError("router needs costs >= 0, explore >= 0 and prior >= 0")
        if not memory >= 1:
            raise ValueError(f"router needs memory >= 1, not {memory}")
        self.costs = tuple(costs) or tuple(cost_of(member, target) for member in drafters)
        self.explore, self.prior, self.keep = explore, prior, math.exp(-1.0 / memory)
        self.max_nodes = max(member.max_nodes for member in drafters)
        self.runs_target = any(member.runs_target for member in drafters)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        drafters: str | None = None,
        costs: str = "",
        **options: Any,
    ) -> RouterDrafter:
        """From a spec ``router[,drafters=(A|B|...)][,costs=0.1|0]``; by default all that need no training.

        Raises:
            ValueError: a path, costs that are no numbers, or members that are unknown or do not fit.
        """
        if path is not None:
            raise ValueError("drafter 'router' takes no path: router,drafters=(model:PATH|ngram)")
        return cls(context.members(drafters), parse_costs(costs), target=context.target, **options)

    @property
    def draws_trees(self) -> bool:
        """Whether any member's proposals can branch."""
        return any(member.draws_trees for member in self.drafters)

    @property
    def proposals(self) -> frozenset[tuple[Kind, bool]]:
        """All that any member proposes: a verifier must be right for whichever is chosen."""
        return frozenset().union(*(member.proposals for member in self.drafters))

    @property
    def limits(self) -> Limits:
        """With those of the members, which a controller may choose from."""
        members = zip(self.drafters, self.costs, strict=True)
        return replace(super().limits, members=tuple(replace(m.limits, relative_cost=cost) for m, cost in members))

    def records(self, context: Context) -> list[Record]:
        """What every member has done for a request."""
        found: list[Record] | None = context.state.get((self, "records"))
        if found is None:
            found = context.state[self, "records"] = [Record() for _ in self.drafters]
        return found

    def ranking(self, context: Context) -> list[int]:
        """The members, the most promising first; those that never drafted come before all others."""
        records = self.records(context)
        curious = self.explore * math.sqrt(math.log(1.0 + sum(record.rounds for record in records)))

        def promise(index: int) -> float:
            record = records[index]
            if record.rounds == 0.0:
                return math.inf
            known = record.rounds + 1.0  # the prior counts as a round
            tokens = 1.0 + (record.accepted + self.prior) / known + curious / math.sqrt(known)
            return tokens / (1.0 + self.costs[index] * record.drafted / record.rounds)

        return sorted(range(len(self.drafters)), key=promise, reverse=True)

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Ask every request's best member; where it guesses nothing, the next one.

        A budget that names a member gets this one's guess, or that of the budget's alternative.
        """
        orders = [self._order(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        trees: list[TokenTree | None] = [None] * len(contexts)
        waiting = list(range(len(contexts)))
        for place in range(max(map(len, orders))):
            asked: dict[int, list[int]] = {}
            for i in waiting:
                if place < len(orders[i]):
                    asked.setdefault(orders[i][place][0], []).append(i)
            waiting = []
            for index in sorted(asked):
                some = asked[index]
                found = ask(self.drafters[index], [contexts[i] for i in some], [orders[i][place][1] for i in some])
                for i, tree in zip(some, found, strict=True):
                    if len(tree) > 1:
                        trees[i] = self._owned(contexts[i], index, tree, is_choice=budgets[i].member is None)
                    else:
                        waiting.append(i)
        return [TokenTree.root_only(c.root) if tree is None else tree for tree, c in zip(trees, contexts, strict=True)]

    def _order(self, context: Context, budget: Budget) -> list[tuple[int, Budget]]:
        """The members to ask, the first one first, each with its budget."""
        if budget.member is None:
            return [(index, budget) for index in self.ranking(context)]
        chosen: list[tuple[int, Budget]] = []
        choice: Budget | None = budget
        while choice is not None:
            if choice.member is None or not 0 <= choice.member < len(self.drafters):
                raise ValueError(f"router has no member {choice.member}: it has {len(self.drafters)}, from 0 on")
            chosen.append((choice.member, choice))
            choice = choice.otherwise
        return chosen

    def _owned(self, context: Context, index: int, tree: TokenTree, is_choice: bool) -> TokenTree:
        """A member's tree with its name on it; what becomes of it is of interest to members that look, and to the
        router if it was its own choice."""
        owned = tree.guessed_by(index)
        if is_choice or self._looking:
            context.state[self] = Proposal(owned, {index: Part(tree, range(len(tree)))}, is_choice)
        return owned

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Credit the member that drafted, if it was chosen here, and show the round to all."""
        last: Proposal | None = context.state.get(self)
        if last is None and not self._looking:
            return
        if last is not None and last.is_choice and last.tree is tree:
            records = self.records(context)
            for record in records:
                record.fade(self.keep)
            (index,) = last.parts
            records[index].add(tree.num_drafts, len(verdict.path))
        super().observe(context, tree, scores, verdict)

    def finish(self, context: Context) -> None:
        """Forget the records too."""
        super().finish(context)
        context.state.pop((self, "records"), None)


def cost_of(drafter: Drafter, target: LanguageModel | None) -> float:
    """What one draft token costs, in target steps.

    A drafter may say so itself (``relative_cost``).  A draft model costs its share of the target's bytes, because
    reading weights is what a step takes; a drafter that runs no model costs nothing, a group as much as its dearest
    member.
    """
    stated: float | None = getattr(drafter, "relative_cost", None)
    if stated is not None:
        return stated
    if isinstance(drafter, GroupDrafter):
        return max(cost_of(member, target) for member in drafter.drafters)
    model = getattr(drafter, "model", None)
    if not isinstance(model, LanguageModel):
        return 0.0
    if target is None or not model.weight_bytes or not target.weight_bytes:
        return UNKNOWN_COST
    return model.weight_bytes / target.weight_bytes


def parse_costs(text: str) -> tuple[float, ...]:
    """``"0.1|0"`` -> ``(0.1, 0.0)``.

    Raises:
        ValueError: not numbers joined by ``|``.
    """
    try:
        return tuple(float(part) for part in text.split("|")) if text else ()
    except ValueError:
        raise ValueError(f"costs={text!r} must be one number per drafter joined by |, for example 0.1|0") from None
