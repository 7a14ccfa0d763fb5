"""How what a request gains gets from the engine's thread to whoever asked."""

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
    """Give each ticket its gain, and wake those who wait.

    All of an event loop are woken by one call: each is a system call, at which the engine's thread would let the loop
    run, and then wait for it.
    """
    asleep: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for ticket, gain in gains:
        waiting = ticket._keep(gain)
        if waiting is not None:
            asleep.setdefault(waiting[0], []).append(waiting[1])
    for loop, events in asleep.items():
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Ticket:
    """A request on its way, as its sender sees it; made by :meth:`AsyncLlm.submit`.

    One task at a time may wait for it, in the event loop of any thread.

    Args:
        request: what was asked.
        service: who answers, kept alive until then.
    """

    def __init__(self, request: Request, service: object = None) -> None:
        self.request, self._service = request, service
        self.id: int | None = None
        self.arrived_s = monotonic()
        self._gains: deque[Gain] = deque()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, gain: Gain) -> None:
        """Hand over what was gained; called by the engine's thread."""
        hand_over([(self, gain)])

    def _keep(self, gain: Gain) -> tuple[asyncio.AbstractEventLoop, asyncio.Event] | None:
        """Keep it for whoever comes, and say who waits for it already."""
        self._gains.append(gain)
        return self._waiting

    async def _gain(self) -> Gain:
        while not self._gains:
            event = asyncio.Event()
            self._waiting = (asyncio.get_running_loop(), event)
            if not self._gains:  # else it came before anybody was told whom to wake
                await event.wait()
            self._waiting = None
        return self._gains.popleft()

    async def next(self) -> tuple[Running, Emission]:
        """The next gain.

        Raises:
            RequestFailed: the request ended with an error.
            DeadlineExceeded: it ended without a token because its time was up.
            EngineDead: the engine's thread has ended.
        """
        gain = await self._gain()
        if isinstance(gain, Exception):
            raise gain
        run, emission = gain
        if emission.error is not None:
            raise failure_of(emission.error) from emission.error
        if emission.finish_reason == "deadline" and not run.output:
            raise DeadlineExceeded(f"nothing was written within {self.request.deadline_s} s")
        return run, emission
