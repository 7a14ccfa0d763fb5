"""The context of drafters inside another drafter: a sequence that grows by draft tokens and shrinks when they are
rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.core import Context
from foretoken.methods.drafters.base import Drafter, finish_all
from foretoken.methods.drafters.texts import DraftTexts


class Nested:
    """One request as drafters inside another drafter see it.

    Args:
        sampler: the sampler of the inner context.

    Attributes:
        context: a context of the request's tokens and the draft tokens after them; it uses the request's ``rng``.
        shared: number of leading tokens that are known to be the request's own.
    """

    def __init__(self, context: Context, drafters: Sequence[Drafter], sampler: Any) -> None:
        tokens = list(context.tokens)
        self.drafters, self.shared = drafters, len(tokens)
        self.context = replace(
            context,
            tokens=tokens,
            sampler=sampler,
            hidden={},
            hidden_start=0,
            sequence=None,
            state={},
            texts=DraftTexts.of(context),  # one list for the engine, which keeps what they have read
        )

    def start(self) -> None:
        for drafter in self.drafters:
            drafter.start(self.context)

    def follow(self, tokens: Sequence[int]) -> None:
        """Reset the inner tokens to the request's ``tokens``, comparing only those after the last call."""
        self.imagine(tokens[self.shared :])
        self.shared = len(tokens)

    def imagine(self, path: Sequence[int]) -> None:
        """Set the inner tokens to the request's own and the draft tokens ``path`` after them."""
        drafted, same = self.context.tokens, self.shared
        while same < min(self.shared + len(path), len(drafted)) and path[same - self.shared] == drafted[same]:
            same += 1
        self._cut(same)
        drafted.extend(path[same - self.shared :])

    def rewind(self, length: int) -> bool:
        """Follow a request that was cut back to ``length`` tokens; return whether the inner tokens change."""
        if length >= self.shared:
            return False
        self._cut(length)
        self.shared = length
        return True

    def finish(self, tokens: Sequence[int]) -> None:
        """End the request with ``tokens``, without rejected draft tokens, which are not to be learnt from."""
        try:
            self.follow(tokens)
        finally:
            finish_all(self.drafters, self.context)

    def _cut(self, length: int) -> None:
        if length < len(self.context.tokens):
            del self.context.tokens[length:]
            for drafter in self.drafters:
                drafter.rewind(self.context, length)


def works_nested(drafter: Drafter | type[Drafter]) -> bool:
    """Whether a drafter can work inside another: its tokens can be cut back, and it does not read the target's
    states."""
    return drafter.traits.rewinds and not drafter.traits.runs_target and not drafter.taps
