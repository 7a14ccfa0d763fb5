"""Threads for work that would block the event loop: a few per kind of work, so that one kind cannot delay another."""

from __future__ import annotations

import asyncio
import heapq
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Any, TypeVar

from foretoken.server.memory import FREED

T = TypeVar("T")
LARGE = 32 * 1024
"""Characters of a large text: some ten milliseconds of tokenising."""
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class FairQueue:
    """Threads that run cheap work before expensive work and starve none.

    Work is ordered by the total cost served at its arrival plus its own cost (the finish numbers of fair queueing:
    Demers, Keshav and Shenker 1989, with a flow per request).  One thread takes no large work (a cost of ``large`` or
    more), so small work never waits for large work to end.
    """

    def __init__(self, threads: int, name: str, large: int = LARGE) -> None:
        if threads < 2:
            raise ValueError(f"a fair queue needs at least 2 threads, not {threads}")
        self._threads, self._name, self._large = threads, name, large
        self._due: dict[bool, list[tuple[float, int, int, Future[Any], Callable[[], Any]]]] = {True: [], False: []}
        self._served_cost, self._numbers, self._at_large, self._begun = 0.0, count(), 0, 0
        self._changed = threading.Condition()

    def submit(self, work: Callable[[], T], cost: int = 1) -> Future[T]:
        """Queue work; its cost is in characters."""
        future: Future[T] = Future()
        with self._changed:
            entry = (self._served_cost + cost, next(self._numbers), cost, future, work)
            heapq.heappush(self._due[cost >= self._large], entry)
            if self._begun < self._threads:
                self._begun += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._begun}", daemon=True).start()
            self._changed.notify_all()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while (large := self._next()) is None:
                    self._changed.wait()
                _, _, cost, future, work = heapq.heappop(self._due[large])
                self._at_large += large
            if future.set_running_or_notify_cancel():  # false if the client has gone
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work
            if large:
                FREED.large_one_ended()
            with self._changed:
                self._served_cost += cost
                self._at_large -= large
                self._changed.notify_all()

    def _next(self) -> bool | None:
        """Whether the next work is large; ``None`` if there is none that a thread may take."""
        open_ = [
            (queue[0][:2], large)
            for large, queue in self._due.items()
            if queue and (not large or self._at_large < self._threads - 1)
        ]
        return min(open_)[1] if open_ else None


TEXTS = FairQueue(3, "foretoken-texts")
"""Tokenising and building requests."""
TEMPLATES = ThreadPoolExecutor(2, "foretoken-templates")
"""Rendering chat templates, which are programs."""
GRAMMARS = ThreadPoolExecutor(32, "foretoken-grammars")
"""Compiling grammars; nearly all of these threads only wait for the grammar that is on trial."""


def json_bytes(value: Any) -> bytes:
    """The value as JSON, encoded in pieces: encoding a large one at once would block all other threads."""
    parts = _JSON.iterencode(value)
    return b"".join(iter(lambda: "".join(islice(parts, 4096)).encode(), b""))


class NotBegun(Exception):
    """Work for a pool did not begin in time, as all of its threads were at work."""


async def in_thread(
    pool: ThreadPoolExecutor | FairQueue, work: Callable[[], T], timeout_s: float | None = None, cost: int = 1
) -> T:
    """Result of ``work`` in a thread; ``cost`` is for a :class:`FairQueue`.

    Raises ``TimeoutError`` if it runs for more than ``timeout_s``; the thread cannot be stopped and continues, but
    nobody waits for it.  Raises :class:`NotBegun` if it waits for a thread as long, and then it is never run.
    """
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def told() -> T:
        loop.call_soon_threadsafe(begun.set)
        return work()

    called = work if timeout_s is None else told
    future = asyncio.wrap_future(pool.submit(called, cost) if isinstance(pool, FairQueue) else pool.submit(called))
    if timeout_s is not None:
        try:
            await asyncio.wait_for(begun.wait(), timeout_s)
        except TimeoutError:
            raise NotBegun from None
        finally:
            if not begun.is_set():
                future.cancel()
    return await asyncio.wait_for(future, timeout_s)
