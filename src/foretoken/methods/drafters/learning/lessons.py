"""What a request teaches a draft model: where its drafts were rejected, and what the target said there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

FLOOR = 1e-8
"""Least probability in a stored distribution: half precision says 0 for less, and a divergence may be infinite
there."""


@dataclass(frozen=True)
class Mistake:
    """One place where the draft was rejected.

    Attributes:
        position: index t of the token that the target put there; both distributions are those after the tokens before
            it.
        size: tokens that both vocabularies have.
        tokens: [n] ids, int32.
        chances: [n] the target's probabilities of them, half precision.
    """

    position: int
    size: int
    tokens: Tensor
    chances: Tensor


def stored_distribution(mistake: Mistake) -> Tensor:
    """[V] the target's distribution; the tokens that were not stored share evenly what is left."""
    chances = mistake.chances.float()
    remaining = (1.0 - chances.sum()).clamp_min(0.0) / max(mistake.size - len(chances), 1)
    distribution = remaining.repeat(mistake.size)
    distribution[mistake.tokens.long()] = chances
    distribution.clamp_min_(FLOOR)
    return distribution / distribution.sum()


@dataclass(frozen=True)
class Lesson:
    """A finished request: its tokens, and where its drafts were rejected."""

    tokens: Sequence[int]
    mistakes: Sequence[Mistake]
