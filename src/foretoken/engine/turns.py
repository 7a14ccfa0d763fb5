"""Whose turn it is: which waiting request joins next, where some belong to one owner and some to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foretoken.engine.request import Running

SHARE = 8
"""One place in so many is kept for owners that have none."""


def kept_back(places: int) -> int:
    """Places that nobody gets who has one already, so that one owner cannot hold all: an eighth, of few places one."""
    return -(-places // SHARE) if places > 1 else 0


def first_in_turn(waiting: Sequence[Running], running: Sequence[Running], places: int, kept: int) -> Running | None:
    """The request that joins next: of those that come first by priority the one whose owner has the fewest running,
    and of these the one that came first.

    Args:
        waiting: by priority, then in order of arrival.
        running: those that have a place.
        places: how many there are.
        kept: how many of them are for owners of which nothing runs.

    Returns:
        ``None`` where nobody may join now.
    """
    held = Counter(run.request.owner for run in running)
    is_short = places - len(running) <= kept
    may = [run for run in waiting if not _is_at_limit(run, held) and not (is_short and held[run.request.owner])]
    return min(may, key=lambda run: (run.request.priority, held[run.request.owner]), default=None)


def _is_at_limit(run: Running, held: Counter[str]) -> bool:
    most = run.request.owner_running
    return bool(most) and held[run.request.owner] >= most
