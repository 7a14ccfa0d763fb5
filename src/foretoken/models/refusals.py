"""What a model does not get, and how it is said."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_SAID: set[str] = set()


@dataclass(frozen=True)
class Refusal:
    """A faster path, or a promise, that a model does not get.

    Attributes:
        path: its name ("lean forward", "int4 kernel", "CUDA graphs", "bitwise").
        why: the reason, in words.
        costs: what is lost by it, in words.
    """

    path: str
    why: str
    costs: str

    def __str__(self) -> str:
        """The one line that users see."""
        return f"{self.path}: refused, {self.why}; {self.costs}"


def refusal(path: str, why: str, costs: str) -> Refusal:
    """A refusal that is said once per process, on the library's logger (standard error, unless someone listens)."""
    refused = Refusal(path, why, costs)
    if str(refused) not in _SAID:
        _SAID.add(str(refused))
        logging.getLogger("foretoken").warning("%s", refused)
    return refused
