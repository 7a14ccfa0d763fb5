"""The engine's side of one HTTP request: several tickets that live and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from foretoken.engine.background import AsyncLlm, Ticket
from foretoken.engine.errors import DeadlineExceeded
from foretoken.engine.output import Output, Piece, Pieces, output_of
from foretoken.engine.request import Request

T = TypeVar("T")


def submit_all(engine: AsyncLlm, requests: Sequence[Request]) -> list[Ticket]:
    """Queue all of them, or none.

    Raises:
        QueueFull: there is no room for all.
    """
    tickets: list[Ticket] = []
    try:
        for request in requests:
            tickets.append(engine.submit(request))
    except BaseException:
        for ticket in tickets:
            engine.cancel(ticket)
        raise
    return tickets


Saw = Callable[[int, int], None]
"""Told of every block as it comes: the index of its ticket, and its tokens."""


async def outputs_of(engine: AsyncLlm, tickets: Sequence[Ticket], saw: Saw) -> list[Output]:
    """What they give; if one fails, the others are ended, too.

    Raises:
        DeadlineExceeded: the time was up.
    """
    try:
        return await asyncio.gather(*(_output(engine, index, ticket, saw) for index, ticket in enumerate(tickets)))
    finally:
        for ticket in tickets:
            engine.cancel(ticket)


async def _output(engine: AsyncLlm, index: int, ticket: Ticket, saw: Saw) -> Output:
    while True:
        run, emission = await ticket.next()
        saw(index, len(emission.token_ids))
        if emission.finish_reason == "deadline":
            raise DeadlineExceeded("the time was up")
        if emission.finish_reason is not None:
            return output_of(run, engine.llm.tokenizer)


async def pieces_of(engine: AsyncLlm, tickets: Sequence[Ticket], saw: Saw) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all of them as they come, with their indices.

    Raises:
        DeadlineExceeded: the time of one was up.
    """
    queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def follow(index: int, ticket: Ticket) -> None:
        pieces = Pieces(engine.llm.tokenizer)
        try:
            while True:
                run, emission = await ticket.next()
                saw(index, len(emission.token_ids))
                if emission.finish_reason == "deadline":
                    raise DeadlineExceeded("the time was up")
                await queue.put((index, pieces.push(run, emission)))
                if emission.finish_reason is not None:
                    break
            await queue.put(None)
        except Exception as error:  # told to the client by whoever reads the queue
            await queue.put(error)

    tasks = [asyncio.create_task(follow(index, ticket)) for index, ticket in enumerate(tickets)]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for ticket, task in zip(tickets, tasks, strict=True):
            engine.cancel(ticket)
            task.cancel()


class ClientGone(Exception):
    """Nobody listens any more."""


async def while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of some work, which ends when the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
