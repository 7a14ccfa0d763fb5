"""The engine's side of one HTTP request: several tickets that are submitted and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

from foretoken.engine.background import AsyncLlm, Ticket
from foretoken.engine.errors import DeadlineExceeded
from foretoken.engine.output import Output, Piece, Pieces, output_of
from foretoken.engine.request import Emission, Request, Running

T = TypeVar("T")


def submit_all(engine: AsyncLlm, requests: Sequence[Request], arrived_s: float) -> list[Ticket]:
    """Queue all checked requests or none; they arrived then by the monotonic clock.  Raises ``QueueFull`` if there is
    no room for all."""
    tickets: list[Ticket] = []
    try:
        for request in requests:
            tickets.append(engine.submit(request, checked=True, arrived_s=arrived_s))
    except BaseException:
        for ticket in tickets:
            engine.cancel(ticket)
        raise
    return tickets


Saw = Callable[[int, int], None]
"""Callback for every block of tokens: index of the ticket, number of tokens."""


async def outputs_of(engine: AsyncLlm, tickets: Sequence[Ticket], saw: Saw) -> list[Output]:
    """Outputs of all tickets; if one fails, the others are cancelled.  Raises ``DeadlineExceeded`` when the time is
    up."""
    tasks = [asyncio.ensure_future(_output(engine, index, ticket, saw)) for index, ticket in enumerate(tickets)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for ticket, task in zip(tickets, tasks, strict=True):
            engine.cancel(ticket)
            task.cancel()  # a cancelled ticket has no next output
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(index: int, ticket: Ticket, saw: Saw) -> tuple[Running, Emission]:
    run, emission = await ticket.next()
    saw(index, len(emission.token_ids))
    if emission.finish_reason == "deadline":
        raise DeadlineExceeded("the time was up")
    return run, emission


async def _output(engine: AsyncLlm, index: int, ticket: Ticket, saw: Saw) -> Output:
    while True:
        run, emission = await _next(index, ticket, saw)
        if emission.finish_reason is not None:
            return output_of(run, engine.llm.tokenizer)


async def pieces_then_cancel(engine: AsyncLlm, tickets: Sequence[Ticket], saw: Saw) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all tickets as they arrive, with their indices.  Raises ``DeadlineExceeded`` once the time of one is
    up."""
    several = [_counted_pieces(engine, index, ticket, saw) for index, ticket in enumerate(tickets)]
    merged = several[0] if len(several) == 1 else _merged(several)
    try:
        async for piece in merged:
            yield piece
    finally:
        for ticket in tickets:
            engine.cancel(ticket)
        await merged.aclose()


async def _counted_pieces(
    engine: AsyncLlm, index: int, ticket: Ticket, saw: Saw
) -> AsyncGenerator[tuple[int, Piece], None]:
    pieces = Pieces(engine.llm.tokenizer)
    while True:
        run, emission = await _next(index, ticket, saw)
        yield index, pieces.push(run, emission)
        if emission.finish_reason is not None:
            return


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Values of several generators in order of arrival, from one task per generator."""
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()

    async def follow(source: AsyncGenerator[T, None]) -> None:
        try:
            async for value in source:
                queue.put_nowait(value)
            queue.put_nowait(None)
        except Exception as error:  # reported to the client by the reader of the queue
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        # Not only cancelled, but over: they read tickets, and what they do at their end is part of this.
        await asyncio.gather(*tasks, return_exceptions=True)


class ClientGone(Exception):
    """The client has disconnected."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Result of ``work``, which is cancelled when the client disconnects.  Raises ``ClientGone`` in that case."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
