"""Tickets: delivery of output from the engine's thread to the callers' event loops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic

from foretoken.engine.errors import DeadlineExceeded, failure_of
from foretoken.engine.request import Emission, Request, Running

Gain = tuple[Running, Emission] | Exception


def hand_over(gains: Iterable[tuple[Ticket, Gain]]) -> None:
    """Deliver each ticket's output, and wake the waiting tasks.

    One call wakes all tasks of an event loop. Each call is a system call, at which the engine's thread would let the
    loop run, and then wait for it.
    """
    asleep: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for ticket, gain in gains:
        waiting = ticket._keep(gain)
        if waiting is not None:
            asleep.setdefault(waiting[0], []).append(waiting[1])
    for loop, events in asleep.items():
        with suppress(RuntimeError):  # a closed loop has no waiting tasks
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Ticket:
    """A queued request, as its caller sees it; created by :meth:`AsyncLlm.submit`.

    One task at a time may wait for it, in the event loop of any thread.

    Args:
        request: the request.
        service: the service that answers, kept alive until then.
        arrived_s: arrival time by the monotonic clock; now by default.
    """

    def __init__(self, request: Request, service: object = None, arrived_s: float | None = None) -> None:
        self.request, self._service = request, service
        self.id: int | None = None
        self.arrived_s = monotonic() if arrived_s is None else arrived_s
        self._gains: deque[Gain] = deque()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, gain: Gain) -> None:
        """Deliver output; called by the engine's thread."""
        hand_over([(self, gain)])

    def _keep(self, gain: Gain) -> tuple[asyncio.AbstractEventLoop, asyncio.Event] | None:
        """Store output for the reader. Returns the loop and event of a waiting task."""
        self._gains.append(gain)
        return self._waiting

    async def _gain(self) -> Gain:
        while not self._gains:
            event = asyncio.Event()
            self._waiting = (asyncio.get_running_loop(), event)
            if not self._gains:  # else it came before the waiting task was registered
                await event.wait()
            self._waiting = None
        return self._gains.popleft()

    async def next(self) -> tuple[Running, Emission]:
        """The next output.

        Raises:
            RequestFailed: the request ended with an error.
            DeadlineExceeded: its deadline passed before its first token.
            EngineDead: the engine's thread has ended.
        """
        gain = await self._gain()
        if isinstance(gain, Exception):
            raise gain
        run, emission = gain
        if emission.error is not None:
            raise failure_of(emission.error) from emission.error
        if emission.finish_reason == "deadline" and not run.output:
            raise DeadlineExceeded(f"no token was generated within {self.request.deadline_s} s")
        return run, emission
