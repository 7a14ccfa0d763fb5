"""The prefixes of a batch's drafts that raise its tokens per second: the likeliest draft tokens first, whoever's they
are, until one more lowers it.

DSpark 2026, arXiv 2607.05147: the prefix scheduler.

Exactness. Whether a drawn token x_k is scored may depend on what was drawn before it, never on x_k itself or on later
tokens of its request: a token left out for what it is would be too rare in the output. Here it does not:

* a_k, the estimated probability that the draft survives position k, is a function of x_1..x_{k-1} and of distributions
  (``TokenTree.survival``), or of earlier rounds only (acceptance by position), and does not rise along a path;
* candidates are visited by falling a, and the search ends at the first that lowers the throughput. So what decides on
  x_k is what is visited before it: of its own request only a_1..a_k, all functions of x_1..x_{k-1};
* drafts of other requests are drawn with their own random numbers, independently of this request's, so that they act
  on its length like a coin.

The global maximum of the throughput would be a function of a_{k+1} as well, and so of x_k: it is not looked for. Trees
whose tokens were not drawn, but computed, may be cut in any way. A drawn tree that branches is cut by whole levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretoken.core import Budget, Context, Limits, StepRecord, TokenTree
from foretoken.methods.controllers.acceptance_model import AcceptanceModel, DraftCounts
from foretoken.methods.controllers.goodput import GoodputController
from foretoken.methods.controllers.plan import Draft, RoundPlan


class DraftPart(NamedTuple):
    """Draft nodes that are scored together or not at all.

    Attributes:
        tree: index of their tree.
        nodes: a node, or a level of a tree.
        gain: expected tokens by them.
    """

    tree: int
    nodes: Sequence[int]
    gain: float

    @property
    def order(self) -> tuple[float, int, int]:
        """Falling gain per row; at equal gains first nodes come first, so that parents precede their children."""
        return -self.gain / len(self.nodes), self.nodes[0], self.tree


def scheduled(
    candidates: Sequence[DraftPart], requests: int, rows: int, steps_per_s: Callable[[int], float]
) -> list[DraftPart]:
    """The candidates to score: in order, until the tokens per second fall for the first time.

    Args:
        candidates: gains per row do not rise along a path.
        requests: of the round, each with a token of the target's own.
        rows: that are scored in any case.
        steps_per_s: rounds per second, by rows.
    """
    tokens = float(requests)
    best = tokens * steps_per_s(rows)
    admitted = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        rows, tokens = rows + len(candidate.nodes), tokens + candidate.gain
        rate = tokens * steps_per_s(rows)
        if rate < best:
            break
        best = rate
        admitted.append(candidate)
    return admitted


class PrefixController(GoodputController):
    """The longest drafts, of which the promising prefixes are scored; plain decoding where drafts do not pay.

    The survival of a draft token is the drafter's estimate, if it has one: a calibrated confidence (``dspark``), or the
    draft's own probability for tokens that are not drawn (block drafters). Otherwise it is the request's acceptance by
    position.

    Args:
        k: longest draft; the drafter's own by default.
        memory: rounds after which the weight of a round in the acceptance statistics is 1/e.
    """

    name = "prefix"

    def attach(self, limits: Limits) -> None:
        super().attach(limits)
        self._proposed, self._calibrates = set[int](), False

    def budgets(self, contexts: Sequence[Context]) -> list[Budget]:
        return [replace(budget, survival=True) if budget.max_depth else budget for budget in super().budgets(contexts)]

    def _reset(self) -> None:
        super()._reset()
        self.by_position = AcceptanceModel(self.members, self.keep)
        # Nothing is known of what will be scored of a draft, so drafting is tried as if that were one node.
        self.width = [1.0 / depths[-1] for depths in self.depths]

    def _next_to_measure(self, size: int, contexts: Sequence[Context]) -> RoundPlan | None:
        plan = super()._next_to_measure(size, contexts)
        self._calibrates = plan is not None
        return plan

    def _drafts(self, index: int, contexts: Sequence[Context]) -> list[Draft]:
        """The longest draft only, with the tokens and nodes that were left of earlier ones."""
        return super()._drafts(index, contexts)[-1:]

    def kept(
        self, contexts: Sequence[Context], trees: Sequence[TokenTree], beside: Sequence[TokenTree]
    ) -> list[Sequence[int]]:
        self._proposed = {c.request_id for c, tree in zip(contexts, trees, strict=True) if tree.num_drafts}
        whole: list[Sequence[int]] = [range(len(tree)) for tree in trees]
        if not self._proposed or self._calibrates:
            return whole
        cuttable = [index for index, tree in enumerate(trees) if not any(tree.probes)]
        fixed = [tree for tree in trees if any(tree.probes)]
        rows = sum(map(len, (*beside, *fixed))) + len(cuttable)
        requests = len(trees) + len(beside)
        candidates = [part for index in cuttable for part in self._parts(index, contexts[index], trees[index])]
        nodes = {index: [0] for index in cuttable}
        for part in scheduled(candidates, requests, rows, self._steps_per_s(requests, len(trees))):
            nodes[part.tree].extend(part.nodes)
        return [sorted(nodes[index]) if index in nodes else whole[index] for index in range(len(trees))]

    def _steps_per_s(self, requests: int, drafted: int) -> Callable[[int], float]:
        """Rounds per second, by rows; ``drafted`` requests got drafts, whose time is spent whatever is scored."""
        draft_s = sum(self.costs.draft_s(draft.member, draft.depth, drafted) for draft in self.plan.drafts)
        return lambda rows: 1.0 / (self.costs.round_s(requests, rows) + draft_s)

    def _parts(self, index: int, context: Context, tree: TokenTree) -> Iterator[DraftPart]:
        """What can be scored of a tree, with gains that do not rise along a path."""
        if tree.survival and (tree.q is None or tree.is_chain):
            highest = [1.0]
            for node in range(1, len(tree)):
                survival, above = tree.survival[node], highest[tree.parents[node]]
                highest.append(survival if survival < above else above)
                yield DraftPart(index, (node,), highest[node])
            return
        depth = max(tree.depths)
        survivals = self._outlook(context, depth)
        above = 1.0
        for level in range(1, depth + 1):
            nodes = [node for node in range(1, len(tree)) if tree.depths[node] == level]
            above = min(above, survivals[level - 1] / len(nodes))
            yield DraftPart(index, nodes, above * len(nodes))

    # -- acceptance by position, of what was scored ------------------------------------------------------------------

    def _outlook(self, context: Context, depth: int) -> list[float]:
        if not depth:
            return []
        return self.by_position.outlook(context.sampler.greedy, 0, self._counts(context), depth).survival

    def _counts(self, context: Context) -> DraftCounts:
        counts: DraftCounts = context.state.setdefault((self, "by position"), DraftCounts())
        return counts

    def observe(self, context: Context, record: StepRecord) -> None:
        super().observe(context, record)
        if record.num_draft_tokens:
            counts = self._counts(context)
            self.by_position.add(context.sampler.greedy, 0, counts, record.depth, record.num_accepted_tokens)

    def _digest(self) -> None:
        if not self._records:
            return
        self.by_position.tick()
        width = list(self.width)
        super()._digest()
        if self._calibrates:  # such drafts are scored whole
            self.width = width

    def _calls(self, num_asked: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """The drafter ran for requests of whose drafts nothing was scored, too."""
        if self.plan.drafts and self._proposed:
            num_asked = {(0, self.plan.drafts[0].depth): len(self._proposed)}
        self._proposed = set()
        return num_asked
