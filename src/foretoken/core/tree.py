"""The token tree and the kinds of its siblings."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


class Kind(enum.StrEnum):
    """Sampling kind of a tree's siblings; determines which verifiers are lossless."""

    POINT = "point"
    """Deterministic: each token is a point mass given the context (top-k, n-grams, guesses)."""
    IID = "iid"
    """Independent draws, with replacement, each from its recorded distribution; duplicates stay separate nodes."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Sequential draws from one distribution per parent, without earlier siblings; sibling order is sampling order."""


@dataclass(frozen=True)
class TokenTree:
    """A speculation. Node 0 is the root: the last committed token, whose KV is not yet in the target's cache.

    Attributes:
        tokens: N token ids.
        parents: N parent indices, parents before children, ``-1`` for the root only.
        kind: how siblings were drawn.
        q: [R, V] draft distributions that the tokens were *really* drawn from, after temperature, filters and
            vocabulary maps; ``None`` for ``POINT`` trees.
        q_rows: per node the row of ``q`` that it was drawn from (siblings of one drafter share a row), ``-1`` for a
            point mass. Empty means all ``-1``.
        probes: per node, whether it is a probe: scored for the drafter, never walked by a verifier. Empty means none.
        drafters: per node, the index of the drafter that proposed it (ensembles); empty means one drafter.
        survival: per node, the estimated probability that it is accepted (1 for the root), for controllers that cut
            trees; empty means no estimate. For a drawn node a function of the tokens *before* it and of distributions,
            never of the node's own token or a later one.
        cut_from: for a tree that was cut: the whole tree, and its nodes that were kept; see :meth:`nodes_in`.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    kind: Kind = Kind.POINT
    q: Tensor | None = None
    q_rows: Sequence[int] = ()
    probes: Sequence[bool] = ()
    drafters: Sequence[int] = ()
    survival: Sequence[float] = ()
    cut_from: tuple[TokenTree, Sequence[int]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens or self.parents[0] != -1:
            raise ValueError("a token tree needs a root (parent -1) first and one parent per token")
        for node, parent in enumerate(self.parents):
            if node and not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
        for name in ("q_rows", "probes", "drafters", "survival"):
            each = getattr(self, name)
            if each and len(each) != len(self.tokens):
                raise ValueError(
                    f"a token tree of {len(self.tokens)} nodes has {len(each)} {name}: one per node, or none"
                )
        if self.kind is not Kind.POINT and len(self.tokens) > 1 and (self.q is None or not self.q_rows):
            raise ValueError(
                f"a {self.kind} tree must carry the distributions q that its tokens were drawn from, and q_rows"
            )

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """The empty draft: plain decoding."""
        return cls((token,), (-1,))

    @classmethod
    def chain(cls, root: int, drafts: Sequence[int], q: Tensor | None = None) -> TokenTree:
        """A chain of draft tokens; ``q`` [len(drafts), V] when they were sampled, ``None`` when deterministic."""
        n = len(drafts)
        if q is None or n == 0:
            return cls((root, *drafts), tuple(range(-1, n)))
        return cls((root, *drafts), tuple(range(-1, n)), Kind.IID, q, tuple(range(-1, n)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens: nodes that are neither the root nor probes."""
        return len(self.tokens) - 1 - sum(self.probes)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root (= its position minus the root's)."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node in sibling (= sampling) order, without probes."""
        rows: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            if not (self.probes and self.probes[node]):
                rows[self.parents[node]].append(node)
        return tuple(map(tuple, rows))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it and none is a probe."""
        return not any(self.probes) and all(p == i - 1 for i, p in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """Nodes from the root (included) to ``node``."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def matched(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of ``tokens`` that is a path below the root."""
        return len(self.path_along(tokens))

    def path_along(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The nodes of that path (siblings may hold the same token)."""
        alive = [0]
        for token in tokens:
            matching = [child for node in alive for child in self.children[node] if self.tokens[child] == token]
            if not matching:
                break
            alive = matching
        return tuple(self.path(alive[0])[1:])

    def nodes_in(self, whole: TokenTree) -> Sequence[int] | None:
        """The node of ``whole`` for each node of this tree; ``None`` if this is neither that tree nor cut from it."""
        tree = self
        nodes: Sequence[int] = range(len(self))
        while tree is not whole:
            if tree.cut_from is None:
                return None
            tree, kept = tree.cut_from
            nodes = [kept[node] for node in nodes]
        return nodes

    def guessed_by(self, drafter: int) -> TokenTree:
        """The same tree with the drafter's index at every node but the root."""
        tree = object.__new__(TokenTree)
        # Checks and cached values stay valid: this runs for every request in every round.
        tree.__dict__.update(self.__dict__, drafters=(-1, *[drafter] * (len(self.tokens) - 1)))
        return tree

    def distribution(self, node: int) -> Tensor | None:
        """[V] distribution that ``node`` was drawn from; ``None`` for a point mass."""
        row = self.q_rows[node] if self.q_rows else -1
        return None if row < 0 or self.q is None else self.q[row]
