"""What a model's description says, in words: one place for the command line, the server and the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.models.base import Refusal

EXACT = {"bitwise": "exact to the last bit", "rounding": "exact up to rounding"}
"""What each kind of exactness promises."""


def exactness_line(description: Mapping[str, Any]) -> str:
    """What the model promises and how that is known, from :meth:`~foretoken.models.base.LanguageModel.describe`."""
    kind = description["exactness"]
    return f"{EXACT.get(kind, kind)} ({description['exactness_why']})"


def how_it_runs(description: Mapping[str, Any]) -> str:
    """Forward, weights, threads and exactness in one line."""
    count = description["threads"]
    threads = f"{count} thread{'' if count == 1 else 's'}"
    parts = [f"{description['forward']} forward", description["weights"], threads, exactness_line(description)]
    return ", ".join(filter(None, parts))


def refused_lines(description: Mapping[str, Any]) -> list[str]:
    """A line for every faster path that was refused, with the reason and what it costs."""
    return [str(Refusal(**refusal)) for refusal in description["refused"]]
