"""State of one request for drafters and controllers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from foretoken.core.constraints import Constraint


class Rng:
    """Random numbers of one request: a stream of uniforms in [0, 1), each used once.

    Drawn in float64 blocks, so that a uniform costs nanoseconds and no device sync. All 64 bits of a seed count
    (torch's CPU generator uses 32), and no number is shared with :class:`foretoken.core.noise.Noise`.

    Attributes:
        tests: every acceptance test made with them, as (u, probability, node), for a trace; ``None`` records none.
    """

    BLOCK = 256

    def __init__(self, seed: int) -> None:
        self.tests: list[tuple[float, float, int | None]] | None = None
        self._key = seed + (1 << 64)  # the upper half of the key is 0 for noise
        self._begin()

    def _begin(self) -> None:
        self._numbers: np.random.Generator | None = None  # created on first use: many requests draw none
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
        """Number of uniforms used and of tests recorded, for :meth:`back_to`."""
        return self._blocks * self.BLOCK - len(self._block), len(self.tests or ())

    def back_to(self, mark: tuple[int, int]) -> None:
        """Rewind to a mark: later uniforms are drawn again, and later tests are dropped."""
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
    """A request's tokens: others may read and copy them, and only the engine appends.

    A guess appended by a drafter would appear in the output as if the target had generated it. Slices and copies are
    plain lists.
    """

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("context.tokens is read-only: change a copy, list(context.tokens)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, _: Any) -> Any:
        return CommittedTokens, (list(self),)  # by default a copy is made by appending


_FIXED = {
    *("request_id", "tokens", "prompt_length", "max_length", "sampler", "rng"),
    *("prediction", "sequence", "state", "salt", "constraint", "texts"),
}
"""Fields of a request that only the engine sets."""


@dataclass
class Context:
    """State of one request, as drafters and controllers read it.

    Once a request has joined (:meth:`protect`), assigning to a field that does not change from round to round raises
    ``TypeError``; its copies can be changed.

    Attributes:
        request_id: unique within the engine.
        tokens: prompt and output so far, the root last; the engine passes :class:`CommittedTokens`.
        prompt_length: number of prompt tokens.
        max_length: largest final number of tokens, prompt included (0: unknown).
        sampler: the request's sampling pipeline, so that a draft distribution can be made by the same function.
        rng: the request's random numbers.
        hidden: target hidden states of the last round's committed nodes (root first), by tap name, each [n, D]; the
            row of position t is ``hidden[name][t - hidden_start]``.
        prediction: tokens that the caller expects in the answer.
        sequence: the target's sequence (a ``SequenceState``), for drafters that draft with the target.
        state: per-request state of each drafter or controller, keyed by its owner.
        salt: drafts may be learned only from requests with the same salt.
        constraint: the request's output constraint, if any.
        texts: the request's prefix in the caches of the draft models (a ``DraftTexts``); for drafters and the engine
            only.
        beside: trees of copying group members that did not draft this round, by member. They are never scored; a
            controller rates them by the tokens that follow.
        source: source of the last draft if it is not the drafter itself (``grammar``, ``prediction``, a member).
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "_protected" in self.__dict__:
            raise TypeError(f"context.{name} is read-only: only the engine sets it")
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_protected"}

    def protect(self) -> None:
        """Refuse assignments by others from now on: new tokens would get into the output, and without its random
        numbers or sampler a request cannot go on."""
        self.__dict__["_protected"] = True

    def update(self, **fields: Any) -> None:
        """Set fields of a request that has joined; for the engine only."""
        self.__dict__.update(fields)

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    @property
    def maker(self) -> Any:
        """Deprecated name of ``sampler``."""
        warnings.warn("context.maker was renamed to context.sampler", DeprecationWarning, stacklevel=2)
        return self.sampler
