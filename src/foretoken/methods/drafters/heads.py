"""Base of drafters that put several heads on one hidden state and fill a tree of fixed shape: Medusa and variants."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree, check_least
from foretoken.core.costs import TargetCost
from foretoken.core.largest import largest
from foretoken.methods.drafters.base import WIDTH_ONE, BatchDrafter, BuildContext, Traits, share_of_bytes
from foretoken.methods.drafters.draft_vocabulary import chosen_ids
from foretoken.methods.drafters.drawing import best_tokens, distribution_of, raced_ahead, ranker
from foretoken.methods.drafters.drawn_tree import DrawnTree, traits_of
from foretoken.methods.drafters.nets.store import load_net
from foretoken.methods.trees.cost_aware import paying_count
from foretoken.methods.trees.counts import Ranks
from foretoken.methods.trees.medusa_tree import TYPICAL
from foretoken.methods.trees.shapes import Choice, choice_parents, fitting_nodes, medusa_choices, read_tree, values_of
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs
from foretoken.models.forward.heads.blocks import NativeBlocks
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.parts import TargetParts
from foretoken.models.linear.packing import weight_bytes
from foretoken.models.native.library import NotCoveredError

MOST_NODES = 64
"""Nodes of Medusa's tree, for machines that score them at no extra cost."""


class HeadsDrafter(BatchDrafter):
    """Fills a tree of ranks with point proposals or drawn siblings.

    Args:
        heads: the trained heads, with an entry of ``heads.blocks`` and of ``heads.projections`` (if any) for each; they
            move to the target's device.
        parts: the modules that they borrow from the target.
        nodes: draft nodes of the tree; in a spec by default as many as pay off on this machine, at most 64.
        accuracies: [K][R] measured probability that a head's candidate of this rank is right.
        tree: a file of ``foretoken tune tree``, whose tree replaces one of ``nodes`` nodes.
        frequent: the draft vocabulary; all tokens by default.
        draw: ``"coupled"``: requests that sample get the winners of the race, on separate noise if they have no seed;
            ``"without_replacement"``: those without a seed get siblings drawn from the heads' distributions.

    Attributes:
        costs: cost of a target call by its number of nodes.  If set, a batch keeps as many nodes of the tree as pay off
            by ``values``.
        values: probabilities of the tree's nodes, falling; empty for a tree from elsewhere, of which all nodes stay.
    """

    taps = ("last",)
    traits = Traits(prefers_noise=True, learns=False)
    chain = WIDTH_ONE
    net_config: ClassVar[type[Any]]
    net_class: ClassVar[type[Any]]

    def __init__(
        self,
        heads: Any,
        parts: TargetParts,
        nodes: int = 16,
        accuracies: Sequence[Sequence[float]] | None = None,
        tree: str = "",
        frequent: Sequence[int] = (),
        draw: str = "coupled",
    ) -> None:
        if draw not in ("coupled", "without_replacement"):
            raise ValueError(f"{self.name} needs draw=coupled or without_replacement, not {draw!r}")
        check_least(self.name, 1, nodes=nodes)
        self.heads, self.parts = heads.to(parts.device).eval(), parts
        own: Tensor | None = getattr(heads, "vocabulary", None)
        ids = torch.tensor(list(frequent)) if frequent else own
        self.reduced: list[DraftHead] = []
        if ids is not None:  # the draft vocabulary's rows of every head's own projection
            rows = ids.to(parts.device)
            if own is not None:
                row_of = {token: row for row, token in enumerate(own.tolist())}
                rows = torch.tensor([row_of[token] for token in ids.tolist()], device=parts.device)
            self.reduced = [DraftHead(parts, ids, projection.weight.detach()[rows]) for projection in heads.projections]
        self.head = self.reduced[0] if self.reduced else DraftHead(parts, ids)
        self._native: list[NativeBlocks] = []
        self.native_off = ""
        try:
            self._native = self.natives()
        except NotCoveredError as error:
            self.native_off = str(error)
        count, self.draw, self.draws = len(heads.blocks), draw, draw != "coupled"
        if tree:
            self._take(read_tree(tree, self.name, count))
        else:
            chances = (accuracies or TYPICAL)[:count]
            choices = medusa_choices(chances, nodes)
            self._take(choices, values_of(choices, chances))

    def _take(self, choices: Sequence[Choice], values: Sequence[float] = ()) -> None:
        self.choices, self.values = list(choices), list(values)
        self.parents = choice_parents(self.choices)
        self.max_depth = max(map(len, self.choices))
        self.max_nodes = len(self.choices)
        self.traits = replace(type(self).traits, draws_trees=len(set(self.parents)) < len(self.parents))
        if self.draws:
            self.shape = Ranks(self.choices)
            drawn = traits_of(self.draw, self.traits.draws_trees, self.shape.branches)
            self.traits = replace(drawn, learns=self.traits.learns)
        self.costs: TargetCost | None = None

    def reshaped(self, choices: Sequence[Choice]) -> Self:
        """A copy of this drafter that fills another tree."""
        other = copy.copy(self)
        other._take(choices)
        return other

    @classmethod
    def build(
        cls,
        path: str | None,
        context: BuildContext,
        *,
        nodes: int | None = None,
        width: int = 0,
        vocab: str = "",
        **options: Any,
    ) -> Self:
        """Build from a spec ``NAME[:FOLDER]``.

        Args:
            width: candidates per head (1: a chain; 0: all that were measured).
            vocab: as for :class:`~foretoken.methods.drafters.features.FeatureDrafter`.
        """
        check_least(cls.name, 0, width=width)
        if width and options.get("tree"):
            raise ValueError(f"{cls.name} takes the shape from tree={options['tree']}: leave width out")
        heads, parts, measured = load_net(context, cls.name, path, cls.net_config, cls.net_class)
        options["accuracies"] = ranked_first(measured.get("accuracies"), width)
        own: Tensor | None = getattr(heads, "vocabulary", None)
        known = measured.get("frequent", ()) if own is None else own.tolist()
        ids = chosen_ids(vocab, context, parts.vocab_size, known, others=own is None)
        options["frequent"] = () if ids is None else ids.tolist()
        if nodes is not None:
            options["nodes"] = nodes
        if nodes is not None or options.get("tree"):
            return cls.over(heads, parts, context.target, **options)
        accuracies, costs = options["accuracies"][: len(heads.blocks)], quick_costs(context.target)
        values = values_of(medusa_choices(accuracies, MOST_NODES), accuracies)
        nodes = paying_count(values, costs, 1)
        built = cls.over(heads, parts, context.target, nodes=nodes, **options)
        built.costs = costs
        return built

    @classmethod
    def over(cls, heads: Any, parts: TargetParts, target: LanguageModel, width: int = 0, **options: Any) -> Self:
        """Construct the drafter for ``target``; ``width`` as for :meth:`build`."""
        options["accuracies"] = ranked_first(options.get("accuracies"), width)
        return cls._over(heads, parts, target, **options)

    @classmethod
    def _over(cls, heads: Any, parts: TargetParts, target: LanguageModel, **options: Any) -> Self:
        return cls(heads, parts, **options)

    @abstractmethod
    def natives(self) -> list[NativeBlocks]:
        """The heads in our native library, one each or all in one.

        Raises:
            NotCoveredError: the library does not support some part of them.
        """

    def renew(self) -> None:
        """Pass changed weights of the heads to the native library, before a draft."""
        try:
            if self._native and self._native[0].has_changed():  # all are parts of one network
                for native in self._native:
                    native.describe()
        except NotCoveredError as error:
            self._native, self.native_off = [], str(error)

    def projections(self, head: int | None = None) -> list[Any]:
        """The vocabulary projection that all heads share, or those of all heads or of one."""
        projections = self.reduced or list(self.heads.projections)
        return (projections if head is None else [projections[head]]) if projections else [self.head]

    def describe(self) -> list[dict[str, Any]]:
        runs = {"forward": "native" if self._native else "lean", "native_off": self.native_off}
        return [{**entry, "vocabulary": self.head.size, **runs} for entry in super().describe()]

    def cost_beside(self, target_bytes: int) -> float:
        """Cost of one head, with the vocabulary projection if it is the target's."""
        size = weight_bytes(self.heads) // len(self.heads.blocks)
        if self.reduced:
            size -= weight_bytes(self.heads.projections) // len(self.heads.blocks)
        borrowed = 0 if len(self.heads.projections) and not self.reduced else self.head.weight_bytes
        return share_of_bytes(size + borrowed, target_bytes)

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Draft for all requests; one without hidden states (a prompt of one token) gets no draft tokens."""
        trees = [TokenTree.root_only(c.root) for c in contexts]
        batch = len(contexts)
        shapes = {i: self._nodes(c, b, batch) for i, (c, b) in enumerate(zip(contexts, budgets, strict=True))}
        ready = [i for i, nodes in shapes.items() if nodes]
        ready = [i for i, is_level in zip(ready, self.level([contexts[i] for i in ready]), strict=True) if is_level]
        if ready:
            self.renew()
            states = self.read_states([contexts[i] for i in ready])
            drawn = {i: row for row, i in enumerate(ready) if self.draws and not contexts[i].sampler.fixed}
            filled = {i: row for row, i in enumerate(ready) if i not in drawn}
            if filled:
                chosen, limits = [contexts[i] for i in filled], [budgets[i] for i in filled]
                tokens = self.fill(states[[*filled.values()]], chosen, [shapes[i] for i in filled], limits)
                for i, by_node in zip(filled, tokens, strict=True):
                    trees[i] = self._tree(contexts[i].root, by_node)
            if drawn:
                growing = [DrawnTree(contexts[i], self.shape, budgets[i], len(shapes[i])) for i in drawn]
                self.draw_all(states[[*drawn.values()]], growing)
                for i, tree in zip(drawn, growing, strict=True):
                    trees[i] = tree.finished()
        return trees

    def level(self, contexts: Sequence[Context]) -> list[bool]:
        """Whether each request's tokens have been read, for heads that read them."""
        return [True] * len(contexts)

    def read_states(self, contexts: Sequence[Context]) -> Tensor:
        """[n, D]: input of the heads, the state of the token before each request's root."""
        return torch.stack([c.hidden["last"][-1] for c in contexts]).float()

    @abstractmethod
    def fill(
        self, states: Tensor, contexts: Sequence[Context], shapes: Sequence[Sequence[int]], budgets: Sequence[Budget]
    ) -> list[dict[int, int]]:
        """Tokens by node of every request, without those below a node where the budget's stop rule ends a path.

        Args:
            states: [n, D] input of the heads.
            contexts: n requests.
            shapes: per request the nodes of the shape (choice i is node i + 1), parents first.
            budgets: per request, with its stop rule.
        """

    @abstractmethod
    def draw_all(self, states: Tensor, trees: Sequence[DrawnTree]) -> None:
        """Draw whole trees, each from the heads' input [n, D] for its request."""

    def distributions(self, tree: DrawnTree, nodes: Sequence[int], logits: Tensor) -> list[Tensor | None]:
        """Distributions of the children of ``nodes`` under the request's sampler, from logits [n, V_d]."""
        sampler = tree.context.sampler
        rows = zip(nodes, self.head.widened(logits), strict=True)
        return [distribution_of(sampler, row, tree.prefix(node)) for node, row in rows]

    def best(
        self,
        head: int,
        inputs: Tensor,
        contexts: Sequence[Context],
        ahead: Sequence[int],
        budgets: Sequence[Budget],
        count: int,
    ) -> tuple[list[list[int]], Tensor | None]:
        """Per row the ``count`` best tokens, and the logits of all tokens if a stop rule needs them.

        Args:
            head: index of the head; for heads that our library runs together, the index of the first.
            inputs: [n, in] input of the head.
            ahead: per row the number of draft tokens before the predicted one.
        """
        if self._native:
            best = self._native[head](inputs, count)
            races = any(ranker(context.sampler) for context in contexts)
            looked_at = races or any(budget.asks_for_confidence for budget in budgets)
            if best.tokens and not looked_at:
                return best.tokens, None
            logits = best.whole()
        else:
            logits = self.rows(head, inputs)
        raced, of = raced_ahead(logits, contexts, ahead, self.head)
        return best_tokens(raced, count, of), raced

    def scored(self, head: int, inputs: Tensor) -> Tensor:
        """[rows, V_d] logits; the arguments are those of :meth:`best`."""
        return self._native[head](inputs, 0).whole() if self._native else self.rows(head, inputs)

    @abstractmethod
    def rows(self, head: int, inputs: Tensor) -> Tensor:
        """[rows, V_d] logits from the heads' PyTorch network; the arguments are those of :meth:`best`."""

    def project(self, head: int, hidden: Tensor) -> Tensor:
        """[n, V_d] logits of one head's output [n, D]."""
        if self.reduced:
            return self.reduced[head](hidden)
        if len(self.heads.projections):
            return self.heads.projections[head](hidden)
        return self.head(hidden)

    def _nodes(self, context: Context, budget: Budget, batch: int) -> list[int]:
        if not len(context.hidden.get("last", ())):
            return []
        most = budget.max_nodes
        if self.costs is not None and self.values:  # Drawn tokens must not depend on the other requests of the call.
            most = min(most, paying_count(self.values, self.costs, batch if context.sampler.fixed else 1))
        return fitting_nodes(self.choices, self.parents, budget.max_depth, most, self.head.size)

    def _tree(self, root: int, tokens: Mapping[int, int]) -> TokenTree:
        nodes = sorted(tokens)
        new_index = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        parents = (new_index[self.parents[node - 1]] for node in nodes)
        return TokenTree((root, *(tokens[node] for node in nodes)), (-1, *parents))


def ends_after(budget: Budget, logits: Tensor | None, row: int, rank: int) -> bool:
    """Whether the budget's stop rule ends a path after the token of this rank (0: the best) in a row of ``logits`` [n,
    V], which are present for every rule that needs them."""
    if logits is None or not budget.asks_for_confidence:
        return False
    distribution = torch.softmax(logits[row].float(), -1)
    return budget.stops_after(distribution, float(largest(distribution, rank + 1)[0][-1]))


def ranked_first(accuracies: Sequence[Sequence[float]] | None, width: int) -> list[Sequence[float]]:
    """Accuracies [K][R] of the first ``width`` ranks, of all for 0; typical ones if training did not measure."""
    return [row[: width or None] for row in accuracies or TYPICAL]
