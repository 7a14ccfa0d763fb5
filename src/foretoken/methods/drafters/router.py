"""One of several drafters guesses in each round: whichever the controller names.

The group has no policy of its own.  Which member pays is a matter of measured cost and acceptance, which controllers
weigh (``auto``, ``bandit``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from foretoken.core import Budget, Context, Limits, TokenTree
from foretoken.methods.drafters.base import BuildContext, Drafter
from foretoken.methods.drafters.group import GroupDrafter, Part, Proposal, ask
from foretoken.models.base import LanguageModel


class RouterDrafter(GroupDrafter):
    """Lets the member draft that the controller's budget names, and its alternatives where that one guesses nothing.

    A budget that names nobody goes to the cheapest member first, then to the next one.

    Args:
        drafters: the members.
        costs: per member what one draft token costs, in target steps; by default what it says itself
            (:meth:`~foretoken.methods.drafters.base.Drafter.cost_beside`).
        target: the model that is drafted for, whose size the default costs need.

    Raises:
        ValueError: a cost below 0, no member, one member twice, or different vocabularies.
    """

    name = "router"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Sequence[float] = (),
        target: LanguageModel | None = None,
    ) -> None:
        super().__init__(drafters)
        if costs and len(costs) != len(drafters):
            raise ValueError(f"router has {len(costs)} costs for {len(drafters)} drafters: give one per drafter")
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
            raise ValueError("router needs costs >= 0")
        self.target_bytes = 0 if target is None else target.weight_bytes
        sizes = [self.target_bytes or member.target_bytes for member in drafters]
        own = (member.cost_beside(size) for member, size in zip(drafters, sizes, strict=True))
        self.costs = tuple(costs) or tuple(own)
        self._cheapest_first = sorted(range(len(drafters)), key=self.costs.__getitem__)
        self.max_nodes = max(member.max_nodes for member in drafters)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        drafters: str | None = None,
        costs: str = "",
    ) -> RouterDrafter:
        """From a spec ``router[,drafters=(A|B|...)][,costs=0.1|0]``; by default all that need no training.

        Raises:
            ValueError: a path, costs that are no numbers, or members that are unknown or do not fit.
        """
        if path is not None:
            raise ValueError("drafter 'router' takes no path: router,drafters=(model:PATH|ngram)")
        return cls(context.members(drafters), parse_costs(costs), target=context.target)

    @property
    def limits(self) -> Limits:
        """With those of the members, which a controller may choose from."""
        members = zip(self.drafters, self.costs, strict=True)
        return replace(super().limits, members=tuple(replace(m.limits, relative_cost=cost) for m, cost in members))

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Ask the member that each budget names; where it guesses nothing, the next one."""
        orders = [self._order(budget) for budget in budgets]
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
                        trees[i] = self._owned(contexts[i], index, tree)
                    else:
                        waiting.append(i)
        return [TokenTree.root_only(c.root) if tree is None else tree for tree, c in zip(trees, contexts, strict=True)]

    def _order(self, budget: Budget) -> list[tuple[int, Budget]]:
        """The members to ask, the first one first, each with its budget."""
        if budget.member is None:
            return [(index, budget) for index in self._cheapest_first]
        chosen: list[tuple[int, Budget]] = []
        choice: Budget | None = budget
        while choice is not None:
            if choice.member is None or not 0 <= choice.member < len(self.drafters):
                raise ValueError(f"router has no member {choice.member}: it has {len(self.drafters)}, from 0 on")
            chosen.append((choice.member, choice))
            choice = choice.otherwise
        return chosen

    def _owned(self, context: Context, index: int, tree: TokenTree) -> TokenTree:
        """A member's tree with its name on it; what becomes of it is of interest to members that look."""
        owned = tree.guessed_by(index)
        if self._looking:
            context.state[self] = Proposal(owned, {index: Part(tree, range(len(tree)))})
        return owned


def parse_costs(text: str) -> tuple[float, ...]:
    """``"0.1|0"`` -> ``(0.1, 0.0)``.

    Raises:
        ValueError: not numbers joined by ``|``.
    """
    try:
        return tuple(float(part) for part in text.split("|")) if text else ()
    except ValueError:
        raise ValueError(f"costs={text!r} must be one number per drafter joined by |, for example 0.1|0") from None
