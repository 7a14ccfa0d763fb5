"""The words the four axes speak: trees, laws, verdicts, budgets, records.

Shapes: ``N`` nodes, ``V`` vocabulary, ``D`` hidden size, ``R`` stored laws.  Topology and tokens are host integers:
trees are small, the walk over them is host code, and a drafter moves all its tokens to the host in one transfer.
Laws and logits stay tensors on the model's device.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.noise import Noise

NON_FINITE = "the model's logits are NaN or all -inf: check the checkpoint, or load it with dtype=float32"


LARGE = 32768
"""Vocabulary from which on, on a CPU, an operation on a row of it takes so long that calls should see few rows."""


def is_large(logits: Tensor) -> bool:
    """Whether an operation on logits [.., V] takes so long that as few rows as possible should see it."""
    return logits.device.type == "cpu" and logits.shape[-1] > LARGE


class NonFiniteLogitsError(ValueError):
    """The model produced NaN or only -inf: there is no law to draw from."""


class Kind(enum.StrEnum):
    """How the siblings of a tree were drawn; decides which verifiers are lossless for it."""

    POINT = "point"
    """Deterministic: each token is a point mass given the context (top-k, n-grams, guesses)."""
    IID = "iid"
    """Independent draws, with replacement, each from its recorded law; duplicates stay separate nodes."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Sequential draws from one law per parent with earlier siblings removed; sibling order is sampling order."""


@dataclass(frozen=True)
class TokenTree:
    """A speculation.  Node 0 is the root: the last committed token, whose KV is not yet in the target's cache.

    Attributes:
        tokens: N token ids.
        parents: N parent indices, parents before children, ``-1`` for the root only.
        kind: how siblings were drawn.
        q: [R, V] draft laws, after temperature, filters and vocabulary maps: what tokens were *really* drawn from.
            ``None`` for ``POINT`` trees.
        law_of: per node the row of ``q`` that it was drawn from (siblings of one drafter share a row), ``-1`` for a
            node that is a point mass.  Empty means all ``-1``.
        probes: per node, whether it is a probe: scored for the drafter, never walked by a verifier.  Empty means none.
        drafters: per node, the index of the drafter that guessed it (ensembles); empty means one drafter.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    kind: Kind = Kind.POINT
    q: Tensor | None = None
    law_of: Sequence[int] = ()
    probes: Sequence[bool] = ()
    drafters: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens or self.parents[0] != -1:
            raise ValueError("a token tree needs a root (parent -1) first and one parent per token")
        for node, parent in enumerate(self.parents):
            if node and not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
        if self.kind is not Kind.POINT and len(self.tokens) > 1 and (self.q is None or not self.law_of):
            raise ValueError(f"a {self.kind} tree must carry the laws q that its tokens were drawn from, and law_of")

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
        """Draft tokens: nodes that are neither the root nor probes."""
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
        """Children of every node in sibling (= sampling) order, probes left out."""
        rows: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            if not (self.probes and self.probes[node]):
                rows[self.parents[node]].append(node)
        return tuple(map(tuple, rows))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node hangs from the one before it and none is a probe."""
        return not any(self.probes) and all(p == i - 1 for i, p in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """Nodes from the root (included) to ``node``."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def guessed_by(self, drafter: int) -> TokenTree:
        """The same tree with the index of the drafter at every node but the root."""
        named = object.__new__(TokenTree)
        # All that was checked and worked out stays true: this runs for every request in every round.
        named.__dict__.update(self.__dict__, drafters=(-1, *[drafter] * (len(self.tokens) - 1)))
        return named

    def law(self, node: int) -> Tensor | None:
        """[V] law that ``node`` was drawn from, ``None`` when it is a point mass."""
        row = self.law_of[node] if self.law_of else -1
        return None if row < 0 or self.q is None else self.q[row]


class Rng:
    """The randomness of one request: a stream of uniforms in [0, 1), each handed out once.

    Drawn from a ``torch.Generator`` in float64 blocks, so that a uniform costs nanoseconds and no device sync.

    Attributes:
        tests: every acceptance test that was made with them, as (u, chance), for a trace; ``None``: they are not kept.
    """

    BLOCK = 256

    def __init__(self, seed: int) -> None:
        self.tests: list[tuple[float, float]] | None = None
        self.generator = torch.Generator().manual_seed(seed)
        self._block: list[float] = []

    def uniform(self) -> float:
        """A fresh uniform in [0, 1)."""
        if not self._block:
            self._block = torch.rand(self.BLOCK, generator=self.generator, dtype=torch.float64).tolist()
        return self._block.pop()

    def uniforms(self, count: int) -> list[float]:
        """``count`` fresh uniforms in [0, 1)."""
        return [self.uniform() for _ in range(count)]


class LawMaker(Protocol):
    """Turns logits into the law that a token is drawn from (:mod:`foretoken.sampling`)."""

    greedy: bool
    fixed: bool
    noise: Noise | None
    prompt_length: int

    def law(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """[V] law at the end of ``prefix`` from logits [V]."""

    def laws(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """[N, V] laws from logits [N, V]."""

    def ranking(self, logits: Tensor, lengths: Sequence[int], prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """[N, V] what the token that follows is the largest of, where it is ``fixed``."""

    def log_probs(self, logits: Tensor) -> Tensor:
        """[N, V] log-probabilities, up to a constant per row, where they depend on the logits alone."""

    def noise_rows(self, lengths: Sequence[int], like: Tensor) -> list[Tensor]:
        """The noise [V] of the tokens that follow texts of such lengths."""

    @property
    def context_free(self) -> bool:
        """Whether the law depends on the logits alone, not on the prefix."""

    @property
    def recipe(self) -> Hashable:
        """What makes the law, besides the logits: equal recipes make equal laws.  ``None`` where the prefix counts."""


def argmaxes(logits: Tensor) -> tuple[list[int], bool]:
    """Row-wise argmax (lowest index on ties) of logits [N, V], and whether every maximum is finite."""
    if logits.device.type == "cpu":
        # NumPy's argmax is several times faster than torch's on CPU, and it stops at the first NaN.
        rows = (logits if logits.dtype == torch.float64 else logits.float()).numpy()
        indices = rows.argmax(-1)
        return indices.tolist(), bool(np.isfinite(np.take_along_axis(rows, indices[:, None], -1)).all())
    best, choices = logits.max(-1)
    return choices.tolist(), bool(torch.isfinite(best).all())


@dataclass
class Scores:
    """The target's view of a tree.  Laws are made only for the nodes that are asked for.

    Attributes:
        logits: [N, V] raw target logits, one row per node.
        tree: the tree that was scored.
        prefix: committed tokens up to and including the root.
        maker: the sampling pipeline of the request.
        taps: hidden states that the drafter asked for, by name, each [N, D].
        made: [n, V] target laws of the first n nodes, where they were made for the whole batch
            (:mod:`foretoken.verifiers.together`).
        weights: p(x) and q(x) of all drafts of a chain, where they were read for the whole batch.
        chosen: the token after every node, where they were looked up for the whole batch.
    """

    logits: Tensor
    tree: TokenTree
    prefix: Sequence[int]
    maker: LawMaker
    taps: dict[str, Tensor] = field(default_factory=dict)
    made: Tensor | None = None
    weights: tuple[list[float], list[float]] | None = None
    chosen: list[int] | None = None
    _laws: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def node_prefix(self, node: int) -> Sequence[int]:
        """Committed tokens plus the tokens on the path to ``node``."""
        if node == 0:
            return self.prefix
        return [*self.prefix, *(self.tree.tokens[i] for i in self.tree.path(node)[1:])]

    def p(self, node: int) -> Tensor:
        """[V] target law after ``node``: the whole sampling pipeline run on that node's own prefix."""
        if self.made is not None and node < len(self.made):
            return self.made[node]
        law = self._laws.get(node)
        if law is None:
            prefix = () if self.maker.context_free else self.node_prefix(node)
            law = self._laws[node] = self.maker.law(self.logits[node], prefix)
        return law

    def chain_p(self) -> Tensor:
        """[N, V] target laws of all nodes at once (for rules that need every position of a chain)."""
        if self.made is not None and len(self.made) == len(self.tree):
            return self.made
        if self.maker.context_free:
            return self.maker.laws(self.logits, None)
        return torch.stack([self.p(node) for node in range(len(self.tree))])

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens before the one that follows each node: the position in the text of that token."""
        return [len(self.prefix) + depth for depth in self.tree.depths]

    @property
    def races_at_once(self) -> bool:
        """Whether looking up the tokens after all nodes is cheaper than after each that the walk reaches: for a chain,
        unless rows are long.  Of a branching tree most nodes are never reached."""
        return self.tree.is_chain and not is_large(self.logits)

    def ranking(self, node: int) -> Tensor:
        """[V] what the token after ``node`` is the largest of, on that node's own prefix, if the request is fixed."""
        prefixes = None if self.maker.context_free else [self.node_prefix(node)]
        return self.maker.ranking(self.logits[node : node + 1], self.lengths[node : node + 1], prefixes)[0]

    def choice(self, node: int) -> int:
        """The token that a fixed request takes after ``node``: the argmax at temperature 0, else the race's winner."""
        if self.chosen is None and self.maker.context_free and (self.maker.greedy or self.races_at_once):
            ranking = self.logits if self.maker.greedy else self.maker.ranking(self.logits, self.lengths, None)
            self.chosen, finite = argmaxes(ranking)
            if not finite:
                raise NonFiniteLogitsError(NON_FINITE)
        return argmaxes(self.ranking(node)[None])[0][0] if self.chosen is None else self.chosen[node]

    def argmax(self, node: int) -> int:
        """The most likely token after ``node`` (lowest index on ties)."""
        return self.choice(node) if self.maker.greedy else int(self.p(node).argmax())


@dataclass(frozen=True)
class Verdict:
    """What stands of a tree.

    Attributes:
        path: accepted draft nodes from the root's child downwards (the root itself is not listed).
        next_token: the token after them: the next root.
        next_is_bonus: whether every draft on the way to a leaf stood (bonus token) or one was rejected (recovered).
    """

    path: Sequence[int]
    next_token: int
    next_is_bonus: bool


class PathStop(ABC):
    """A stop rule that reads the draft model's hidden states: how likely is it that a whole path of the draft stands?

    A drafter with a draft model keeps one chance per path (1 for the root, which is committed).  After every forward of
    the draft model it asks :meth:`follow` for the chances of the paths that end with the tokens it has just fed, and
    drafts nothing behind the tokens drawn after a path for which :meth:`ends` is true.  Those tokens stay in the draft:
    the rule has not seen them.

    As a plain stop rule, for a drafter without hidden states, it never stops.

    Attributes:
        tap: the hidden states that it reads (see :mod:`foretoken.models.base`).
    """

    tap: str = "last"

    @abstractmethod
    def follow(self, above: Sequence[float], hidden: Tensor) -> list[float]:
        """Chances that n paths stand, from those of the paths one token shorter and the states [n, D] of the tokens."""

    @abstractmethod
    def ends(self, standing: float) -> bool:
        """Whether the token drawn after a path with this chance is the last one."""

    def __call__(self, law: Tensor | None, probability: float) -> bool:
        """Never: a law says nothing of hidden states."""
        return False


@dataclass(frozen=True)
class Budget:
    """How much a drafter may guess this round.

    Attributes:
        max_depth: longest draft; 0 means plain decoding and no drafter code runs.
        max_nodes: most draft nodes (the root not counted).
        min_confidence: stop drafting after a token whose own draft probability is below this (it stays in the draft).
        stop: a richer rule of the same sort: called with the draft law [V] (``None`` if the drafter has none) and
            the drawn token's probability; true ends the draft *after* that token.  A :class:`PathStop` is also told
            the hidden states of the draft model.
        member: which member of a group of drafters drafts (its index); ``None`` leaves the choice to the group.
        otherwise: the budget of another member, for when that one guesses nothing.
    """

    max_depth: int = 5
    max_nodes: int = 64
    min_confidence: float = 0.0
    stop: Callable[[Tensor | None, float], bool] | None = None
    member: int | None = None
    otherwise: Budget | None = None

    @property
    def deepest(self) -> int:
        """The longest draft that this budget or its alternatives allow."""
        return self.max_depth if self.otherwise is None else max(self.max_depth, self.otherwise.deepest)

    def stops_after(self, law: Tensor | None, probability: float) -> bool:
        """Whether drafting ends after a token of this probability."""
        return probability < self.min_confidence or (self.stop is not None and self.stop(law, probability))

    @property
    def path_stop(self) -> PathStop | None:
        """The stop rule, if it is one that reads hidden states."""
        return self.stop if isinstance(self.stop, PathStop) else None


@dataclass(frozen=True)
class Limits:
    """What a drafter can draft, as a controller sees it.

    Attributes:
        name: the drafter's registry name, or its whole spec where it was built from one.
        max_depth: longest draft that it makes by default.
        max_nodes: most draft nodes that it makes by default.
        relative_cost: what a level of its drafts costs by its size, in target calls: a guess until it is measured.
        members: the same of the drafters that a group chooses from; ``Budget.member`` counts in this order.
        states: fingerprint of the network whose hidden states a :class:`PathStop` is told; ``None`` if there is none.
    """

    name: str
    max_depth: int
    max_nodes: int
    relative_cost: float = 0.1
    members: Sequence[Limits] = ()
    states: Any = None


@dataclass
class Context:
    """What a drafter and a controller know of one request.

    Attributes:
        request_id: unique within the engine.
        tokens: prompt and output so far, the root last.
        prompt_length: how many of them are the prompt.
        max_length: tokens that there may be in the end, the prompt included (0: unknown).
        maker: the request's sampling pipeline, so that a draft law can be made by the same function.
        rng: the request's randomness.
        hidden: target hidden states of the last round's committed nodes (root first), by tap name, each [n, D]; the
            row of position t is ``hidden[name][t - hidden_start]``.
        prediction: tokens that the caller expects in the answer.
        sequence: the target's own sequence, for drafters that draft with the target (a ``SequenceState``).
        state: one slot per owner (a drafter or a controller keeps its own per-request state here).
        salt: drafts may be learned from other requests' texts only where this is the same.
        forced: tokens that must follow given output tokens, where the request has a constraint.
    """

    request_id: int
    tokens: list[int]
    prompt_length: int
    maker: Any
    rng: Rng
    hidden: dict[str, Tensor] = field(default_factory=dict)
    hidden_start: int = 0
    prediction: Sequence[int] | None = None
    sequence: Any = None
    state: dict[Any, Any] = field(default_factory=dict)
    max_length: int = 0
    salt: str = ""
    forced: Callable[[Sequence[int]], list[int]] | None = None

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]


class StepRecord(NamedTuple):
    """Counts and times of one round of one request (seconds are those of the whole batch's round).

    Attributes:
        num_nodes: of this request's tree, the root included; ``round_nodes`` are those of the whole batch,
            as rows that the target computed (with padding, where it pads).
        round_id: the same for all requests of a round.
        member: which member of a group drafted (its index), -1 when there is no group or nothing was drafted.
        depth: levels of the draft.
        waiting: requests that wait for a place in the batch.
    """

    request_id: int
    num_nodes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    batch_size: int
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    round_id: int = 0
    round_nodes: int = 0
    member: int = -1
    depth: int = 0
    waiting: int = 0
