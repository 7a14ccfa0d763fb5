"""Lookahead decoding: a window of parallel Jacobi iterations fills a pool of n-grams, which form the draft.

Fu et al. 2024, https://arxiv.org/abs/2402.02057.  One forward scores both: the pool's n-grams are draft nodes, the
window is a set of probe nodes below the same root.

Window for W columns and n-grams of N tokens, once it is filled (``root`` is the last committed token)::

    row 0     root  e1   e2   ...        a chain: every token is the parent of the next
    row 1     a0    a1   a2   ...        a0's parent is the root, a1's is e1, ...
    row N-2   b0    b1   b2   ...        the same column, one row up
    scored    x0    x1   x2   ...        the target's predictions: the next round's last row

Column j yields the n-gram ``e_j a_j ... b_j x_j``.  Row l, column j has depth j + l, and attends to its ancestors and
itself, as the method requires: row 0 up to its column, then straight down its column.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict, check_least
from foretoken.methods.drafters.base import BuildContext, Drafter, Traits
from foretoken.methods.drafters.jacobi import predictions
from foretoken.methods.trees.operations import first_nodes, from_paths

Gram = tuple[int, ...]


class NgramPool:
    """The ``size`` most recently seen continuations of every first token; 0 keeps all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._grams: dict[int, dict[Gram, None]] = {}  # least recent first

    def add(self, key: int, gram: Gram) -> None:
        """Make ``gram`` the most recent continuation of ``key``; drop the least recent one if there are too many."""
        grams = self._grams.setdefault(key, {})
        grams.pop(gram, None)
        grams[gram] = None
        if self.size and len(grams) > self.size:
            del grams[next(iter(grams))]

    def of(self, key: int) -> list[Gram]:
        """The continuations of ``key``, the most recent first."""
        return list(reversed(self._grams.get(key, {})))

    def __len__(self) -> int:
        return sum(map(len, self._grams.values()))


@dataclass
class _Lookahead:
    """One request's window and pool.

    Attributes:
        rows: the window's tokens row by row; row 0 without the root.
        in_pool: number of tokens whose n-grams are in the pool (``pool_from_prompt``).
        first_row: row 0 with the root, as proposed.
        width: columns in the tree (fewer than the window's if the context is nearly full).
        last: first node of the window's last row: 0, the root, while row 0 is the last.
        fill: returns ``k`` random tokens, the same ones for the same prompt.
    """

    rows: list[list[int]]
    pool: NgramPool
    fill: Callable[..., list[int]]
    in_pool: int = 0
    proposed: TokenTree | None = None
    first_row: list[int] = field(default_factory=list)
    width: int = 0
    last: int = 0


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target produced in its lookahead window.

    Args:
        w: columns of the window, W.
        n: length of the n-grams, N; the window has N - 1 rows and a draft N - 1 tokens.
        g: maximum n-grams kept and drafted per first token, G; 0 keeps all and drafts what the budget allows.
        pool_from_prompt: put the n-grams of the request's tokens into the pool as well.
        shift: how the window moves: ``"one"`` column per round; ``"accepted"``, once more for every accepted token with
            the freed last row a copy of row 0 (llama.cpp); or ``"refill"``, one more column for every accepted token
            with random tokens at the end of every row (the original code's other mode).
        fill: source of random tokens: the ``"prompt"``, or all of the ``"vocabulary"``.
        context_length: number of positions that limits the probes, in a spec the target's; ``None`` keeps probes within
            the budget's depth instead, which the engine keeps within the context.
        vocab_size: number of tokens for ``fill="vocabulary"``, in a spec the target's.
    """

    name = "lookahead"
    traits = Traits(draws_trees=True)  # the window branches even if the draft is one n-gram

    def __init__(
        self,
        w: int = 7,
        n: int = 5,
        g: int = 7,
        pool_from_prompt: bool = False,
        shift: str = "one",
        fill: str = "prompt",
        context_length: int | None = None,
        vocab_size: int = 0,
    ) -> None:
        check_least(self.name, 1, w=w)
        check_least(self.name, 2, n=n)
        check_least(self.name, 0, g=g)
        if shift not in ("one", "accepted", "refill"):
            raise ValueError(f"shift must be 'one', 'accepted' or 'refill', not {shift!r}")
        if fill not in ("prompt", "vocabulary"):
            raise ValueError(f"fill must be 'prompt' or 'vocabulary', not {fill!r}")
        if fill == "vocabulary" and vocab_size < 1:
            raise ValueError("fill='vocabulary' needs the target's vocab_size")
        self.w, self.n, self.g = w, n, g
        self._fill_from = vocab_size if fill == "vocabulary" else 0
        self.pool_from_prompt, self.shift, self.context_length = pool_from_prompt, shift, context_length
        # The deepest probe has depth W + N - 3; it counts only if the budget is the only limit.
        self.max_depth = n - 1 if context_length is not None else max(n - 1, w + n - 3)
        self.max_nodes = (g or 16) * (n - 1)  # without g, the budget is the real limit

    @classmethod
    def build(cls, path: str | None, context: BuildContext, **options: Any) -> LookaheadDrafter:
        """Build from a spec ``lookahead[,w=W,n=N,g=G]``."""
        if path is not None:
            raise ValueError(
                f"drafter 'lookahead' takes no path, not {path!r}: give options, as in lookahead,w=7,n=5,g=7"
            )
        target = context.target
        return cls(**{"context_length": target.context_length, "vocab_size": target.vocab_size, **options})

    def start(self, context: Context) -> None:
        ids = range(self._fill_from) if self._fill_from else context.tokens[: context.prompt_length]
        fill = partial(random.Random(0).choices, ids)
        state = context.state[self] = _Lookahead([fill(k=self.w + self.n - 3)], NgramPool(self.g), fill)
        self._learn_text(state, context)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """The pool's n-grams that begin with the root, as a trie, followed by the window as probes."""
        state = self._state(context)
        depth = min(self.n - 1, budget.max_depth)
        draft = from_paths(context.root, [gram[:depth] for gram in state.pool.of(context.root)])
        room = budget.max_depth if self.context_length is None else self.context_length - len(context.tokens)
        state.proposed = self._with_window(first_nodes(draft, budget.max_nodes), state, room)
        return state.proposed

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Collect one n-gram per column and move the window."""
        state = self._state(context)
        nodes = None if state.proposed is None else tree.nodes_in(state.proposed)
        scored = [] if nodes is None else _scored_row(state, nodes, scores)
        if scored:
            if len(state.rows) == self.n - 1:
                for column in zip(state.first_row, *state.rows[1:], scored, strict=False):
                    state.pool.add(column[0], column[1:])
            # Columns that were not scored keep the token above, so that the row stays whole.
            above = state.rows[-1] if state.last else state.first_row
            self._move(state, scored + above[len(scored) :], len(verdict.path))
        state.proposed = None
        self._learn_text(state, context)

    def _state(self, context: Context) -> _Lookahead:
        if self not in context.state:
            self.start(context)
        return context.state[self]

    def _with_window(self, draft: TokenTree, state: _Lookahead, room: int) -> TokenTree:
        """Add the window's probes, as many columns as fit into ``room`` positions below the root.

        The draft comes first, so that its first n-gram is already in place in the cache if it is accepted.
        """
        rows = state.rows
        state.first_row = [draft.tokens[0], *rows[0]]
        state.width = width = max(0, min(len(state.first_row), room - len(rows) + 2))
        if width == 0:
            return draft
        tokens, parents = [*draft.tokens, *rows[0][: width - 1]], list(draft.parents)
        row = [0, *range(len(parents), len(tokens))]
        parents += row[:-1]
        for next_row in rows[1:]:
            parents += row
            row = list(range(len(tokens), len(tokens) + width))
            tokens += next_row[:width]
        state.last = row[0]
        probes = (False,) * len(draft) + (True,) * (len(tokens) - len(draft))
        return TokenTree(tuple(tokens), tuple(parents), probes=probes)

    def _move(self, state: _Lookahead, scored: list[int], accepted: int) -> None:
        """Move rows up by one; ``scored`` becomes the last one, and row 0 loses the token that the root replaces."""
        rows = state.rows
        if len(rows) < self.n - 1:  # filling: every row is one shorter each round, down to W
            rows[:] = [*(row[1:] for row in rows), scored[1:]]
            return
        rows[:] = [*rows[1:], scored]
        if self.shift == "accepted" and self.n > 2:
            for _ in range(accepted):
                rows[:] = [*rows[1:], rows[1]]
        rows[0] = rows[0][1:]
        if self.shift == "refill":
            rows[:] = [[*row[accepted:], *state.fill(k=len(row) - len(row[accepted:]))] for row in rows]

    def _learn_text(self, state: _Lookahead, context: Context) -> None:
        if not self.pool_from_prompt:
            return
        tokens = context.tokens
        for end in range(max(state.in_pool + 1, self.n), len(tokens) + 1):
            state.pool.add(tokens[end - self.n], tuple(tokens[end - self.n + 1 : end]))
        state.in_pool = len(tokens)


def _scored_row(state: _Lookahead, nodes: Sequence[int], scores: Scores) -> list[int]:
    """The predictions after the last row, column by column, up to the first column that was cut from the tree.

    Args:
        nodes: the proposed tree's node for each scored one.
    """
    if state.proposed is None or not state.width:
        return []
    if state.last:
        return _predictions_of(state.last, state.last + state.width, nodes, scores)
    end = len(state.proposed)  # row 0 is the last: the root, and the chain that ends the tree
    return predictions(scores, 0, 1) + _predictions_of(end - state.width + 1, end, nodes, scores)


def _predictions_of(first: int, end: int, nodes: Sequence[int], scores: Scores) -> list[int]:
    """The predictions after the proposed tree's nodes from ``first`` on, up to ``end`` or the first that was cut."""
    start = bisect_left(nodes, first)
    scored = takewhile(lambda pair: pair[0] == pair[1], zip(nodes[start:], range(first, end), strict=False))
    count = len(list(scored))
    return predictions(scores, start, start + count) if count else []
