"""Token Recycling: a tree from the target's last prediction after every token (Luo et al. 2024, arXiv 2408.08696)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.core import Budget, Context, Scores, TokenTree, Verdict, check_least
from foretoken.core.largest import largest
from foretoken.methods.drafters.base import Drafter, Traits
from foretoken.methods.drafters.tenants import Tenants

WIDTH = 8
"""Followers kept per token."""
PRIOR = (0.5, 0.1, 0.05, 0.033, 0.025, 0.02, 0.017, 0.014)
"""Prior probability that the follower of each rank is the next token.

With 80 nodes and 6 levels it gives 8, 20, 25, 16, 8, 3 nodes per level; the published tree has 8, 21, 25, 15, 8, 3.
"""

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Template:
    """The shape of a tree in ranks of followers.

    Attributes:
        parents: [n] node indices, 0 is the root; parents first, in order of falling probability.
        ranks: [n] rank of a node among its parent's followers.
        scores: [n] probability that the path is right.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    scores: tuple[float, ...]

    @classmethod
    def best(cls, probabilities: Sequence[float], nodes: int, depth: int) -> Template:
        """The ``nodes`` most probable nodes if the follower of rank r is right with probability ``probabilities[r]``.

        A node's probability is the product along its path, so repeatedly adding the most probable node whose parent is
        in the tree maximises the expected number of accepted tokens for that size.
        """
        parents: list[int] = []
        ranks: list[int] = []
        scores: list[float] = []
        heap = [(-probability, 0, 0, rank, 1) for rank, probability in enumerate(probabilities) if probability > 0]
        heapq.heapify(heap)
        pushed = len(heap)
        while heap and len(ranks) < nodes:
            negative, _, parent, rank, level = heapq.heappop(heap)
            parents.append(parent)
            ranks.append(rank)
            scores.append(-negative)
            if level < depth:
                for child, probability in enumerate(probabilities):
                    if probability > 0:
                        pushed += 1
                        heapq.heappush(heap, (negative * probability, pushed, len(ranks), child, level + 1))
        return cls(tuple(parents), tuple(ranks), tuple(scores))

    def levels(self, max_depth: int, max_nodes: int) -> list[list[int]]:
        """Nodes (1-based) of every depth, among the first ``max_nodes`` and not below ``max_depth``."""
        depths = [0]
        by_depth: list[list[int]] = []
        for node, parent in enumerate(self.parents[:max_nodes], 1):
            depths.append(depths[parent] + 1)
            if depths[node] <= max_depth:
                while len(by_depth) < depths[node]:
                    by_depth.append([])
                by_depth[depths[node] - 1].append(node)
        return by_depth


class FollowerTable:
    """[V, 8] int32: for every token the likeliest next tokens in the target's last prediction; -1 for none."""

    def __init__(self) -> None:
        self.rows: Ints = np.full((0, WIDTH), -1, np.int32)

    def reserve(self, tokens: int) -> None:
        """Grow to at least ``tokens`` rows."""
        if tokens > len(self.rows):
            rows = np.full((max(tokens, 2 * len(self.rows)), WIDTH), -1, np.int32)
            rows[: len(self.rows)] = self.rows
            self.rows = rows

    def update(self, tokens: Sequence[int], best: Ints) -> None:
        """Set the followers of ``tokens`` [n] to ``best`` [n, w]; the last of equal tokens wins."""
        self.reserve(max(tokens) + 1)
        for token, row in zip(tokens, best, strict=True):
            self.rows[token, : len(row)] = row

    def read(self, tokens: Sequence[int]) -> None:
        """Add the followers in ``tokens`` of tokens without a prediction of the target."""
        if not tokens:
            return
        self.reserve(max(tokens) + 1)
        followers_of: dict[int, dict[int, None]] = {}
        for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=True):
            if self.rows[token, 0] < 0:
                followers_of.setdefault(token, {})[following] = None  # the most recent follower first
        for token, followers in followers_of.items():
            row = list(followers)[:WIDTH]
            self.rows[token, : len(row)] = row


@dataclass
class Statistics:
    """Trials and hits of the follower of each rank after accepted nodes."""

    tried: list[int] = field(default_factory=lambda: [0] * WIDTH)
    hits: list[int] = field(default_factory=lambda: [0] * WIDTH)

    def add(self, candidates: Sequence[int], token: int) -> None:
        """Count a trial of ``candidates`` (by rank) whose next token was ``token``."""
        for rank, candidate in enumerate(candidates[:WIDTH]):
            self.tried[rank] += 1
            self.hits[rank] += candidate == token

    def probabilities(self, weight: int = 50) -> list[float]:
        """Estimates per rank, never rising with rank; :data:`PRIOR` counts as ``weight`` observations."""
        raw = [
            (hits + weight * before) / (tried + weight)
            for hits, tried, before in zip(self.hits, self.tried, PRIOR, strict=True)
        ]
        return [min(raw[: rank + 1]) for rank in range(WIDTH)]


@dataclass
class TenantState:
    """Learned state of one tenant's requests.

    Attributes:
        template: the shape of the next trees.
    """

    template: Template
    statistics: Statistics = field(default_factory=Statistics)
    followers: FollowerTable = field(default_factory=FollowerTable)
    rounds: int = 0
    _levels: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)

    def levels(self, budget: Budget) -> list[list[int]]:
        key = (budget.max_depth, budget.max_nodes)
        if key not in self._levels:
            self._levels[key] = self.template.levels(*key)
        return self._levels[key]

    def reshape(self, nodes: int, depth: int) -> None:
        self.template = Template.best(self.statistics.probabilities(), nodes, depth)
        self._levels.clear()


class RecyclingDrafter(Drafter):
    """Drafts a tree of fixed shape from a table of followers that every verification refreshes.

    Args:
        nodes: draft nodes of the tree; 16 suit targets whose calls grow with the nodes.
        depth: levels of the tree.
        adapt: rounds after which the shape is recomputed from accepted tokens (0: never).
        share: share table, statistics and shape between requests of the same salt.
    """

    name = "recycling"
    traits = Traits(draws_trees=True, rewinds=True)

    def __init__(self, nodes: int = 80, depth: int = 6, adapt: int = 0, share: bool = True) -> None:
        check_least(self.name, 1, nodes=nodes, depth=depth)
        check_least(self.name, 0, adapt=adapt)
        self.max_nodes, self.max_depth, self.adapt = nodes, depth, adapt
        self.traits = replace(self.traits, shares_state=share)
        self._first = Template.best(PRIOR, nodes, depth)
        # A tenant's table takes 32 bytes per token of the vocabulary.
        self.tenants = Tenants(lambda: TenantState(self._first), most=16)

    def learned(self, context: Context) -> TenantState:
        """The state of the request's tenant, or of the request alone."""
        if self.traits.shares_state:
            return self.tenants.of(context.salt)
        state: TenantState | None = context.state.get(self)
        if state is None:
            state = context.state[self] = TenantState(self._first)
        return state

    def start(self, context: Context) -> None:
        self.learned(context).followers.read(context.tokens)

    def propose(self, context: Context, budget: Budget) -> TokenTree:
        """Fill the template with followers of followers, without nodes whose token is unknown."""
        learned = self.learned(context)
        learned.followers.reserve(context.root + 1)
        rows, template = learned.followers.rows, learned.template
        tokens, parents, new_index = [context.root], [-1], {0: 0}
        for level in learned.levels(budget):
            followers: dict[int, list[int]] = {}
            for node in level:
                parent = new_index.get(template.parents[node - 1])
                if parent is None:
                    continue
                if parent not in followers:
                    token = tokens[parent]
                    followers[parent] = rows[token].tolist() if token < len(rows) else [-1] * WIDTH
                token = followers[parent][template.ranks[node - 1]]
                if token >= 0:
                    new_index[node] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
        return TokenTree(tuple(tokens), tuple(parents))

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Update the followers of every scored node's token, accepted or not; later nodes overwrite earlier ones."""
        learned = self.learned(context)
        self._count(learned, tree, verdict)
        best, table = largest(scores.logits, min(WIDTH, scores.logits.shape[-1]))[1], learned.followers
        table.reserve(scores.logits.shape[-1])
        table.update(tree.tokens, best.cpu().numpy().astype(np.int32))

    def _count(self, learned: TenantState, tree: TokenTree, verdict: Verdict) -> None:
        """Count the rank that was right after every accepted node."""
        path = [0, *verdict.path]
        following = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        for node, token in zip(path, following, strict=True):
            learned.statistics.add([tree.tokens[child] for child in tree.children[node]], token)
        learned.rounds += 1
        if self.adapt and learned.rounds % self.adapt == 0:
            learned.reshape(self.max_nodes, self.max_depth)
