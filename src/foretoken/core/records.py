"""What a verifier decides of a round, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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


class RoundTimes(NamedTuple):
    """Seconds of a round of the whole batch: drafting, the target's call, verification, and all of it."""

    draft_s: float
    target_s: float
    verify_s: float
    total_s: float

    @property
    def overhead_s(self) -> float:
        """What is none of the parts."""
        return self.total_s - self.draft_s - self.target_s - self.verify_s


class StepRecord(NamedTuple):
    """Counts and times of one round of one request (seconds are those of the whole batch's round).

    Attributes:
        num_nodes: of this request's tree, the root included; ``round_nodes`` are those of the whole batch,
            as rows that the target computed (with padding, where it pads).
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
    round_nodes: int = 0
    member: int = -1
    depth: int = 0
    waiting: int = 0
