"""Known tokens are drafted first: those that a grammar forces, or the caller's prediction; then an inner drafter's.

Forced tokens ("fast-forward" in llguidance, jump-forward in XGrammar) and predictions cost nothing to draft and are
nearly always accepted, so they are drafted even if a controller would decode plainly.  Verification treats them as any
other draft, so the output's distribution does not change.

The inner drafter goes on behind forced tokens if it can draft behind tokens that are not committed.  Otherwise its own
draft takes their place where it is longer, because it begins with the same tokens under the same grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from foretoken.core import Budget, Context, Kind, Limits, TokenTree, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Foresight
from foretoken.methods.drafters.group import GroupDrafter, MemberTree, Proposal, ask
from foretoken.methods.drafters.nested import works_nested
from foretoken.methods.drafters.outside import entries_of
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.drafters.texts import DraftTexts
from foretoken.methods.trees.operations import select


@runtime_checkable
class Rule(Protocol):
    """A constraint that can test draft tokens."""

    def fits(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of draft tokens that may follow the output in sequence."""


@dataclass(frozen=True)
class Known:
    """Known next tokens of a request.

    Attributes:
        predicted: whether they come from the caller's prediction.
        plan: the controller's budget.
    """

    tokens: list[int]
    predicted: bool
    plan: Budget


class KnownDrafter(GroupDrafter):
    """Drafts forced tokens or a prediction, and what another drafter drafts.

    Args:
        inner: drafter where no tokens are predicted, ``(model,k=4)``; by default plain decoding.
        k: maximum number of known tokens in a draft.
    """

    name = "known"

    def __init__(self, inner: Drafter | None = None, k: int = 8) -> None:
        check_least(self.name, 1, k=k)
        self.prediction, self.inner, self.k = PredictionDrafter(k=k), inner, k
        super().__init__([self.prediction] if inner is None else [self.prediction, inner])
        self.spec = "" if inner is None else inner.spec
        if self.vocab_size is not None:
            self.prediction.vocab_size = self.vocab_size
        # One that learns needs rounds of trees with its own root.
        self.goes_on = inner is not None and works_nested(inner) and not inner.traits.learns
        depth, nodes = (0, 0) if inner is None else (inner.max_depth, inner.max_nodes)
        self.max_depth, self.max_nodes = (k + depth, k + nodes) if self.goes_on else (max(k, depth), max(k, nodes))
        self.traits = replace(self.traits, prefers_noise=inner is not None and inner.traits.prefers_noise)

    def describe(self) -> list[dict[str, Any]]:
        return [] if self.inner is None else entries_of(self.inner)

    @classmethod
    def build(cls, path: str | None, context: BuildContext, *, inner: str = "none", k: int = 8) -> KnownDrafter:
        """Build from a spec ``known[,inner=SPEC]``; an inner spec with options needs brackets:
        ``inner=(model,k=4)``."""
        if path is not None:
            raise ValueError("drafter 'known' takes no path: known,inner=(model:PATH,k=4)")
        built = cls(context.drafter(inner.strip()), k)  # parsing the outer spec has removed the brackets
        built.prediction.vocab_size = context.target.vocab_size
        return built

    @property
    def limits(self) -> Limits:
        """The inner drafter's limits, which a controller decides on."""
        return super().limits if self.inner is None else replace(self.inner.limits, name=self.spec or self.name)

    @property
    def foresight(self) -> Foresight:
        return self

    def minimum_budget(self, context: Context, budget: Budget) -> Budget:
        """The budget, enlarged to the number of known tokens, and by the inner draft behind them."""
        known = context.state[self, "known"] = self._known(context, budget)
        if not known.tokens:
            return budget
        depth = nodes = len(known.tokens)
        if self.inner is not None and self.goes_on and not known.predicted:
            depth += min(budget.max_depth, self.inner.max_depth)
            nodes += min(budget.max_nodes, self.inner.max_nodes)
        return replace(budget, max_depth=max(budget.max_depth, depth), max_nodes=max(budget.max_nodes, nodes))

    def predicted_from(self, context: Context) -> int | None:
        """Index in the caller's prediction where the last draft began, if it came from there."""
        return self.prediction.predicted_from(context) if context.source == self.prediction.name else None

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        trees: list[TokenTree] = []
        asked: dict[int, tuple[Context, Budget]] = {}  # by request: what the inner drafter gets
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            known = context.state.pop((self, "known"), None) or self._known(context, budget)
            tokens = known.tokens[: min(budget.max_depth, budget.max_nodes)]
            source = self.prediction.name if known.predicted else "grammar"
            context.source = source if tokens or self.inner is None else self.inner.name
            trees.append(TokenTree.chain(context.root, tokens))
            if not tokens:
                asked[i] = context, budget
            elif not known.predicted:
                rest = self._rest(len(tokens), known.plan, budget)
                if rest is not None:
                    asked[i] = _behind(context, tokens) if self.goes_on else context, rest
        if self.inner is not None and asked:
            for i, tree in zip(asked, ask(self.inner, *zip(*asked.values(), strict=True)), strict=True):
                trees[i] = self._joined(contexts[i], trees[i], _allowed(tree, asked[i][0]))
        return trees

    def _rest(self, count: int, plan: Budget, budget: Budget) -> Budget | None:
        """The inner drafter's budget beside ``count`` forced tokens; ``None`` if it could not add to them."""
        if self.inner is None:
            return None
        if self.goes_on:
            depth, nodes = budget.max_depth - count, budget.max_nodes - count
            return replace(budget, max_depth=min(plan.max_depth, depth), max_nodes=min(plan.max_nodes, nodes))
        depth, nodes = min(plan.max_depth, budget.max_depth), min(plan.max_nodes, budget.max_nodes)
        # By length alone: whether drawn tokens are proposed must not depend on what was drawn.
        longer = min(depth, nodes, self.inner.max_depth) > count
        return replace(budget, max_depth=depth, max_nodes=nodes) if longer else None

    def _joined(self, context: Context, forced: TokenTree, tree: TokenTree) -> TokenTree:
        """The draft of forced tokens, if any, and of the inner drafter."""
        count = len(forced) - 1
        if self.inner is None:
            return forced
        if count and self.goes_on:
            self.inner.rewind(context, len(context.tokens))
            return _stacked(forced, tree)
        if count and not (tree.num_drafts if tree.kind is not Kind.POINT else _reaches(tree, forced.tokens[1:])):
            return forced
        context.source = self.inner.name
        if len(tree) > 1 and self._observers:
            context.state[self] = Proposal(tree, {1: MemberTree(tree, range(len(tree)))})
        return tree

    def _known(self, context: Context, plan: Budget) -> Known:
        """Known next tokens; none of a prediction that the answer has left, so that the inner drafter and the
        controller decide."""
        if context.constraint is not None:
            forced = context.constraint.forced(context.tokens[context.prompt_length :])
            if forced:
                return Known(forced[: self.k], False, plan)
        if not (self.prediction.default if context.prediction is None else context.prediction):
            return Known([], False, plan)
        if self.prediction.is_left(context):
            return Known([], False, plan)
        draft = self.prediction.draft(context, Budget(max_depth=self.k, max_nodes=self.k))
        return Known(list(draft.tokens), True, plan)


def _behind(context: Context, tokens: Sequence[int]) -> Context:
    """The same request as if ``tokens`` were committed."""
    return replace(context, tokens=[*context.tokens, *tokens], texts=DraftTexts.of(context))


def _stacked(chain: TokenTree, tree: TokenTree) -> TokenTree:
    """A chain of point masses, and below it the draft nodes of a tree without probes."""
    if len(tree) == 1:
        return chain
    end = len(chain) - 1
    tokens, parents = [*chain.tokens, *tree.tokens[1:]], [*chain.parents, *(end + p for p in tree.parents[1:])]
    if tree.kind is Kind.POINT:
        return TokenTree(tokens, parents)
    return TokenTree(tokens, parents, tree.kind, tree.q, [*[-1] * end, *tree.q_rows])


def _reaches(tree: TokenTree, forced: Sequence[int]) -> bool:
    """Whether a tree begins with the forced tokens and goes on."""
    return tree.num_drafts > len(forced) == tree.matched(forced)


def _allowed(tree: TokenTree, context: Context) -> TokenTree:
    """A tree of points without nodes that a grammar refuses, whose scores would be wasted.

    Points depend on the tokens alone, so any of them may be left out.  Drawn nodes must not be selected, and need not
    be, because they were drawn under the same grammar.
    """
    if tree.kind is not Kind.POINT or len(tree) == 1 or not isinstance(context.constraint, Rule):
        return tree
    return _fitting(tree, context.constraint, context.tokens[context.prompt_length :])


def _fitting(tree: TokenTree, rule: Rule, output: Sequence[int]) -> TokenTree:
    """The nodes whose whole path a rule allows, and the probes below them.

    A rule sees no probes: their ids may lie behind the vocabulary.
    """
    probes = tree.probes or (False,) * len(tree)
    nodes = {0}
    for node in range(1, len(tree)):
        if not (tree.children[node] or probes[node]):
            path = tree.path(node)[1:]
            nodes.update(path[: rule.fits(output, [tree.tokens[n] for n in path])])
    hanging = [node for node in range(1, len(tree)) if probes[node] and _hangs(tree, node, nodes)]
    return select(tree, sorted([*nodes, *hanging]))


def _hangs(tree: TokenTree, probe: int, real: set[int]) -> bool:
    """Whether a probe's nearest ancestor that is no probe is in ``real``."""
    while tree.probes[probe]:
        probe = tree.parents[probe]
    return probe in real
