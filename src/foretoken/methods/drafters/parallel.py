"""Drafters whose network says in one pass what may stand at each of the next places.

A request whose tokens are fixed, a greedy one or one with noise, gets the likeliest prefixes of the lattice of
candidates; one that samples gets a chain or a tree whose tokens are drawn from the distributions that it carries.
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
from foretoken.methods.drafters.base import BatchDrafter
from foretoken.methods.drafters.drawing import distribution_of, is_ranked, log_beliefs, ranked
from foretoken.methods.drafters.drawn_tree import DrawnTree, check_draw, drawn_places, paying_places, traits_of
from foretoken.methods.drafters.dynamic import MOST_NODES
from foretoken.methods.trees.cost_aware import PayingNodes
from foretoken.methods.trees.counts import StaticTree
from foretoken.methods.trees.lattice import Continuations, lattice
from foretoken.models.base import LanguageModel
from foretoken.models.call_costs import quick_costs


class DraftIds(Protocol):
    """Which of the target's tokens a network's logits are of."""

    vocab_size: int

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of places in the logits, any shape."""

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids: what cannot be guessed is impossible."""


@dataclass(frozen=True)
class PlaceScores:
    """What may stand at one place.

    Attributes:
        scores: [C] unnormalised log-probabilities.
        ids: [C] draft ids that they are of; ``None``: all, in order.
        ends: nothing is drafted here.
    """

    scores: Tensor
    ids: Tensor | None = None
    ends: bool = False


@dataclass(frozen=True)
class BestTable:
    """The best candidates of many rows.

    Attributes:
        tokens: per row the target's ids, best first.
        beliefs: gives log-probabilities [n, C] of all candidates of every row.
    """

    tokens: list[list[int]]
    log_probs: list[list[float]]
    beliefs: Callable[[], Tensor]

    def row(self, row: int, budget: Budget) -> Continuations:
        log_probs = self.log_probs[row]
        return Continuations(self.tokens[row], log_probs, _ends(lambda: self.beliefs()[row], log_probs, budget))


def _ends(beliefs: Callable[[], Tensor], log_probs: Sequence[float], budget: Budget) -> list[bool]:
    """Per candidate whether drafting ends behind it; ``beliefs`` [C] are of all candidates of its place."""
    if not budget.asks_for_confidence:
        return [False] * len(log_probs)
    distribution = beliefs().exp()
    return [budget.stops_after(distribution, math.exp(value)) for value in log_probs]


class Guesses:
    """What the network says of the places of one request's block.

    Args:
        logits: [k, V_d] of the rows that guess.
        ids: what the logits are of.
        races: whether candidates are those of a race on the request's noise.
        best: log-probabilities and draft ids, each [k, C], of the best tokens, best first, where they are known.
    """

    by_path: bool = False
    """Whether a place's scores depend on more of the path than :meth:`_row_of` tells."""

    def __init__(
        self, context: Context, logits: Tensor, ids: DraftIds, races: bool, best: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.context, self.logits, self.head, self.races, self._best = context, logits, ids, races, best
        self._tables: dict[int, BestTable] = {}  # by width

    def row(self, path: Sequence[int], state: Any) -> tuple[PlaceScores, Any]:
        """The place behind a path of drafted tokens, and what the next place is asked with."""
        return PlaceScores(self.logits[len(path)]), None

    def place(self, path: Sequence[int], state: Any, width: int, budget: Budget) -> Continuations:
        """The ``width`` best candidates behind a path; with noise those of the race."""
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
            if ids is not None:  # nothing else is possible
                scores = scores[self.head.mapped(ids)]
        sure = log_beliefs(scores.float()[None])[0]
        values, best = largest(sure, min(width, len(sure)))
        if ids is not None or not self.races:
            best = self.head.mapped(best if ids is None else ids[best])
        log_probs = values.tolist()
        return Continuations(best.tolist(), log_probs, _ends(lambda: sure, log_probs, budget), after)

    def _table(self, width: int) -> BestTable:
        """The best candidates of all places at once."""

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
        """As a request whose pipeline is context-free ranks candidates by its noise, [k, ..., C] like their scores;
        ``tokens`` [k, C] are the target's ids of them."""
        sampler, length = self.context.sampler, len(self.context.tokens)
        log_probs = sampler.log_probs(scores.flatten(0, -2)).view(scores.shape)
        whole = scores.new_empty(1).expand(self.head.vocab_size)
        rows = sampler.noise_rows(range(length, length + len(scores)), whole)
        noise = torch.stack([row[ids] for row, ids in zip(rows, tokens, strict=True)])
        return log_probs + noise.view(len(noise), *[1] * (scores.ndim - 2), -1)

    def _row_of(self, path: Sequence[int]) -> int:
        """Where in :meth:`_table` the candidates behind a path are."""
        return len(path)

    def distribution(self, path: Sequence[int], row: PlaceScores) -> Tensor | None:
        """[V] what a token behind a path is drawn from; ``None`` where the request allows nothing of it."""
        sampler = self.context.sampler
        prefix = () if sampler.context_free else (*self.context.tokens, *path)
        return distribution_of(sampler, self._spread(row)[0], prefix)

    def _ranking(self, path: Sequence[int], row: PlaceScores) -> Tensor:
        text, sampler = self.context.tokens, self.context.sampler
        prefixes = None if sampler.context_free else [[*text, *path]]
        return ranked(sampler, self._spread(row), [len(text) + len(path)], prefixes)

    def _spread(self, row: PlaceScores) -> Tensor:
        """Scores [1, V] over the target's ids: what is no candidate is impossible."""
        if row.ids is None:
            return self.head.widened(row.scores[None])
        wide = row.scores.new_full((1, self.head.vocab_size), -torch.inf)
        wide[0, self.head.mapped(row.ids)] = row.scores
        return wide


class ParallelDrafter(BatchDrafter):
    """Trees of the lattice, or drawn chains and trees.

    Options of them all: ``nodes``, the most draft nodes (a spec that leaves it out gets up to 60, as many as pay by
    what the target's calls cost on this machine); ``width``, the candidates of every place (1: a chain); ``draw``, what
    requests that sample without noise get, and ``tree``, as for the drafter ``eagle``.

    Attributes:
        costs: what a call of the target costs by its nodes; with it a tree keeps as many of its nodes as pay, by the
            chances that the draft gives them.
    """

    width: int
    draw: str
    places: StaticTree
    costs: TargetCost | None = None
    model: LanguageModel

    def _shape(self, nodes: int, depth: int, width: int, draw: str, tree: str, rewinds: bool = False) -> None:
        """Take the options that say what is drafted.  Raises ``ValueError`` for an option outside its range."""
        check_draw(self.name, draw)
        check_least(self.name, 1, nodes=nodes, width=width)
        self.width, self.draw, self.max_depth, self.max_nodes = width, draw, depth, nodes
        self.places = drawn_places(draw, tree, self.name, nodes, depth)
        self.traits = replace(traits_of(draw, width > 1, self.places.branches), rewinds=rewinds)

    @classmethod
    def sized(cls, target: LanguageModel, options: dict[str, Any], /, *args: Any, **more: Any) -> Self:
        """With trees that are as large as pays on this machine, unless the option ``nodes`` says how large they are."""
        built = cls(*args, **more, **{"nodes": MOST_NODES, **options})
        if "nodes" not in options:
            built.fit(quick_costs(target))
        return built

    def fit(self, costs: TargetCost) -> None:
        """Keep as many nodes of every tree as pay by what the target's calls cost."""
        self.costs, self.places = costs, paying_places(self.places, costs)
        self._paying_of = dict[int, PayingNodes]()  # by the requests that share a call

    def _races(self, context: Context) -> bool:
        return is_ranked(context.sampler, self.draw == "greedy")

    def propose_batch(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[TokenTree]:
        """One pass for the whole batch; a text that has not been read yet, or that leaves no room, waits."""
        depths = [self._depth(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        guesses = self._all_guesses(contexts, depths)
        trees = [TokenTree.root_only(context.root) for context in contexts]
        for i, guess in guesses.items():
            sharing = len(guesses) if contexts[i].sampler.fixed else 1
            trees[i] = self.drafted(guess, budgets[i], depths[i], sharing)
        return trees

    def _depth(self, context: Context, budget: Budget) -> int:
        """Places of a pass, which stand behind the text in the network's context."""
        room = 1 + self.model.context_length - len(context.tokens)
        return min(self.max_depth, budget.max_depth, budget.max_nodes, room)

    @abstractmethod
    def _all_guesses(self, contexts: Sequence[Context], depths: Sequence[int]) -> dict[int, Guesses]:
        """What the network says, by place in the batch, of as many places as ``depths`` has; requests that cannot be
        drafted for are left out."""

    def drafted(self, guess: Guesses, budget: Budget, depth: int, sharing: int) -> TokenTree:
        """The tree of one request, or its drawn chain or tree.

        Args:
            guess: what the network says of its places.
            sharing: requests whose nodes the target scores by the same call, as far as the tree may depend on that.
        """
        if self.draw != "greedy" and not guess.context.sampler.fixed:
            return self._drawn(guess, budget, depth)

        def place(path: Sequence[int], state: Any) -> Continuations:
            return guess.place(path, state, self.width, budget)

        paying = self._paying(sharing)
        most = min(self.max_nodes, budget.max_nodes)
        candidates = lattice(guess.context.root, place, depth, most, None if paying is None else paying.add)
        return candidates.tree(range(1, len(candidates))[: None if paying is None else paying.count])

    def _paying(self, sharing: int) -> PayingNodes | None:
        if self.costs is None:
            return None
        if sharing not in self._paying_of:
            self._paying_of[sharing] = PayingNodes(self.costs, sharing, self.max_nodes)
        return self._paying_of[sharing].start()

    def _drawn(self, guess: Guesses, budget: Budget, depth: int) -> TokenTree:
        """Tokens that are drawn behind each other, each from its recorded distribution."""
        drawn = DrawnTree(guess.context, self.places, replace(budget, max_depth=depth), self.max_nodes)
        behind: dict[int, Any] = {}  # by node what the places of its children are asked with

        def after(node: int) -> Tensor | None:
            path = drawn.path_of[node]
            row, behind[node] = guess.row(path, behind[drawn.parents[node]] if node else None)
            return None if row.ends else guess.distribution(path, row)

        return drawn.grow(after)
