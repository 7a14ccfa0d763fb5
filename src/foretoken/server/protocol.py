"""uvicorn's HTTP protocol with limits on the size and duration of request headers and on the time that an answer stays
unread, and with errors in OpenAI's format for invalid HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foretoken.server.config import ServerSettings
from foretoken.server.errors import bad
from foretoken.server.limits import BETWEEN, PIECE
from foretoken.server.sse import PING

MOST_HEADER_BYTES = 32 * 1024
"""Maximum size of a request's headers."""


class StalledConnections:
    """Connections whose clients have stopped reading, the oldest first.  Each is cut after ``timeout_s`` seconds;
    beyond ``most`` connections the oldest is cut at once."""

    def __init__(self, timeout_s: float = 30.0, most: int = 32) -> None:
        self.timeout_s, self.most = timeout_s, most
        self._waiting: dict[GuardedProtocol, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: GuardedProtocol) -> None:
        """Add a connection whose client does not read."""
        if connection in self._waiting:
            return
        self._waiting[connection] = connection.loop.call_later(self.timeout_s, self._cut, connection)
        for oldest in list(self._waiting)[: max(0, len(self._waiting) - self.most)]:
            self._cut(oldest)

    def discard(self, connection: GuardedProtocol) -> None:
        """Remove a connection whose client has read everything or is gone."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, connection: GuardedProtocol) -> None:
        self.discard(connection)
        if connection.transport.get_write_buffer_size():  # empty if all was read, which no callback reports
            sock = connection.transport.get_extra_info("socket")
            # Lingering for no seconds resets the connection and frees the system's buffers, too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.transport.abort()


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections that send nothing, send headers too slowly or do not read; refuses oversized headers.

    A client may stop sending after its request ("half-close"), and still gets its answer.

    Attributes:
        headers_s: seconds within which a connection must have sent the headers of its first request.
    """

    headers_s = 15.0
    unread = StalledConnections()
    _guard: asyncio.TimerHandle | None = None
    _probing: asyncio.TimerHandle | None = None
    _in_headers = False
    _header_bytes = 0
    """Bytes of the headers being read."""

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the headers."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=PIECE)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        if self._probing is not None:
            self._probing.cancel()
        self.unread.discard(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open after the client has stopped sending, as it must for a pending answer.

        A client that is gone looks the same until something is sent to it, so a probe is sent.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._probe(0.01)
        return True

    def _probe(self, wait_s: float) -> None:
        """Send a probe, and the next one after ``wait_s`` seconds, which are doubled each time up to ten.

        A client that has only stopped sending ignores it.  If the client is gone, the first is answered with a reset,
        which the next one detects.  A client that left in mid-stream is thus noticed now and not two rounds later.
        """
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.1":
                return
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.scope["state"].get(BETWEEN):
            sized = b"%x\r\n%b\r\n" % (len(PING), PING)
            self.transport.write(sized if cycle.chunked_encoding else PING)
        self._probing = self.loop.call_later(wait_s, self._probe, min(2 * wait_s, 10.0))

    def pause_writing(self) -> None:
        """Start the client's timer: the write buffer is full."""
        super().pause_writing()
        self.unread.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.discard(self)

    def on_response_complete(self) -> None:
        """Start the timer for the rest of an answer too: the connection is not closed before it was read."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.unread.add(self)

    def on_message_begin(self) -> None:
        """Start the timer for the headers of the connection's next request."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        if self._guard is None:
            self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a complete header.  Raises ``ValueError`` if the headers are too large together; uvicorn then sends a
        400."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MOST_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._unwatch()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count incomplete headers too, which the parser keeps without a limit."""
        before, in_body = self._header_bytes, self.cycle is not None and self.cycle.more_body
        super().data_received(data)
        if self._in_headers and not in_body and not self.transport.is_closing():
            self._header_bytes = max(self._header_bytes, before + len(data))
            if self._header_bytes > MOST_HEADER_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and oversized headers."""
        error = bad("this is not a valid HTTP request, or its headers are too long", code="bad_http")
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: web sockets are not served, and a request for one gets a plain answer."""

    def _watch(self) -> None:
        self._guard = self.loop.call_later(self.headers_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None


def guarded(settings: ServerSettings) -> type[GuardedProtocol]:
    """Protocol class of one server, with its own limits on unread answers."""
    return type(
        "Guarded", (GuardedProtocol,), {"unread": StalledConnections(settings.write_timeout, settings.max_unread)}
    )
