"""What a drafter needs that lets other drafters guess for its own draft model: a text that grows by drafts and shrinks
again when they are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.core import Context
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.texts import DraftTexts


class Nested:
    """One request as the drafters inside another drafter see it.

    Args:
        sampler: the sampling pipeline of the inner text.

    Attributes:
        text: a context whose tokens are the request's and the drafts after them; it draws with the request's ``rng``.
        shared: how many leading tokens are known to be the request's own.
    """

    def __init__(self, context: Context, drafters: Sequence[Drafter], sampler: Any) -> None:
        tokens = list(context.tokens)
        self.drafters, self.shared = drafters, len(tokens)
        self.text = replace(
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
        """The request joined."""
        for drafter in self.drafters:
            drafter.start(self.text)

    def follow(self, tokens: Sequence[int]) -> None:
        """Make the inner text the request's ``tokens`` again.  Only what came after the last time is compared."""
        self.imagine(tokens[self.shared :])
        self.shared = len(tokens)

    def imagine(self, path: Sequence[int]) -> None:
        """Make the inner text the request's own and the drafts ``path`` behind it."""
        drafted, same = self.text.tokens, self.shared
        while same < min(self.shared + len(path), len(drafted)) and path[same - self.shared] == drafted[same]:
            same += 1
        self._cut(same)
        drafted.extend(path[same - self.shared :])

    def rewind(self, length: int) -> bool:
        """The request's own text was cut back to ``length`` tokens; tells whether that touches the inner text."""
        if length >= self.shared:
            return False
        self._cut(length)
        self.shared = length
        return True

    def finish(self, tokens: Sequence[int]) -> None:
        """The request ended with ``tokens``: drafts that were rejected are no text to learn from."""
        self.follow(tokens)
        for drafter in self.drafters:
            drafter.finish(self.text)

    def _cut(self, length: int) -> None:
        if length < len(self.text.tokens):
            del self.text.tokens[length:]
            for drafter in self.drafters:
                drafter.rewind(self.text, length)


def works_nested(drafter: Drafter | type[Drafter]) -> bool:
    """Whether a drafter can guess for a draft model: its text can be cut back, and it does not look into the target."""
    return drafter.traits.rewinds and not drafter.traits.runs_target and not drafter.taps
