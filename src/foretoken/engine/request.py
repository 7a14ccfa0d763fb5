"""A request: what was asked, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import FinishReason, Stopper
from foretoken.models.base import SequenceState
from foretoken.sampling import SamplingParams
from foretoken.types import Context

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        prompt: token ids, at least one.
        params: how tokens are drawn.
        max_new_tokens: most output tokens, at least 1.
        stop: stop strings.
        seed: fixes sampled output, whatever drafts and whatever else is in the batch; ``None`` draws one.  From 0 to
            2**64 - 1.
        prediction: tokens that are expected in the output (for drafters that use them).
        ignore_eos: go on after an end-of-text id (benchmarks).
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 64
    stop: Sequence[str] = ()
    seed: int | None = None
    prediction: Sequence[int] | None = None
    ignore_eos: bool = False


@dataclass
class Running:
    """A request in the engine.

    Attributes:
        seed: of its randomness, given or drawn; ``None`` for a greedy request, which has none.
    """

    request: Request
    context: Context
    sequence: SequenceState
    stopper: Stopper
    stats: SpecStats = field(default_factory=SpecStats)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None

    @property
    def id(self) -> int:
        """The request's id."""
        return self.context.request_id

    @property
    def output(self) -> list[int]:
        """New tokens so far."""
        return self.context.tokens[self.context.prompt_length :]


@dataclass(frozen=True)
class Emission:
    """New tokens of one request after one round.

    Attributes:
        request_id: whose.
        token_ids: the tokens, in order.
        origins: where each came from.
        finish_reason: why the request ended with them, if it did.
    """

    request_id: int
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    finish_reason: FinishReason | None
