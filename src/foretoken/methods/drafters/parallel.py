"""Drafters whose network predicts candidates for each of the next positions in one pass.

A request with fixed tokens, a greedy one or one with noise, gets the likeliest prefixes of the lattice of candidates.
A request that samples gets a chain or a tree with the distributions that its tokens were drawn from.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from foretoken.core import Budget, Context, TokenTree, check_least
from foretoken.core.costs import TargetCost
from foretoken.core.largest import largest
from foretoken.core.sampling import Sampler
from foretoken.methods.drafters.base import WIDTH_ONE, BatchDrafter
from foretoken.methods.drafters.drawing import distribution_of, log_beliefs, ranked, ranker
from foretoken.methods.drafters.drawn_tree import DrawnTree, check_draw, drawn_shape, paying_static_tree, traits_of
from foretoken.methods.drafters.dynamic import MOST_NODES
from foretoken.methods.trees.cost_aware import PayingNodes
from foretoken.methods.trees.counts import StaticTree
from foretoken.methods.trees.lattice import Continuations, lattice
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs


class DraftIds(Protocol):
    """Mapping from a network's logits to the target's ids."""

    vocab_size: int

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of indices into the logits, any shape."""

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids; -inf outside the draft vocabulary."""


@dataclass(frozen=True)
class PositionScores:
    """Candidates at one position.

    Attributes:
        scores: [C] unnormalised log-probabilities.
        ids: [C] draft ids of the scores; ``None``: all, in order.
        ends: whether the draft ends before this position.
    """

    scores: Tensor
    ids: Tensor | None = None
    ends: bool = False


@dataclass(frozen=True)
class BestTable:
    """The best candidates of many rows.

    Attributes:
        tokens: per row the target's ids, best first.
        log_probs: per row the tokens' log-probabilities.
        beliefs: returns the log-probabilities [n, C] of all candidates of every row.
    """

    tokens: list[list[int]]
    log_probs: list[list[float]]
    beliefs: Callable[[], Tensor]

    def row(self, row: int, budget: Budget) -> Continuations:
        log_probs = self.log_probs[row]
        return Continuations(self.tokens[row], log_probs, _ends(lambda: self.beliefs()[row], log_probs, budget))


def _ends(beliefs: Callable[[], Tensor], log_probs: Sequence[float], budget: Budget) -> list[bool]:
    """Whether drafting ends after each candidate; ``beliefs`` returns [C] for all candidates of its position."""
    if not budget.asks_for_confidence:
        return [False] * len(log_probs)
    distribution = beliefs().exp()
    return [budget.stops_after(distribution, math.exp(value)) for value in log_probs]


class Predictions:
    """The network's predictions for one request's block.

    Args:
        logits: [k, V_d] of the predicting rows.
        ids: mapping of the logits to the target's ids.
        ranker: the sampler by which candidates are chosen (:func:`foretoken.methods.drafters.drawing.ranker`).
        best: log-probabilities and draft ids, each [k, C], of the best tokens, best first, if known.
    """

    by_path: bool = False
    """Whether a position's scores depend on more of the path than :meth:`_row_of` returns."""

    def __init__(
        self,
        context: Context,
        logits: Tensor,
        ids: DraftIds,
        ranker: Sampler | None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.context, self.logits, self.head, self._best = context, logits, ids, best
        self.ranker, self.races = ranker, ranker is not None
        self._tables: dict[int, BestTable] = {}  # by width

    def row(self, path: Sequence[int], state: Any) -> tuple[PositionScores, Any]:
        """Candidates after a path of draft tokens, and the state to pass for the next position."""
        return PositionScores(self.logits[len(path)]), None

    def continuations(self, path: Sequence[int], state: Any, width: int, budget: Budget) -> Continuations:
        """The ``width`` best candidates after a path, with noise those of the race."""
        if not self.by_path and (not self.races or self.context.sampler.context_free):
            if width not in self._tables:
                self._tables[width] = self._table(width)
            return self._tables[width].row(self._row_of(path), budget)
        row, after = self.row(path, state)
        if row.ends:
            return Continuations((), (), ())
        scores, ids = row.scores, row.ids
        if self.races:
            scores = self._ranking(path, row)[0]
            if ids is not None:  # all other tokens are impossible
                scores = scores[self.head.mapped(ids)]
        sure = log_beliefs(scores.float()[None])[0]
        values, best = largest(sure, min(width, len(sure)))
        if ids is not None or not self.races:
            best = self.head.mapped(best if ids is None else ids[best])
        log_probs = values.tolist()
        return Continuations(best.tolist(), log_probs, _ends(lambda: sure, log_probs, budget), after)

    def _table(self, width: int) -> BestTable:
        @cache
        def beliefs() -> Tensor:
            scores = self.logits.float()
            every = self.head.mapped(torch.arange(scores.shape[-1], device=scores.device))
            return log_beliefs(self._raced(scores, every.expand(scores.shape)) if self.races else scores)

        width, best = min(width, self.logits.shape[-1]), self._best
        if best is None or best[0].shape[-1] < width or self.races:
            best = largest(beliefs(), width)
        values, ids = (each[:, :width] for each in best)
        return BestTable(self.head.mapped(ids).tolist(), values.tolist(), beliefs)

    def _raced(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Scores [k, ..., C] plus the request's noise, for a context-free sampler; ``tokens`` [k, C] are the target's
        ids."""
        sampler, length = self.context.sampler, len(self.context.tokens)
        log_probs = sampler.log_probs(scores.flatten(0, -2)).view(scores.shape)
        whole = scores.new_empty(1).expand(self.head.vocab_size)
        rows = sampler.noise_rows(range(length, length + len(scores)), whole)
        noise = torch.stack([row[ids] for row, ids in zip(rows, tokens, strict=True)])
        return log_probs + noise.view(len(noise), *[1] * (scores.ndim - 2), -1)

    def _row_of(self, path: Sequence[int]) -> int:
        """Row of :meth:`_table` with the candidates after a path."""
        return len(path)

    def distribution(self, path: Sequence[int], row: PositionScores) -> Tensor | None:
        """Distribution [V] of the token after a path; ``None`` if the request allows no candidate."""
        sampler = self.context.sampler
        prefix = () if sampler.context_free else (*self.context.tokens, *path)
        return distribution_of(sampler, self._spread(row)[0], prefix)

    def survival(self, tree: TokenTree, chances: Sequence[float] | None) -> Sequence[float]:
        """Estimated acceptance probability of every node of the finished tree; empty if there is none.

        Args:
            chances: the draft's own probabilities of the paths, for point proposals.
        """
        return () if chances is None else chances

    def _ranking(self, path: Sequence[int], row: PositionScores) -> Tensor:
        tokens, sampler = self.context.tokens, self.ranker or self.context.sampler
        prefixes = None if sampler.context_free else [[*tokens, *path]]
        return ranked(sampler, self._spread(row), [len(tokens) + len(path)], prefixes)

    def _spread(self, row: PositionScores) -> Tensor:
        """Scores [1, V] over the target's ids; -inf for other tokens than the candidates."""
        if row.ids is None:
            return self.head.widened(row.scores[None])
        wide = row.scores.new_full((1, self.head.vocab_size), -torch.inf)
        wide[0, self.head.mapped(row.ids)] = row.scores
        return wide


class ParallelDrafter(BatchDrafter):
    """Trees of the lattice, or drawn chains and trees.

    Options:
        nodes: maximum draft nodes; in a spec by default as many as pay off on this machine, at most 60.
        width: candidates per position (1: a chain).
        draw, tree: as for :class:`~foretoken.methods.drafters.features.FeatureDrafter`.

    Attributes:
        costs: cost of a target call by its number of nodes.  If set, a tree keeps as many nodes as pay off by the
            draft's probabilities.
    """

    chain = WIDTH_ONE
    width: int
    draw: str
    shape: StaticTree
    model: LanguageModel
    _costs: TargetCost | None = None

    @property
    def costs(self) -> TargetCost | None:
        return self._costs

    @costs.setter
    def costs(self, costs: TargetCost | None) -> None:
        self._costs = costs
        self._paying_of = dict[int, PayingNodes]()  # by the number of requests in a call

    def _shape(self, nodes: int, depth: int, width: int, draw: str, tree: str, rewinds: bool = False) -> None:
        """Set the options of the draft's shape.  Raises ``ValueError`` for an option outside its range."""
        check_draw(self.name, draw)
        check_least(self.name, 1, nodes=nodes, width=width)
        self.width, self.draw, self.max_depth, self.max_nodes = width, draw, depth, nodes
        self.shape = drawn_shape(draw, tree, self.name, nodes, depth)
        self.traits = replace(traits_of(draw, width > 1, self.shape.branches), rewinds=rewinds)

    @classmethod
    def sized(cls, target: LanguageModel, nodes: int | None, /, *args: Any, **options: Any) -> Self:
        """Construct with trees of ``nodes`` nodes; ``None``: as many as pay off on this machine."""
        built = cls(*args, **{"nodes": MOST_NODES if nodes is None else nodes, **options})
        if nodes is None:
            built.fit(quick_costs(target))
        return built

    def fit(self, costs: TargetCost) -> None:
        """Keep as many nodes of every tree as pay off by the costs of the target's calls."""
        self.costs, self.shape = costs, paying_static_tree(self.shape, costs)

    def _ranker(self, context: Context) -> Sampler | None:
        return ranker(context.sampler, self.draw == "greedy")

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One pass for the whole batch; a request whose tokens are not read yet or leave no room gets no draft."""
        depths = [self._depth(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        predictions = self._all_predictions(contexts, depths)
        trees = [TokenTree.root_only(context.root) for context in contexts]
        for i, prediction in predictions.items():
            sharing = len(predictions) if contexts[i].sampler.fixed else 1
            trees[i] = self.drafted(prediction, budgets[i], depths[i], sharing)
        return trees

    def _depth(self, context: Context, budget: Budget) -> int:
        """Number of predicted positions, limited by the network's context."""
        room = 1 + self.model.context_length - len(context.tokens)
        return min(self.max_depth, budget.max_depth, budget.max_nodes, room)

    @abstractmethod
    def _all_predictions(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Predictions]:
        """Predictions for ``depths`` positions, by index in the batch, without requests that cannot be drafted for."""

    def drafted(self, prediction: Predictions, budget: Budget, depth: int, sharing: int) -> TokenTree:
        """The tree of one request, or its drawn chain or tree.

        Args:
            prediction: the network's predictions.
            sharing: requests in the target's next call, as far as the tree may depend on that.
        """
        if self.draw != "greedy" and not prediction.context.sampler.fixed:
            return self._drawn(prediction, budget, depth)

        def extend(path: Sequence[int], state: Any) -> Continuations:
            return prediction.continuations(path, state, self.width, budget)

        paying = self._paying(sharing)
        most = min(self.max_nodes, budget.max_nodes)
        candidates = lattice(prediction.context.root, extend, depth, most, None if paying is None else paying.add)
        tree = candidates.tree(range(1, len(candidates))[: None if paying is None else paying.count])
        if budget.survival:
            tree = replace(tree, survival=prediction.survival(tree, candidates.values(range(len(tree)))))
        return tree

    def _paying(self, sharing: int) -> PayingNodes | None:
        if self.costs is None:
            return None
        if sharing not in self._paying_of:
            self._paying_of[sharing] = PayingNodes(self.costs, sharing, self.max_nodes)
        return self._paying_of[sharing].start()

    def _drawn(self, prediction: Predictions, budget: Budget, depth: int) -> TokenTree:
        drawn = DrawnTree(prediction.context, self.shape, replace(budget, max_depth=depth), self.max_nodes)
        states: dict[int, Any] = {}  # by node, the state for its children's candidates

        def after(node: int) -> Tensor | None:
            path = drawn.path_of[node]
            row, states[node] = prediction.row(path, states[drawn.parents[node]] if node else None)
            return None if row.ends else prediction.distribution(path, row)

        tree = drawn.grow(after)
        return replace(tree, survival=prediction.survival(tree, None)) if budget.survival else tree
