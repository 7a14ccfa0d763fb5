"""Base of the drafters that copy from text: a source that knows a text and predicts its continuation.

A :class:`NgramSource` receives the tokens of one request (``extend``) and returns a :class:`SourceDraft` (``propose``):
a tree of tokens, each with an estimate of the probability that the whole path to it is right.  The sum of these
estimates is the expected number of accepted tokens, by which sources are compared (SuffixDecoding, arXiv 2411.04975).

All guesses are deterministic, so the point rule makes them lossless.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.texts import reading


@dataclass(frozen=True)
class SourceDraft:
    """A tree of deterministic tokens below the root.

    Attributes:
        tokens: N token ids, parents before children.
        parents: N indices into ``tokens``; ``-1`` is the root.
        scores: N estimates of the probability that the path down to this token is right.
        match: length of the matched n-gram.
        counted: whether the scores are relative frequencies (only then may a confidence threshold cut the draft).
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()
    match: int = 0
    counted: bool = False

    @classmethod
    def copied(cls, tokens: Sequence[int], match: int) -> SourceDraft:
        """A chain copied from one match; its probability per token grows with the match's length."""
        sure = match / (match + 1)
        return cls(tokens, range(-1, len(tokens) - 1), [sure ** (i + 1) for i in range(len(tokens))], match)

    @cached_property
    def expected(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.scores)

    def within(self, budget: Budget) -> SourceDraft:
        """The part within the budget: depth, number of nodes (parents come first), and confidence if it was counted."""
        asks = self.counted and (budget.min_confidence > 0 or budget.stop is not None)
        if not asks and len(self.tokens) <= min(budget.max_depth, budget.max_nodes):
            return self
        new_index: dict[int, int] = {-1: -1}
        depth, ended = {-1: 0}, set()
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if len(nodes) >= budget.max_nodes:
                break
            if parent not in new_index or parent in ended or depth[parent] >= budget.max_depth:
                continue
            new_index[node], depth[node] = len(nodes), depth[parent] + 1
            nodes.append(node)
            above = self.scores[parent] if parent >= 0 else 1.0
            if asks and budget.stops_after(None, self.scores[node] / above):
                ended.add(node)
        return SourceDraft(
            [self.tokens[n] for n in nodes],
            [new_index[self.parents[n]] for n in nodes],
            [self.scores[n] for n in nodes],
            self.match,
            self.counted,
        )

    def tree(self, root: int) -> TokenTree:
        return TokenTree((root, *self.tokens), (-1, *(parent + 1 for parent in self.parents)))


NOTHING = SourceDraft()


class NgramSource(ABC):
    """Knows the tokens of one request and predicts their continuation.

    Attributes:
        text: the request's tokens so far, the root last.
        has_read: whether the text before the first proposal was read.
    """

    has_read: bool = False

    def __init__(self) -> None:
        self.text: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request."""
        self.text.extend(tokens)

    def read(self) -> None:  # noqa: B027
        """Read what :meth:`extend` only stored, before the first proposal."""

    @abstractmethod
    def propose(self, budget: Budget) -> SourceDraft:
        """Predict the tokens after ``text``."""

    def rewind(self, length: int) -> None:
        """Cut the text to its first ``length`` tokens (called only if the drafter ``rewinds``)."""
        del self.text[length:]

    def close(self) -> None:  # noqa: B027
        """The request ended."""


class SourceDrafter(Drafter):
    """A drafter with one :class:`NgramSource` per request.  It learns from rounds only for the sake of other
    requests."""

    traits = Traits(learns=False)

    @abstractmethod
    def open(self, context: Context) -> NgramSource:
        """A source for a new request, without tokens yet."""

    def source(self, context: Context) -> NgramSource:
        """The request's source, after reading all committed tokens."""
        source: NgramSource | None = context.state.get(self)
        if source is None:
            with reading(context):
                source = context.state[self] = self.open(context)
                source.extend(context.tokens)
        if len(source.text) < len(context.tokens):
            source.extend(context.tokens[len(source.text) :])
        return source

    def start(self, context: Context) -> None:
        """Open the source if other requests may use its tokens; otherwise the first proposal does."""
        if self.traits.shares_state:
            self.source(context)

    def draft(self, context: Context, budget: Budget) -> SourceDraft:
        """The draft of :meth:`propose`, with the estimates that a router compares."""
        source = self.source(context)
        if not source.has_read:
            with reading(context):
                source.read()
            source.has_read = True
        return source.propose(budget).within(budget)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        return self.draft(context, budget).tree(context.root)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Read the new tokens if other requests may use them; otherwise the next proposal does."""
        if self.traits.shares_state:
            self.source(context)

    def rewind(self, context: Context, length: int) -> None:
        source: NgramSource | None = context.state.get(self)
        if source is not None and len(source.text) > length:
            source.rewind(length)

    def finish(self, context: Context) -> None:
        """Remove the request's source, which first reads the last tokens if other requests may use them."""
        if self in context.state:
            source: NgramSource = self.source(context) if self.traits.shares_state else context.state[self]
            source.close()
        super().finish(context)


class Automaton:
    """A suffix automaton over one or several texts, built token by token.

    A state represents all strings that end at the same positions of the texts; ``length`` is that of its longest string
    and ``link`` the state of the longest suffix that also ends elsewhere.  State 0 is the empty string.  Appending
    takes amortised constant time; a state is six integers, plus a dictionary if the text branches there. Blumer et al.
    1985; several texts as in Mohri, Moreno, Weinstein 2009.

    Args:
        depth: longest string that must be distinguished (0: any); bounds the time of counting.
        counted: keep the number of occurrences of each state's strings of at most ``depth`` tokens in ``count``.
    """

    def __init__(self, depth: int = 0, counted: bool = False) -> None:
        self.depth, self.counted = depth, counted
        self.text = array("i")
        self.length, self.link = array("i", [0]), array("i", [-1])
        self.first_end, self.count = array("i", [-1]), array("i", [0])
        self._token, self._next = array("i", [-1]), array("i", [-1])
        self._branches: dict[int, dict[int, int]] = {}

    def append(self, last: int, token: int) -> int:
        """Append ``token`` to the text that ends in state ``last`` (0: a new text); return the new end."""
        length, link = self.length, self.link
        if self.depth:
            while last and length[link[last]] >= self.depth:
                last = link[last]
        self.text.append(token)
        state = self.go(last, token)
        if state < 0:
            state = self._new(length[last] + 1, len(self.text) - 1)
            while last >= 0 and self.go(last, token) < 0:
                self._set(last, token, state)
                last = link[last]
            link[state] = 0 if last < 0 else self._exactly(last, token)
        else:
            state = self._exactly(last, token)
        if self.counted:
            at = state
            while at > 0:
                self.count[at] += 1
                at = link[at]
        return state

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of ``tokens`` that occurs."""
        state = matched = 0
        for token in tokens:
            following = self.go(state, token)
            while following < 0 and state:
                state = self.link[state]
                matched = self.length[state]
                following = self.go(state, token)
            if following >= 0:
                state, matched = following, matched + 1
        return state, matched

    def go(self, state: int, token: int) -> int:
        """The state after ``token``, -1 if it never followed."""
        if self._next[state] >= 0:
            return self._next[state] if self._token[state] == token else -1
        branches = self._branches.get(state)
        return -1 if branches is None else branches.get(token, -1)

    def goes_on(self, state: int) -> bool:
        """Whether any token ever followed."""
        return self._next[state] >= 0 or state in self._branches

    def children(self, state: int) -> Iterator[tuple[int, int]]:
        """Tokens that followed, in order of first appearance, with the states after them."""
        if self._next[state] >= 0:
            yield self._token[state], self._next[state]
        elif state in self._branches:
            yield from self._branches[state].items()

    def _set(self, state: int, token: int, to: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = to
        elif self._next[state] < 0 or self._token[state] == token:
            self._token[state], self._next[state] = token, to
        else:
            self._branches[state] = {self._token[state]: self._next[state], token: to}
            self._next[state] = -1

    def _new(self, length: int, end: int) -> int:
        columns = self.length, self.link, self.first_end, self.count, self._token, self._next
        for column, value in zip(columns, (length, 0, end, 0, -1, -1), strict=True):
            column.append(value)
        return len(self.length) - 1

    def _exactly(self, state: int, token: int) -> int:
        """The state after ``token`` whose longest string is that of ``state`` plus the token; split off if
        necessary."""
        following = self.go(state, token)
        if self.length[following] == self.length[state] + 1:
            return following
        clone = self._new(self.length[state] + 1, self.first_end[following])
        self.link[clone], self.count[clone] = self.link[following], self.count[following]
        self._token[clone], self._next[clone] = self._token[following], self._next[following]
        if following in self._branches:
            self._branches[clone] = dict(self._branches[following])
        while state >= 0 and self.go(state, token) == following:
            self._set(state, token, clone)
            state = self.link[state]
        self.link[following] = clone
        return clone
