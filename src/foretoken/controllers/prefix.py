"""Of the drafts of a whole batch, those tokens are scored that bring more than they cost: DSpark's prefix scheduler.

DSpark 2026 (arXiv 2607.05147), with chances from the draft's margins (:mod:`foretoken.controllers.margin`) in place of
a trained head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.controllers.base import Controller
from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.margin import MarginEstimator, margin_of
from foretoken.core import Budget, Context, Limits, StepRecord, TokenTree
from foretoken.costs import RoundCosts
from foretoken.trees.operations import truncate


@dataclass
class Told:
    """What the estimator said of one request's chain.

    Attributes:
        margins, chances: by position, of every drafted token.
        admitted: how many of them are scored.
    """

    margins: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    admitted: int = -1


class PrefixController(Controller):
    """Chains of one length for all, of which the batch keeps prefixes by its own throughput.

    Args:
        k: length of the chains; the drafter's own by default.

    Raises:
        ValueError: ``k`` below 1.
    """

    name = "prefix"
    weighs_costs = True

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 1:
            raise ValueError(f"prefix needs k >= 1, not {k}")
        self.k, self.cap, self.nodes = k, k or 5, 64
        self._start: RoundCosts | None = None
        self.estimators = {greedy: MarginEstimator() for greedy in (True, False)}
        self.costs = CostModel([Limits("", 5, 64)])
        self._seen: list[tuple[Context, StepRecord]] = []

    def attach(self, limits: Limits) -> None:
        """Take the length from the drafter."""
        self.cap, self.nodes = min(self.k or limits.max_depth, limits.max_depth), limits.max_nodes
        self.costs = CostModel([limits], self._start)

    def start_from(self, costs: RoundCosts) -> None:
        """Begin with costs that were measured before."""
        self._start = costs

    def budget(self, context: Context, batch_size: int) -> Budget:
        """The whole length, with a rule that notes margins and stops nothing."""
        told, estimator = Told(), self._estimator(context)
        context.state[self] = told

        def note(distribution: Tensor | None, probability: float) -> bool:
            if distribution is not None:
                told.margins.append(margin_of(distribution))
                told.chances.append(estimator.chance(len(told.chances), told.margins[-1]))
            return False

        return Budget(self.cap, self.nodes, stop=note)

    def _estimator(self, context: Context) -> MarginEstimator:
        return self.estimators[context.maker.greedy]

    def admitted(self, contexts: Sequence[Context], trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Prefixes of the chains whose margins are known; other drafts stay whole."""
        told: list[Told] = [context.state[self] for context in contexts]
        cut = [
            self._estimator(context).is_warm and tree.is_chain and len(one.chances) == len(tree) - 1
            for context, tree, one in zip(contexts, trees, told, strict=True)
        ]
        others = sum(len(tree) for tree, is_cut in zip(trees, cut, strict=True) if not is_cut)
        batch = len(trees)
        survivals = [survival(one.chances) if is_cut else [] for one, is_cut in zip(told, cut, strict=True)]
        counts = prefixes(survivals, batch, lambda rows: 1.0 / self.costs.round_s(batch, others + rows))
        kept = [truncate(tree, n) if is_cut else tree for tree, n, is_cut in zip(trees, counts, cut, strict=True)]
        for one, tree in zip(told, kept, strict=True):
            one.admitted = tree.num_drafts
        return kept

    def observe(self, context: Context, record: StepRecord) -> None:
        """Learn from what was scored, and when the round is complete what it cost."""
        told: Told | None = context.state.get(self)
        if told is not None and told.admitted == record.num_draft_tokens == record.depth <= len(told.chances):
            end = record.depth
            self._estimator(context).observe(told.margins[:end], told.chances[:end], record.num_accepted_tokens)
        self._seen.append((context, record))
        if len(self._seen) >= record.batch_size:
            self.costs.observe(record, 0, self.cap, record.batch_size)
            self._seen.clear()


def survival(chances: Sequence[float]) -> list[float]:
    """Chance that a draft is accepted so far, by position."""
    found, product = [], 1.0
    for chance in chances:
        product *= chance
        found.append(product)
    return found


def prefixes(survivals: Sequence[Sequence[float]], plain: int, calls_per_s: Callable[[int], float]) -> list[int]:
    """How many tokens of every chain are scored: the likeliest ones of all, until the throughput falls for the first
    time.

    Not until it is highest: whether a token is scored may depend on what is as likely as itself or likelier, which is
    before it or of another request, never on what is drafted behind it.

    Args:
        survivals: by chain and position; they fall along a chain.
        plain: tokens, and rows, of a round without drafts.
        calls_per_s: by rows in one call.
    """
    order = sorted((-value, place, chain) for chain, row in enumerate(survivals) for place, value in enumerate(row))
    counts, rows, tokens = [0] * len(survivals), plain, float(plain)
    best = tokens * calls_per_s(rows)
    for negative, place, chain in order:
        rows, tokens = rows + 1, tokens - negative
        rate = tokens * calls_per_s(rows)
        if rate < best:
            break
        best, counts[chain] = rate, place + 1
    return counts
