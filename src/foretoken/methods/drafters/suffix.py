"""SuffixDecoding: frequencies of all suffixes of a request's tokens and past outputs
(https://arxiv.org/abs/2411.04975).

The paper keeps a tree of all suffixes with a count per node.  The suffix automaton here has the same counts for every
string, in memory linear in the text instead of ``depth`` nodes per token.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.core import Budget, Context, check_least
from foretoken.methods.drafters.base import Traits
from foretoken.methods.drafters.sources import NOTHING, Automaton, NgramSource, SourceDraft, SourceDrafter
from foretoken.methods.drafters.tenants import Tenants


@dataclass(frozen=True)
class MatchLimits:
    """Limits of a draft after a match.

    Attributes:
        most: maximum draft tokens.
        depth: maximum length of match plus draft.
        factor: draft tokens per matched token.
        offset: draft tokens in addition to these.
        min_prob: minimum estimated probability of a draft token.
        tree: draft a tree, best tokens first, instead of the most frequent path.
        levels: maximum depth of a tree.
    """

    most: int
    depth: int = 64
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1
    tree: bool = False
    levels: int = 64

    def allowed(self, matched: int) -> int:
        """Maximum draft tokens after a match of this length."""
        most = min(self.most, int(matched * self.factor + self.offset + 1e-6))
        return most if self.tree else min(most, self.depth - matched)


def speculate(automaton: Automaton, context: Sequence[int], limits: MatchLimits) -> SourceDraft:
    """The draft after the suffix of ``context`` with the largest expected number of accepted tokens."""
    tail = context[max(0, len(context) - limits.depth + 1) :]
    return speculate_from(automaton, *automaton.match(tail), limits)


def speculate_from(automaton: Automaton, state: int, matched: int, limits: MatchLimits) -> SourceDraft:
    """:func:`speculate` for a context whose last ``matched`` tokens lead to ``state``.

    All suffixes are tried; longer ones win ties.  Suffixes of one state have equal continuations, so only the one that
    allows most tokens is followed, and states that cannot win are skipped.
    """
    best = NOTHING
    for allowed, length, at in _candidates(automaton, state, matched, limits):
        if allowed < best.expected:
            break
        if limits.tree:
            levels = min(limits.levels, limits.depth - length)
            tokens, parents, scores = _tree(automaton, at, allowed, levels, limits.min_prob)
        else:
            tokens, parents, scores = _path(automaton, at, allowed, limits.min_prob)
        expected = sum(scores)
        if tokens and (expected > best.expected or (expected == best.expected and length > best.match)):
            best = SourceDraft(tokens, parents, scores, length, counted=True)
    return best


def _candidates(automaton: Automaton, state: int, matched: int, limits: MatchLimits) -> list[tuple[int, int, int]]:
    """(allowed tokens, length, state) for every state whose strings end the context, the most tokens first."""
    candidates = []
    matched = min(matched, limits.depth - 1)
    while state > 0:
        shortest = automaton.length[automaton.link[state]] + 1
        if shortest <= matched and automaton.goes_on(state):
            allowed, length = max((limits.allowed(m), m) for m in range(shortest, matched + 1))
            if allowed > 0:
                candidates.append((allowed, length, state))
        matched = min(matched, shortest - 1)
        state = automaton.link[state]
    return sorted(candidates, reverse=True)


Nodes = tuple[list[int], list[int], list[float]]


def _path(automaton: Automaton, state: int, allowed: int, min_prob: float) -> Nodes:
    """The path that follows the most frequent token of every state."""
    tokens: list[int] = []
    scores: list[float] = []
    count, sure = automaton.count, 1.0
    while len(tokens) < allowed:
        best, following, most = -1, -1, 0
        for token, child in automaton.children(state):
            if count[child] > most:
                best, following, most = token, child, count[child]
        sure *= most / count[state]
        if not most or sure < min_prob:
            break
        tokens.append(best)
        scores.append(sure)
        state = following
    return tokens, list(range(-1, len(tokens) - 1)), scores


def _tree(automaton: Automaton, state: int, allowed: int, levels: int, min_prob: float) -> Nodes:
    """The most probable nodes, best first."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    count, pushed = automaton.count, itertools.count()
    heap: list[tuple[float, int, int, int, int, int]] = []

    def push(state: int, parent: int, sure: float, level: int) -> None:
        if level > levels:
            return
        for token, child in automaton.children(state):
            probability = sure * count[child] / count[state]
            if count[child] and probability >= min_prob:
                heapq.heappush(heap, (-probability, next(pushed), token, child, parent, level))

    push(state, -1, 1.0, 1)
    while heap and len(tokens) < allowed:
        negative, _, token, child, parent, level = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        push(child, len(tokens) - 1, -negative, level + 1)
    return tokens, parents, scores


class _Document:
    """A text that is added to an automaton token by token."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton, self.end = automaton, 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.end = self.automaton.append(self.end, token)


class Outputs:
    """The outputs of running and finished requests in two automata; the older one is dropped when the newer is full.

    At least the last ``requests / 2`` and at most ``requests`` outputs are kept, and removal causes no pause.

    Args:
        depth: longest counted string.
        requests: maximum requests (0: none).
        tokens: maximum tokens.
    """

    def __init__(self, depth: int, requests: int, tokens: int) -> None:
        self.depth, self.requests, self.tokens = depth, requests, tokens
        self.generations = [Automaton(depth, counted=True)]
        self._opened = 0

    @property
    def size(self) -> int:
        return sum(len(automaton.text) for automaton in self.generations)

    def forget_older(self) -> bool:
        """Drop the older automaton; false if there is none."""
        dropped, self.generations = len(self.generations) > 1, self.generations[-1:]
        return dropped

    def open(self) -> _Document:
        newest = self.generations[-1]
        if self._opened >= max(1, self.requests // 2) or len(newest.text) >= self.tokens // 2:
            self.generations = [newest, Automaton(self.depth, counted=True)]
            self._opened = 0
        self._opened += 1
        return _Document(self.generations[-1])


class _SuffixSource(NgramSource):
    """One request's tokens, and its output among the tenant's others."""

    def __init__(self, drafter: SuffixDrafter, context: Context) -> None:
        super().__init__()
        self.drafter, self.prompt_length = drafter, context.prompt_length
        self.others = drafter.tenants.of(context.salt) if drafter.traits.shares_state else None
        self.document = _Document(Automaton(drafter.bounds.depth, counted=True))
        self.output: _Document | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.text)
        self.text.extend(tokens)
        if self.others is not None and len(self.text) > self.prompt_length:
            if self.output is None:
                self.output = self.others.open()
            self.output.extend(self.text[max(start, self.prompt_length) :])

    def read(self) -> None:
        """Count the request's own text, which no other request uses."""
        self.document.extend(self.text[len(self.document.automaton.text) :])

    def propose(self, budget: Budget) -> SourceDraft:
        self.read()
        limits = self.drafter.limits_for(budget)
        document = self.document
        best = speculate_from(document.automaton, document.end, document.automaton.length[document.end], limits)
        if self.others is not None:
            for automaton in self.others.generations:
                draft = speculate(automaton, self.text, limits)
                if draft.expected > best.expected:
                    best = draft
        return best


class SuffixDrafter(SourceDrafter):
    """Follows the most frequent continuation of the suffix that promises most accepted tokens.

    Args:
        k: maximum draft tokens.
        depth, factor, offset, min_prob, tree: as in :class:`MatchLimits`.
        share: learn from the outputs of other requests with the same salt.
        cached: maximum outputs kept per salt; at least half of them are kept.
        tokens: maximum tokens of all kept outputs (about 130 bytes each).
    """

    name = "suffix"

    def __init__(
        self,
        k: int = 16,
        depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
        share: bool = True,
        cached: int = 10_000,
        tokens: int = 2_000_000,
    ) -> None:
        check_least(self.name, 1, k=k, cached=cached, tokens=tokens)
        check_least(self.name, 2, depth=depth)
        if not 0 <= factor < math.inf or not 0 <= min_prob <= 1:
            raise ValueError(f"suffix needs factor >= 0 and 0 <= min_prob <= 1, not {factor} and {min_prob}")
        if not math.isfinite(offset):
            raise ValueError(f"suffix needs a finite offset, not {offset}")
        self.bounds = MatchLimits(k, depth, factor, offset, min_prob, tree)
        self.traits = Traits(draws_trees=tree, shares_state=share, learns=share)
        self.tenants = Tenants(
            lambda: Outputs(depth, cached, tokens),
            size=lambda outputs: outputs.size,
            room=tokens,
            shrink=Outputs.forget_older,
        )
        self.max_depth = self.max_nodes = k

    def open(self, context: Context) -> NgramSource:
        return _SuffixSource(self, context)

    def limits_for(self, budget: Budget) -> MatchLimits:
        most = budget.max_nodes if self.bounds.tree else min(budget.max_depth, budget.max_nodes)
        return replace(self.bounds, most=min(self.bounds.most, most), levels=budget.max_depth)
