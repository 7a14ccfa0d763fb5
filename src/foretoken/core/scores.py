"""The target's scores of a tree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.tree import TokenTree

if TYPE_CHECKING:
    from foretoken.core.sampling import Sampler

NON_FINITE = "the model's logits are NaN or all -inf: check the checkpoint, or load it with dtype=float32"

LARGE = 32768
"""Vocabulary size above which operations on its rows are so slow on a CPU that calls should pass few rows."""


def is_large(logits: Tensor) -> bool:
    """Whether operations on logits [.., V] are so slow that calls should pass few rows."""
    return logits.device.type == "cpu" and logits.shape[-1] > LARGE


class NonFiniteLogitsError(ValueError):
    """The model produced NaN or only -inf: there is no distribution to draw from."""


class NothingAllowedError(NonFiniteLogitsError):
    """The model's logits are finite, but the request's rules allow no next token."""


def argmaxes(logits: Tensor) -> tuple[list[int], bool]:
    """Row-wise argmax (lowest index on ties) of logits [N, V], and whether every maximum is finite."""
    if logits.device.type == "cpu":
        # On a CPU, NumPy's argmax is several times faster than torch's, and it stops at the first NaN.
        rows = (logits if logits.dtype == torch.float64 else logits.float()).numpy()
        indices = rows.argmax(-1)
        return indices.tolist(), bool(np.isfinite(np.take_along_axis(rows, indices[:, None], -1)).all())
    best, choices = logits.max(-1)
    return choices.tolist(), bool(torch.isfinite(best).all())


@dataclass
class Scores:
    """The target's scores of a tree. Distributions are computed only for the nodes that are read.

    They are valid until the next round: the verifier reads them before the commit, and drafters after it.

    Attributes:
        logits: [N, V] raw target logits, one row per node.
        tree: the scored tree.
        prefix: committed tokens, of which the first ``length`` end with the root.
        sampler: the sampling pipeline of the request.
        taps: hidden states for the drafter, by name, each [N, D]; rows are gathered on access.
        batched_p: [n, V] target distributions of the first n nodes, if computed for the whole batch
            (:mod:`foretoken.methods.verifiers.batched`).
        weights: p(x) and q(x) of all drafts of a chain, if read for the whole batch.
        chosen: the token after every node, if computed for the whole batch.
        stuck: token paths below the root after which the request allows no token, among those read. They still need a
            distribution, because they may follow a rejected draft: all probability is on token 0, and the commit must
            end the output before a token drawn there.
        length: length of the prefix; by default that of ``prefix`` now. Drafters read the scores after the commit,
            which extends a request's list of tokens.
    """

    logits: Tensor
    tree: TokenTree
    prefix: Sequence[int]
    sampler: Sampler
    taps: Mapping[str, Tensor] = field(default_factory=dict)
    batched_p: Tensor | None = None
    weights: tuple[list[float], list[float]] | None = None
    chosen: list[int] | None = None
    stuck: set[tuple[int, ...]] = field(default_factory=set)
    length: int = -1
    _distributions: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = len(self.prefix)

    @property
    def maker(self) -> Any:
        """Deprecated name of ``sampler``."""
        warnings.warn("scores.maker was renamed to scores.sampler", DeprecationWarning, stacklevel=2)
        return self.sampler

    def node_prefix(self, node: int) -> Sequence[int]:
        """Committed tokens plus the tokens on the path to ``node``."""
        prefix = self.prefix if len(self.prefix) == self.length else self.prefix[: self.length]
        if node == 0:
            return prefix
        return [*prefix, *(self.tree.tokens[i] for i in self.tree.path(node)[1:])]

    def p(self, node: int) -> Tensor:
        """[V] target distribution after ``node``: the whole sampling pipeline on that node's prefix."""
        if self.batched_p is not None and node < len(self.batched_p):
            return self.batched_p[node]
        distribution = self._distributions.get(node)
        if distribution is None:
            prefix = () if self.sampler.context_free else self.node_prefix(node)
            try:
                distribution = self.sampler.distribution(self.logits[node], prefix)
            except NothingAllowedError:
                distribution = self._stuck_at(node, 0.0)
            self._distributions[node] = distribution
        return distribution

    def _stuck_at(self, node: int, elsewhere: float) -> Tensor:
        """[V] all weight on token 0 and ``elsewhere`` on the others, for a node after which nothing may follow."""
        self.stuck.add(tuple(self.tree.tokens[i] for i in self.tree.path(node)[1:]))
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        weights = torch.full_like(self.logits[node], elsewhere, dtype=wide)
        weights[0] = 1.0
        return weights

    def chain_p(self) -> Tensor:
        """[N, V] target distributions of all nodes at once, for rules that need every position of a chain."""
        if self.batched_p is not None and len(self.batched_p) == len(self.tree):
            return self.batched_p
        if self.sampler.context_free:
            return self.sampler.distributions(self.logits, None)
        return torch.stack([self.p(node) for node in range(len(self.tree))])

    @cached_property
    def lengths(self) -> list[int]:
        """Length of the prefix up to each node: the position of the token that follows it."""
        return [self.length + depth for depth in self.tree.depths]

    @property
    def positions(self) -> list[int]:
        """Output positions of the tokens that may follow the nodes."""
        return sorted({length - self.sampler.prompt_length for length in self.lengths})

    @property
    def races_at_once(self) -> bool:
        """Whether reading the tokens after all nodes together is cheaper than node by node: true for chains with short
        rows. The walk never reaches most nodes of a branching tree."""
        return self.tree.is_chain and not is_large(self.logits)

    def ranking(self, node: int) -> Tensor:
        """[V] scores whose argmax is the token after ``node``, on that node's prefix; for fixed requests."""
        prefixes = None if self.sampler.context_free else [self.node_prefix(node)]
        try:
            return self.sampler.ranking(self.logits[node : node + 1], self.lengths[node : node + 1], prefixes)[0]
        except NothingAllowedError:
            return self._stuck_at(node, -torch.inf)

    def choice(self, node: int) -> int:
        """The token that a fixed request takes after ``node``: the argmax at temperature 0, else the race's winner."""
        if self.chosen is None and self.sampler.context_free and (self.sampler.greedy or self.races_at_once):
            self.chosen = self.sampler.winners(self.logits, self.lengths, None)
        if self.chosen is not None:
            return self.chosen[node]
        prefixes = None if self.sampler.context_free else [self.node_prefix(node)]
        try:
            return self.sampler.winners(self.logits[node : node + 1], self.lengths[node : node + 1], prefixes)[0]
        except NothingAllowedError:
            return int(self._stuck_at(node, -torch.inf).argmax())

    def argmax(self, node: int) -> int:
        """The most likely token after ``node`` (lowest index on ties)."""
        return self.choice(node) if self.sampler.greedy else int(self.p(node).argmax())
