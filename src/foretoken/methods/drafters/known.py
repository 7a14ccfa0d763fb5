"""Known tokens are drafted first: those that a grammar forces, then the caller's prediction, then an inner draft.

Forced tokens ("fast-forward" in llguidance, jump-forward in XGrammar) and predictions cost nothing to draft and are
nearly always accepted, so they are drafted even if a controller would decode plainly.  Verification treats them as any
other draft, so the output's distribution does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from foretoken.core import Budget, Context, Kind, Limits, TokenTree, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Foresight
from foretoken.methods.drafters.group import GroupDrafter, MemberTree, Proposal, ask
from foretoken.methods.drafters.outside import entries_of
from foretoken.methods.drafters.prediction import PredictionDrafter
from foretoken.methods.trees.operations import select


@runtime_checkable
class Rule(Protocol):
    """A constraint that can test draft tokens."""

    def fits(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of draft tokens that may follow the output in sequence."""


class KnownDrafter(GroupDrafter):
    """Drafts forced tokens, a prediction, or another drafter's draft.

    Args:
        inner: drafter where no tokens are known, ``(model,k=4)``; by default plain decoding.
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
        self.max_depth = max(k, 0 if inner is None else inner.max_depth)
        self.max_nodes = max(k, 0 if inner is None else inner.max_nodes)
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
        """The budget, enlarged to the number of known tokens."""
        tokens, predicted = self._certain(context)
        context.state[self, "known"] = (tokens, predicted)
        if not tokens:
            return budget
        size = len(tokens)
        return replace(budget, max_depth=max(budget.max_depth, size), max_nodes=max(budget.max_nodes, size))

    def predicted_from(self, context: Context) -> int | None:
        """Index in the caller's prediction where the last draft began, if it came from there."""
        return self.prediction.predicted_from(context) if context.source == self.prediction.name else None

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        trees: list[TokenTree] = []
        for context, budget in zip(contexts, budgets, strict=True):
            noted = context.state.pop((self, "known"), None)
            tokens, predicted = self._certain(context) if noted is None else noted
            tokens = tokens[: min(budget.max_depth, budget.max_nodes)]
            source = self.prediction.name if predicted else "grammar"
            context.source = source if tokens or self.inner is None else self.inner.name
            trees.append(TokenTree.chain(context.root, tokens))
        waiting = [i for i, tree in enumerate(trees) if len(tree) == 1]
        if self.inner is not None and waiting:
            found_trees = ask(self.inner, [contexts[i] for i in waiting], [budgets[i] for i in waiting])
            for i, tree in zip(waiting, found_trees, strict=True):
                tree = _allowed(tree, contexts[i])
                if len(tree) > 1 and self._observers:
                    contexts[i].state[self] = Proposal(tree, {1: MemberTree(tree, range(len(tree)))})
                trees[i] = tree
        return trees

    def _certain(self, context: Context) -> tuple[list[int], bool]:
        """Known next tokens, and whether they come from the caller's prediction; none of one that the answer has
        left, so that the inner drafter and the controller decide."""
        if context.constraint is not None:
            forced = context.constraint.forced(context.tokens[context.prompt_length :])
            if forced:
                return forced[: self.k], False
        if not (self.prediction.default if context.prediction is None else context.prediction):
            return [], False
        if self.prediction.is_left(context):
            return [], False
        draft = self.prediction.draft(context, Budget(max_depth=self.k, max_nodes=self.k))
        return list(draft.tokens), True


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
