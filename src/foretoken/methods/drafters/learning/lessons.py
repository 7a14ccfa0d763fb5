"""Training data from requests: the positions where drafts were rejected, and the target's distributions there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mistake:
    """One position where the draft was rejected.

    Attributes:
        position: index t of the target's token there; both distributions are those after the tokens before it.
        size: number of tokens that both vocabularies have.
        tokens: [n] ids, int32.
        probabilities: [n] the target's probabilities of them, half precision.
    """

    position: int
    size: int
    tokens: Tensor
    probabilities: Tensor


def stored_distribution(mistake: Mistake) -> Tensor:
    """[V] the target's distribution; tokens that were not stored share the remainder evenly."""
    probabilities = mistake.probabilities.float()
    remaining = (1.0 - probabilities.sum()).clamp_min(0.0) / max(mistake.size - len(probabilities), 1)
    distribution = remaining.repeat(mistake.size)
    distribution[mistake.tokens.long()] = probabilities
    distribution.clamp_min_(1e-8)  # half precision rounds less to 0, where a divergence may be infinite
    return distribution / distribution.sum()


@dataclass(frozen=True)
class Lesson:
    """A finished request: its tokens, and its rejected positions."""

    tokens: Sequence[int]
    mistakes: Sequence[Mistake]
