"""Server-sent events: data, comments that keep a silent stream open, errors, and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send

from foretoken.server.errors import ApiError, api_error, is_anthropic

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}
"""Characters that JSON leaves in a text and some clients take for the end of a line (``str.splitlines``, httpx)."""


@dataclass(frozen=True)
class Dialect:
    """Stream format of an API.

    Attributes:
        error: payload of an error event.
        end: bytes at the end of a complete answer.
        named: whether an event has its type as a name.
    """

    error: Callable[[ApiError], dict[str, Any]]
    end: bytes = b""
    named: bool = False


OPENAI = Dialect(lambda error: error.body, DONE)
ANTHROPIC = Dialect(lambda error: error.anthropic_body, named=True)
RESPONSES_API = Dialect(lambda error: {**error.body["error"], "type": "error"}, named=True)


def dialect_of(path: str) -> Dialect:
    """Stream format of a route."""
    if is_anthropic(path):
        return ANTHROPIC
    return RESPONSES_API if path.endswith("/v1/responses") else OPENAI


def event(data: Any, pad: int = 0, named: bool = False) -> bytes:
    """One event; with ``pad``, filled with a comment up to a multiple of that many bytes."""
    name = b"event: " + str(data["type"]).encode() + b"\n" if named else b""
    encoded = _encoded(data)
    for character, escape in LINE_ENDS.items():
        encoded = encoded.replace(character, escape)
    message = name + b"data: " + encoded.encode() + b"\n\n"
    if not pad or len(message) % pad == 0:
        return message
    missing = -(len(message) + 3) % pad
    return b":" + b" " * missing + b"\n\n" + message


async def encoded_events(
    events: AsyncIterator[Any], pad: int, dialect: Dialect = OPENAI
) -> AsyncGenerator[bytes, None]:
    """Events as bytes, followed by the end mark or an error event.

    After an error the stream just closes: a client that saw ``[DONE]`` would take a partial answer for the whole.
    """
    try:
        async for data in events:
            yield event(data, pad, dialect.named)
        if dialect.end:
            yield dialect.end
    except Exception as error:
        yield event(dialect.error(api_error(error)), pad, dialect.named)
    finally:
        await events.aclose()  # type: ignore[attr-defined]


class EventStream(StreamingResponse):
    """Sends events as they arrive, and a comment after ``ping_s`` seconds of silence; for ``pad`` see :func:`event`.

    ``unread`` is called if the client leaves before the head was sent: events that have not begun cannot end anything
    themselves.  A separate task sends the comments: waiting for every event with a time limit would cost a task per
    event.
    """

    def __init__(
        self,
        events: AsyncIterator[Any],
        ping_s: float,
        pad: int,
        headers: dict[str, str],
        dialect: Dialect = OPENAI,
        unread: Callable[[], None] = lambda: None,
    ) -> None:
        self.unread = unread
        self.frames, self.ping_s, self._sent_s = encoded_events(events, pad, dialect), ping_s, 0.0
        self._in_frame = False
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Connection": "keep-alive"} | headers
        super().__init__(self.frames, media_type="text/event-stream", headers=headers)

    async def stream_response(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        except BaseException:
            self.unread()
            raise
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        pings = asyncio.create_task(self._ping(send))
        try:
            async for frame in self.frames:
                self._sent_s, self._in_frame = clock(), True
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                self._in_frame = False
        finally:
            pings.cancel()
            await self.frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self.ping_s - clock()))
            if clock() - self._sent_s >= self.ping_s:
                self._sent_s = clock()
                if self._in_frame:  # no comment inside a large frame, which is sent in pieces
                    continue
                await send({"type": "http.response.body", "body": PING, "more_body": True})
