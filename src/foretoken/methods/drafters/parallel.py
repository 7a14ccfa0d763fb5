"""Drafters whose network says in one pass what may stand at each of the next places.

A request whose tokens are fixed, a greedy one or one with noise, gets the likeliest prefixes of the lattice of
candidates; one that samples gets a chain whose tokens are drawn from the distributions that it carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core import Budget, Context, Kind, TokenTree
from foretoken.core.costs import TargetCost
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.drawing import distribution_of, draw_iid, log_beliefs, ranked
from foretoken.methods.drafters.growing import asks_for_confidence
from foretoken.methods.trees.cost_aware import paying_count
from foretoken.methods.trees.lattice import Place, lattice


class DraftIds(Protocol):
    """Which of the target's tokens a network's logits are of."""

    vocab_size: int

    def mapped(self, tokens: Tensor) -> Tensor:
        """Target ids of places in the logits, any shape."""

    def widened(self, logits: Tensor) -> Tensor:
        """Logits [n, V] over the target's ids: what cannot be guessed is impossible."""


@dataclass(frozen=True)
class Row:
    """What may stand at one place.

    Attributes:
        scores: [C] unnormalised log-probabilities.
        ids: [C] draft ids that they are of; ``None``: all, in order.
        ends: nothing is drafted here.
    """

    scores: Tensor
    ids: Tensor | None = None
    ends: bool = False


class Guesses:
    """What the network says of the places of one request's block.

    Args:
        context: the request.
        states: [k, D] the network's states of the rows that guess.
        logits: [k, V_d] their logits.
        ids: what the logits are of.
        races: whether candidates are those of a race on the request's noise.
    """

    def __init__(self, context: Context, states: Tensor, logits: Tensor, ids: DraftIds, races: bool) -> None:
        self.context, self.states, self.logits, self.head, self.races = context, states, logits, ids, races

    def row(self, path: Sequence[int], state: Any) -> tuple[Row, Any]:
        """The place behind a path of drafted tokens, and what the next place is asked with."""
        return Row(self.logits[len(path)]), None

    def place(self, path: Sequence[int], state: Any, width: int, budget: Budget) -> Place:
        """The ``width`` best candidates behind a path; with noise those of the race."""
        row, after = self.row(path, state)
        if row.ends:
            return Place((), (), ())
        sure = log_beliefs(self._ranking(path, row) if self.races else row.scores[None].float())[0]
        values, best = sure.topk(min(width, len(sure)))
        if not self.races:
            best = self.head.mapped(best if row.ids is None else row.ids[best])
        log_probs = values.tolist()
        confident = asks_for_confidence(budget)
        ends = [confident and budget.stops_after(sure.exp(), math.exp(value)) for value in log_probs]
        return Place(best.tolist(), log_probs, ends, after)

    def distribution(self, path: Sequence[int], row: Row) -> Tensor | None:
        """[V] what a token behind a path is drawn from; ``None`` where the request allows nothing of it."""
        maker = self.context.maker
        prefix = () if maker.context_free else (*self.context.tokens, *path)
        return distribution_of(maker, self._spread(row)[0], prefix)

    def _ranking(self, path: Sequence[int], row: Row) -> Tensor:
        text, maker = self.context.tokens, self.context.maker
        prefixes = None if maker.context_free else [[*text, *path]]
        return ranked(maker, self._spread(row), [len(text) + len(path)], prefixes)

    def _spread(self, row: Row) -> Tensor:
        """Scores [1, V] over the target's ids: what is no candidate is impossible."""
        if row.ids is None:
            return self.head.widened(row.scores[None])
        wide = row.scores.new_full((1, self.head.vocab_size), -torch.inf)
        wide[0, self.head.mapped(row.ids)] = row.scores
        return wide


class ParallelDrafter(Drafter):
    """Trees of the lattice, or drawn chains.

    Attributes:
        width: candidates of every place; 1: a chain.
        draw: ``"iid"``: requests that sample get a drawn chain, those with noise the tree of what comes first in the
            race; ``"greedy"``: both get the tree of the likeliest tokens, as greedy requests always do.
        costs: what a call of the target costs by its nodes; with it a tree keeps as many of its nodes as pay, by the
            chances that the draft gives them.
    """

    width: int
    draw: str
    costs: TargetCost | None = None

    def _shape(self, nodes: int, width: int, draw: str, rewinds: bool = False) -> None:
        """Take the options that say what is drafted.

        Raises:
            ValueError: an option outside its range.
        """
        if draw not in ("greedy", "iid"):
            raise ValueError(f"{self.name} needs draw=greedy or draw=iid, not {draw!r}")
        for key, value in (("nodes", nodes), ("width", width)):
            if value < 1:
                raise ValueError(f"{self.name} needs {key} >= 1, not {value}")
        self.width, self.draw, self.max_nodes = width, draw, nodes
        points = (Kind.POINT, width > 1)
        sorts = {points, (Kind.IID, False)} if draw == "iid" else {points}
        kind = Kind.IID if draw == "iid" else Kind.POINT
        self.traits = Traits(kind, width > 1, frozenset(sorts), rewinds=rewinds)

    def _races(self, context: Context) -> bool:
        return context.maker.noise is not None and self.draw != "greedy"

    def drafted(self, guess: Guesses, budget: Budget, depth: int, sharing: int) -> TokenTree:
        """The tree, or the drawn chain, of one request.

        Args:
            guess: what the network says of its places.
            budget: the most that may be drafted.
            depth: most tokens of a path.
            sharing: requests whose nodes the target scores by the same call, as far as the tree may depend on that.
        """
        if self.draw == "iid" and not guess.context.maker.fixed:
            return self._chain(guess, budget, depth)

        def place(path: Sequence[int], state: Any) -> Place:
            return guess.place(path, state, self.width, budget)

        seen = lattice(guess.context.root, place, depth, min(self.max_nodes, budget.max_nodes))
        kept = range(1, len(seen))
        if self.costs is not None and kept:
            kept = kept[: paying_count(seen.values(kept), self.costs, sharing)]
        return seen.tree(kept)

    def _chain(self, guess: Guesses, budget: Budget, depth: int) -> TokenTree:
        """Tokens that are drawn one after the other, each from its recorded distribution."""
        drafts, distributions, state = list[int](), list[Tensor](), None
        confident = asks_for_confidence(budget)
        while len(drafts) < min(depth, self.max_nodes):
            row, state = guess.row(drafts, state)
            distribution = None if row.ends else guess.distribution(drafts, row)
            if distribution is None:
                break  # a small draft vocabulary may hold nothing of what the request allows
            drafts += draw_iid(distribution, 1, guess.context)
            distributions.append(distribution)
            # A stop may only suppress what comes after the token: the token itself stays in the draft.
            if confident and budget.stops_after(distribution, float(distribution[drafts[-1]])):
                break
        return TokenTree.chain(guess.context.root, drafts, torch.stack(distributions) if drafts else None)
