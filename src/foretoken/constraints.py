"""What an output must look like: a protocol, so that engine and drafters need no grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foretoken.sampling import LogitsProcessor


class CannotGoOn(ValueError):
    """What was asked for contradicts itself from some token of the text on; the request alone is to blame."""


class Constraint(Protocol):
    """A rule for one request's output.

    Attributes:
        processor: gives tokens that may not follow a prefix (prompt included) no probability; a pure function of
            (prefix, scores), since it is called for the nodes of different branches.  After a prefix of which it knows
            no continuation it may leave nothing.
        ends: ids by which it says that nothing may follow; each of them ends the text.
    """

    @property
    def ends(self) -> frozenset[int]:
        """See above."""

    @property
    def processor(self) -> LogitsProcessor:
        """See above."""

    def starts_at(self, prompt_length: int) -> None:
        """The output begins behind so many tokens."""

    def forced(self, output: Sequence[int]) -> list[int]:
        """Tokens that must follow these output tokens; none where there is a choice."""

    def may_end(self, output: Sequence[int]) -> bool:
        """Whether these output tokens are all that was asked for."""
