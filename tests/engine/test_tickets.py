"""What a round gains is handed over at once, to whoever waits, in whichever event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from foretoken.engine.errors import RequestFailed
from foretoken.engine.request import Request
from foretoken.engine.tickets import Ticket, hand_over


def tickets(count: int) -> list[Ticket]:
    return [Ticket(Request([1, 2], max_new_tokens=1)) for _ in range(count)]


async def failure(ticket: Ticket) -> str:
    with pytest.raises(RequestFailed) as error:
        await ticket.next()
    return str(error.value)


def test_a_round_wakes_everybody_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        some, loop = tickets(5), asyncio.get_running_loop()
        waiting = [asyncio.create_task(failure(ticket)) for ticket in some[:4]]
        await asyncio.sleep(0)
        calls: list[Any] = []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args))[1])
        hand_over([(ticket, RequestFailed(f"number {place}", "error")) for place, ticket in enumerate(some)])
        assert len(calls) == 1
        assert await asyncio.gather(*waiting) == [f"number {place}" for place in range(4)]
        assert await failure(some[4]) == "number 4"  # nobody had waited for it yet

    asyncio.run(asyncio.wait_for(run(), 30))


def test_loops_of_several_threads_are_woken_and_a_closed_one_hurts_nobody() -> None:
    some, messages, begun = tickets(3), [""] * 3, threading.Barrier(3)

    def wait(place: int) -> None:
        async def run() -> None:
            task = asyncio.create_task(failure(some[place]))
            await asyncio.sleep(0)
            begun.wait(30)
            messages[place] = await asyncio.wait_for(task, 30)

        asyncio.run(run())

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(some[2].next(), 0.01)

    asyncio.run(leave())
    assert some[2]._waiting is not None  # of a loop that is closed now
    threads = [threading.Thread(target=wait, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    hand_over([(ticket, RequestFailed("over", "error")) for ticket in some])
    for thread in threads:
        thread.join(30)
    assert messages == ["over", "over", ""]
