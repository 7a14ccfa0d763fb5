"""One request as drafters and controllers see it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from foretoken.core.constraints import Constraint

COINS = 1
"""The upper half of the generator's key: noise has 0 there."""


class Rng:
    """The randomness of one request: a stream of uniforms in [0, 1), each handed out once.

    Drawn in float64 blocks, so that a uniform costs nanoseconds and no device sync.  All 64 bits of a seed count (of
    torch's generator on a CPU it would be 32), and none of the numbers is one of :class:`foretoken.core.noise.Noise`.

    Attributes:
        tests: every acceptance test that was made with them, as (u, chance), for a trace; ``None``: they are not kept.
    """

    BLOCK = 256

    def __init__(self, seed: int) -> None:
        self.tests: list[tuple[float, float]] | None = None
        self._key = seed + (COINS << 64)
        self._begin()

    def _begin(self) -> None:
        self._numbers: np.random.Generator | None = None  # made for the first block: many requests toss no coins
        self._block: list[float] = []
        self._blocks = 0

    def _next_block(self) -> None:
        if self._numbers is None:
            self._numbers = np.random.Generator(np.random.Philox(key=self._key))
        self._block = self._numbers.random(self.BLOCK).tolist()
        self._blocks += 1

    def uniform(self) -> float:
        """A fresh uniform in [0, 1)."""
        if not self._block:
            self._next_block()
        return self._block.pop()

    def mark(self) -> tuple[int, int]:
        """How many uniforms were handed out and tests made: where :meth:`back_to` leads."""
        return self._blocks * self.BLOCK - len(self._block), len(self.tests or ())

    def back_to(self, mark: tuple[int, int]) -> None:
        """Hand out again what was handed out since; its tests were not made."""
        count, tests = mark
        self._begin()
        while self._blocks * self.BLOCK < count:
            self._next_block()
        del self._block[self._blocks * self.BLOCK - count :]
        del (self.tests or [])[tests:]

    def uniforms(self, count: int) -> list[float]:
        """``count`` fresh uniforms in [0, 1)."""
        return [self.uniform() for _ in range(count)]


class CommittedTokens(list[int]):
    """A text that whoever sees it may read and copy, and the engine alone extends.

    Guesses appended to it would stand in the output as if the target had written them.  Slices and copies are plain
    lists.
    """

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("context.tokens is the text itself: change a copy of it, list(context.tokens)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _: Any) -> Any:
        return CommittedTokens, (list(self),)  # by default a copy is made by appending


@dataclass
class Context:
    """What a drafter and a controller know of one request.

    Attributes:
        request_id: unique within the engine.
        tokens: prompt and output so far, the root last; the engine's own are :class:`CommittedTokens`.
        prompt_length: how many of them are the prompt.
        max_length: tokens that there may be in the end, the prompt included (0: unknown).
        sampler: the request's sampling pipeline, so that a draft distribution can be made by the same function.
        rng: the request's randomness.
        hidden: target hidden states of the last round's committed nodes (root first), by tap name, each [n, D]; the
            row of position t is ``hidden[name][t - hidden_start]``.
        prediction: tokens that the caller expects in the answer.
        sequence: the target's own sequence, for drafters that draft with the target (a ``SequenceState``).
        state: one slot per owner (a drafter or a controller keeps its own per-request state here).
        salt: drafts may be learned from other requests' texts only where this is the same.
        constraint: what the output must look like, if that was asked for.
        texts: what drafters' models have read of the request (a ``DraftTexts``); theirs and the engine's business.
        beside: trees of members of a group that copy and were not asked this round, by member: the text that comes
            tells a controller what they are worth, and they are never scored.
        source: where the last draft came from, where that is not the drafter (``grammar``, ``prediction``, a member).
    """

    request_id: int
    tokens: list[int]
    prompt_length: int
    sampler: Any
    rng: Rng
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    hidden_start: int = 0
    prediction: Sequence[int] | None = None
    sequence: Any = None
    state: dict[Any, Any] = field(default_factory=dict)
    max_length: int = 0
    salt: str = ""
    constraint: Constraint | None = None
    texts: Any = None
    beside: Mapping[int, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    @property
    def maker(self) -> Any:
        """The old name of ``sampler``."""
        warnings.warn("context.maker is context.sampler now", DeprecationWarning, stacklevel=2)
        return self.sampler
