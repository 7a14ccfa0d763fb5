"""What a verifier decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What is accepted of a tree.

    Attributes:
        path: accepted draft nodes from the root's child downwards (the root itself is not listed).
        next_token: the token after them: the next root.
        next_is_bonus: whether every draft on the way to a leaf was accepted (bonus token) or one was rejected
            (recovered).
    """

    path: Sequence[int]
    next_token: int
    next_is_bonus: bool
