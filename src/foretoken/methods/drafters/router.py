"""A group in which one of several drafters drafts in each round, as chosen by the controller.

Without a rule the group has no policy.  Which member pays off depends on measured cost and acceptance, which
controllers weigh (``auto``, ``bandit``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from foretoken.core import Budget, Context, Limits, TokenTree
from foretoken.core.outside import is_outside
from foretoken.methods.drafters.base import BuildContext, Drafter
from foretoken.methods.drafters.group import GroupDrafter, MemberTree, Proposal, ask
from foretoken.methods.drafters.guess_rules import DraftRule
from foretoken.methods.drafters.outside import check_proposal
from foretoken.methods.drafters.sources import SourceDraft, SourceDrafter
from foretoken.models.base import LanguageModel


class RouterDrafter(GroupDrafter):
    """Drafts with the member that the controller's budget names, or with an alternative if that one drafts nothing.

    A budget without a member goes to the cheapest member first, then to the next one.

    Args:
        drafters: the members; in a spec joined by ``|``, and by default those that ``auto``
            chooses from and those that copy text.
        costs: per member the cost of a draft token in target steps, in a spec joined by ``|``; by default its own
            estimate (``cost_beside``).
        target: the target model, whose size the default costs need.
        rule: ``cost``: the member that the controller names, else the cheapest one first; or compare the drafts of
            copying members, and be a single drafter to a controller: ``expected``, most expected accepted tokens;
            ``match``, the longest matching n-gram.
        least: minimum estimate of a draft; if none reaches it, the last member drafts, and if that one has no draft
            either, the best draft is used after all.
        bias: with ``rule=match``, per member by how many tokens its match must be longer than those of others.
    """

    name = "router"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Sequence[float] = (),
        target: LanguageModel | None = None,
        rule: str = "cost",
        least: float = 0.0,
        bias: Sequence[float] = (),
    ) -> None:
        super().__init__(drafters)
        self.rule = DraftRule.over(rule, least, bias, self.drafters)
        if costs and len(costs) != len(drafters):
            raise ValueError(f"router has {len(costs)} costs for {len(drafters)} drafters: give one per drafter")
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
            raise ValueError("router needs costs >= 0")
        self.target_bytes = 0 if target is None else target.weight_bytes
        sizes = [self.target_bytes or member.target_bytes for member in drafters]
        defaults = (member.cost_beside(size) for member, size in zip(drafters, sizes, strict=True))
        self.costs = tuple(costs) or tuple(defaults)
        self._cheapest_first = sorted(range(len(drafters)), key=self.costs.__getitem__)
        self._copiers = [
            i for i, drafter in enumerate(drafters) if isinstance(drafter, SourceDrafter) and not self.costs[i]
        ]
        self.max_nodes = max(member.max_nodes for member in drafters)

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        drafters: str | None = None,
        costs: str = "",
        rule: str = "cost",
        least: float = 0.0,
        bias: str = "",
    ) -> RouterDrafter:
        """Build from a spec ``router[,drafters=(A|B|...)][,costs=0.1|0][,rule=expected][,least=1]``."""
        if path is not None:
            raise ValueError("drafter 'router' takes no path: router,drafters=(model:PATH|ngram)")
        numbers, biases = parse_costs(costs), parse_costs(bias, "bias")
        return cls(context.members(drafters), numbers, context.target, rule, least, biases)

    @property
    def limits(self) -> Limits:
        """Limits with those of the members, among which a controller may choose without a rule."""
        if self.rule is not None:
            return super().limits
        members = zip(self.drafters, self.costs, strict=True)
        return replace(super().limits, members=tuple(replace(m.limits, relative_cost=cost) for m, cost in members))

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Let the member draft that each budget names, and the next one if its draft is empty."""
        trees: list[TokenTree | None] = [None] * len(contexts)
        spare = self._weigh(self.rule, contexts, budgets, trees) if self.rule is not None else {}
        orders = [self._order(budget) for budget in budgets]
        waiting = [i for i, tree in enumerate(trees) if tree is None]
        for turn in range(max((len(orders[i]) for i in waiting), default=0)):
            groups: dict[int, list[int]] = {}
            for i in waiting:
                if turn < len(orders[i]):
                    groups.setdefault(orders[i][turn][0], []).append(i)
            waiting = []
            for index in sorted(groups):
                some = groups[index]
                proposed = ask(self.drafters[index], [contexts[i] for i in some], [orders[i][turn][1] for i in some])
                for i, tree in zip(some, proposed, strict=True):
                    if len(tree) > 1:
                        trees[i] = self._owned(contexts[i], index, tree)
                        self._guess_beside(contexts[i], orders[i][: turn + 1])
                    else:
                        waiting.append(i)
        for i in waiting:
            if i in spare:
                trees[i] = self._guessed(contexts[i], *spare[i])
        return [TokenTree.root_only(c.root) if tree is None else tree for tree, c in zip(trees, contexts, strict=True)]

    def _guess_beside(self, context: Context, attempts: Sequence[tuple[int, Budget]]) -> None:
        """Record what copying members would draft beside a network: this is cheap, and shows a controller that a text
        repeats itself."""
        index, budget = attempts[-1]
        if budget.member is None or not self.costs[index]:
            return
        others = [i for i in self._copiers if i not in [member for member, _ in attempts]]
        most = {i: Budget(self.drafters[i].max_depth, self.drafters[i].max_nodes) for i in others}
        context.beside = {i: ask(self.drafters[i], [context], [most[i]])[0] for i in others}

    def _weigh(
        self, rule: DraftRule, contexts: Sequence[Context], budgets: Sequence[Budget], trees: list[TokenTree | None]
    ) -> dict[int, tuple[int, SourceDraft]]:
        """Set the trees whose best draft is good enough; return the members and drafts of the others that have any."""
        spare: dict[int, tuple[int, SourceDraft]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            if budget.member is not None or budget.max_depth < 1 or budget.max_nodes < 1:
                continue
            index, draft, is_good = rule.best(context, budget)
            if is_good:
                trees[i] = self._guessed(context, index, draft)
            elif draft.tokens:
                spare[i] = index, draft
        return spare

    def _guessed(self, context: Context, index: int, draft: SourceDraft) -> TokenTree:
        tree = draft.tree(context.root)
        if is_outside(type(self.drafters[index])):
            check_proposal(tree, context, self.drafters[index], None, thorough=True)
        return self._owned(context, index, tree)

    def _order(self, budget: Budget) -> list[tuple[int, Budget]]:
        """The members in order of preference, each with its budget."""
        if budget.member is None and self.rule is not None:
            return [] if self.rule.fallback is None else [(self.rule.fallback, budget)]
        if budget.member is None:
            return [(index, budget) for index in self._cheapest_first]
        chosen: list[tuple[int, Budget]] = []
        choice: Budget | None = budget
        while choice is not None:
            if choice.member is None or not 0 <= choice.member < len(self.drafters):
                raise ValueError(f"router has no member {choice.member}: its members are 0 to {len(self.drafters) - 1}")
            chosen.append((choice.member, choice))
            choice = choice.otherwise
        return chosen

    def _owned(self, context: Context, index: int, tree: TokenTree) -> TokenTree:
        """A member's tree marked with its index; the proposal is kept if any member observes it."""
        owned = tree.guessed_by(index)
        if self._observers:
            context.state[self] = Proposal(owned, {index: MemberTree(tree, range(len(tree)))})
        return owned


def parse_costs(text: str, name: str = "costs") -> tuple[float, ...]:
    """``"0.1|0"`` -> ``(0.1, 0.0)``.  Raises ``ValueError`` for all but numbers joined by ``|``."""
    try:
        return tuple(float(part) for part in text.split("|")) if text else ()
    except ValueError:
        raise ValueError(f"{name}={text!r} must be one number per drafter joined by |, for example 0.1|0") from None
