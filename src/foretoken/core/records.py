"""What is recorded of a round."""

from __future__ import annotations

from typing import NamedTuple


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
