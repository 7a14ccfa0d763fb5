"""Server-sent events: data, comments that keep a silent stream open, errors, and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi.responses import StreamingResponse

from foretoken.server.errors import api_error

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Connection": "keep-alive"}


def event(data: Any, pad: int = 0) -> bytes:
    """One event; with ``pad``, filled with a comment up to a multiple of so many bytes."""
    found = b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    if not pad or len(found) % pad == 0:
        return found
    missing = -(len(found) + 3) % pad
    return b":" + b" " * missing + b"\n\n" + found


async def framed(events: AsyncIterator[Any], ping_s: float, pad: int) -> AsyncIterator[bytes]:
    """Events as bytes: a comment when nothing comes for a while, an error at its place, or the end.

    After an error the stream just closes: a client that saw ``[DONE]`` would take what it has for the whole answer.
    """
    source = events.__aiter__()
    upcoming: asyncio.Task[Any] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({upcoming}, timeout=ping_s)
            if not done:
                yield PING
                continue
            finished, upcoming = upcoming, None
            try:
                data = finished.result()
            except StopAsyncIteration:
                yield DONE
                return
            except Exception as error:
                yield event(api_error(error).body, pad)
                return
            yield event(data, pad)
    finally:
        if upcoming is not None:
            upcoming.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await upcoming
        await events.aclose()  # type: ignore[attr-defined]


def streamed(events: AsyncIterator[Any], ping_s: float, pad: int, headers: dict[str, str]) -> StreamingResponse:
    """The answer."""
    frames = framed(events, ping_s, pad)
    return StreamingResponse(frames, media_type="text/event-stream", headers=HEADERS | headers)
