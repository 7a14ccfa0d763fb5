"""Timing of arms: the clock, and interleaving, so that other load affects all arms alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from foretoken.models.clock import now

T = TypeVar("T")
K = TypeVar("K")


class Stopwatch:
    """Seconds since its start, read after ``device`` has finished all queued work."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.began_s = now(device)

    @property
    def seconds(self) -> float:
        return now(self.device) - self.began_s


def interleave(arms: Sequence[T], turns: int, first: int = 0) -> Iterator[tuple[int, T]]:
    """Yield (turn, arm): every arm once a turn, in rotating order from index ``first``.

    An arm removed from the sequence is skipped from the next turn on; an empty sequence ends the iteration.
    """
    for turn in range(turns):
        if not arms:
            return
        start = (first + turn) % len(arms)
        for arm in (*arms[start:], *arms[:start]):
            yield turn, arm


def runs_of(arms: Mapping[K, Callable[[], T]], turns: int) -> dict[K, list[T]]:
    """Results of every arm, in the order of its runs."""
    runs: dict[K, list[T]] = {name: [] for name in arms}
    for _, name in interleave(list(arms), turns):
        runs[name].append(arms[name]())
    return runs


def median_run(runs: Sequence[T], key: Callable[[T], Any]) -> T:
    """The run with the median ``key``; the lower of the middle two for an even number of runs."""
    return sorted(runs, key=key)[(len(runs) - 1) // 2]
