"""A model's description in words, shared by the command line, the server and the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.models.base import Refusal

EXACT = {"bitwise": "exact to the last bit", "rounding": "exact up to rounding"}
"""Wording of each kind of exactness."""


def exactness_line(description: Mapping[str, Any]) -> str:
    """Exactness and its reason, from :meth:`~foretoken.models.base.LanguageModel.describe`."""
    kind = description["exactness"]
    return f"{EXACT.get(kind, kind)} ({description['exactness_why']})"


def how_it_runs(description: Mapping[str, Any]) -> str:
    """Forward, weights, threads and exactness in one line."""
    count = description["threads"]
    threads = f"{count} thread{'' if count == 1 else 's'}"
    parts = [f"{description['forward']} forward", description["weights"], threads, exactness_line(description)]
    return ", ".join(filter(None, parts))


def refused_lines(description: Mapping[str, Any]) -> list[str]:
    """One line per refused faster path, with its reason and cost."""
    return [str(Refusal(**refusal)) for refusal in description["refused"]]
