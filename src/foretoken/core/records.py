"""A verifier's verdict, and the records of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Verdict:
    """The accepted part of a tree.

    Attributes:
        path: accepted draft nodes from the root's child downwards, without the root.
        next_token: the token after them: the next root.
        next_is_bonus: true after a fully accepted path to a leaf (bonus token), false after a rejection (recovered
            token).
    """

    path: Sequence[int]
    next_token: int
    next_is_bonus: bool


class RoundTimes(NamedTuple):
    """Seconds of a round of the whole batch: drafting, target call, verification, and total."""

    draft_s: float
    target_s: float
    verify_s: float
    total_s: float

    @property
    def overhead_s(self) -> float:
        """Seconds outside drafting, target call and verification."""
        return self.total_s - self.draft_s - self.target_s - self.verify_s


class StepRecord(NamedTuple):
    """Counts and times of one request's round (seconds are the whole batch's).

    Attributes:
        num_nodes: nodes of this request's tree, the root included; ``round_nodes`` are the rows that the target
            computed for the whole batch, with any padding.
        num_accepted_tokens: accepted draft tokens, those behind the end of the text included: they were right, too.
        member: index of the group member that drafted; -1 without a group or draft.
        depth: levels of the draft.
        allowed: most levels that the request and its remaining room allowed.
        waiting: requests waiting for admission to the batch.
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
    allowed: int = 1 << 20
