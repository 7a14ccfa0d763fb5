"""The ``Verifier`` protocol: which guesses stand, and the token after them.

A verifier is pure: a function of the tree, the laws and fresh randomness.  Lossless means that the accepted tokens
plus the next token, continued by plain sampling, have exactly the target's law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.types import Kind, Rng, Scores, TokenTree, Verdict


class Verifier(ABC):
    """One acceptance rule.

    Attributes:
        name: registry key.
        lossless: whether the rule keeps the target's law; lossy rules need ``allow_lossy=True``.
        kinds: proposal kinds for which the rule is right.
        chains_only: whether the rule is defined for chains only.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    kinds: ClassVar[frozenset[Kind]] = frozenset(Kind)
    chains_only: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False

    @abstractmethod
    def verify(self, tree: TokenTree, scores: Scores, rng: Rng) -> Verdict:
        """Walk ``tree`` and decide."""


def draw(law: Tensor, u: float) -> int:
    """Inverse-CDF draw from a law or unnormalised weights [V] with one uniform ``u`` in [0, 1).

    Never returns a token of zero weight.
    """
    cdf = law.cumsum(0)
    index = int(torch.searchsorted(cdf, cdf[-1:] * u, right=True))
    if index >= len(law) or float(law[index]) <= 0.0:  # u * total rounded up to the last step of the CDF
        index = int(law.nonzero()[-1])
    return index


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]+) [V]; ``p`` itself when nothing is left (p equals q up to rounding)."""
    rest = (p - q).clamp_min_(0.0)
    total = rest.sum()
    if float(total) <= torch.finfo(p.dtype).tiny:
        return p
    return rest / total


def without(p: Tensor, token: int) -> Tensor:
    """``p`` [V] with ``token`` zeroed and renormalised: the residual of a point-mass draft.

    ``p`` itself when nothing is left.
    """
    rest = p.clone()
    rest[token] = 0.0
    total = rest.sum()
    if float(total) <= torch.finfo(p.dtype).tiny:
        return p
    return rest / total


def child_with(tree: TokenTree, node: int, token: int) -> int | None:
    """The first child of ``node`` that holds ``token``."""
    for child in tree.children[node]:
        if tree.tokens[child] == token:
            return child
    return None


def verdict_at(tree: TokenTree, path: list[int], token: int) -> Verdict:
    """The verdict that stops after ``path`` with ``token``: a bonus when the path reached a leaf."""
    last = path[-1] if path else 0
    return Verdict(tuple(path), token, next_is_bonus=not tree.children[last])
