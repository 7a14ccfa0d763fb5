"""Streams of events: what is sent in silence, at the end, after an error, and when nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from foretoken.server.errors import bad
from foretoken.server.sse import DONE, PING, EventStream, event


async def sent_by(stream: EventStream) -> list[bytes]:
    """Bodies, in order; the head comes first and one empty body ends them."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await stream.stream_response(send)
    assert messages[0]["type"] == "http.response.start"
    assert [message.get("more_body") for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return [message["body"] for message in messages[1:-1]]


def test_a_silent_stream_is_kept_open_by_comments() -> None:
    go = asyncio.Event()

    async def events() -> AsyncIterator[Any]:
        yield {"number": 1}
        await go.wait()
        yield {"number": 2}

    async def run() -> list[bytes]:
        stream = EventStream(events(), 0.01, 0, {})
        asyncio.get_running_loop().call_later(0.5, go.set)
        return await sent_by(stream)

    bodies = asyncio.run(run())
    assert bodies[0] == event({"number": 1}) and bodies[-2:] == [event({"number": 2}), DONE]
    assert 2 <= len(bodies) - 3 <= 50 and set(bodies[1:-2]) == {PING}


def test_an_event_is_one_line_for_every_client() -> None:
    data = {"type": "x", "text": "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\nä"}
    (line, blank) = event(data).decode().splitlines()
    assert not blank and json.loads(line.removeprefix("data: ")) == data


def test_a_stream_that_is_never_silent_has_no_comments() -> None:
    async def events() -> AsyncIterator[Any]:
        for number in range(20):
            await asyncio.sleep(0)
            yield number

    bodies = asyncio.run(sent_by(EventStream(events(), 60.0, 0, {})))
    assert bodies == [*(event(number) for number in range(20)), DONE]


def test_no_comment_in_the_middle_of_a_large_event() -> None:
    """An event whose pieces wait for their reader is no silence."""

    async def events() -> AsyncIterator[Any]:
        yield "x"

    async def run() -> list[bytes]:
        order: list[bytes] = []

        async def send(message: Any) -> None:
            if message.get("body") == event("x"):
                order.append(b"begins")
                await asyncio.sleep(0.2)
                order.append(b"ends")
            elif message.get("body") == PING:
                order.append(PING)

        await EventStream(events(), 0.01, 0, {}).stream_response(send)
        return order

    assert asyncio.run(run()) == [b"begins", b"ends"]


def test_who_goes_away_before_the_head_ends_what_has_not_begun() -> None:
    left = []

    async def events() -> AsyncIterator[Any]:
        left.append("begun")
        yield 1

    async def run() -> None:
        waits = asyncio.Event()

        async def send(message: Any) -> None:
            waits.set()
            await asyncio.Event().wait()

        stream = EventStream(events(), 60.0, 0, {}, unread=lambda: left.append("unread"))
        task = asyncio.create_task(stream.stream_response(send))
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert left == ["unread"]


def test_after_an_error_there_is_no_end() -> None:
    closed = []

    async def events() -> AsyncIterator[Any]:
        try:
            yield 1
            raise bad("no")
        finally:
            closed.append(True)

    bodies = asyncio.run(sent_by(EventStream(events(), 60.0, 0, {})))
    assert bodies == [event(1), event(bad("no").body)] and closed == [True]


@pytest.mark.parametrize("where", ["events", "send"])
def test_who_goes_away_ends_the_events(where: str) -> None:
    """This holds whether nothing has come yet or an event could not be sent yet; no task is left behind."""
    closed = []

    async def events() -> AsyncIterator[Any]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def run() -> None:
        begun = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()
                if where == "send":
                    await asyncio.Event().wait()

        task = asyncio.create_task(EventStream(events(), 60.0, 0, {}).stream_response(send))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
