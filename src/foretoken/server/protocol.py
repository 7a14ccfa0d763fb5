"""uvicorn's HTTP protocol, with limits on how large the headers of a request may be and how long they may take, and
with errors in OpenAI's shape for what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foretoken.server.errors import bad
from foretoken.server.lifecycle import HEADERS_S, MOST_HEADER_BYTES


class GuardedProtocol(HttpToolsProtocol):
    """Connections that send nothing, or headers drop by drop, are closed; too many headers are refused."""

    _guard: asyncio.TimerHandle | None = None
    _in_headers = False
    _taken = 0
    """Bytes of the headers that are being read."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._unwatch()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start it for the next request of the connection."""
        super().on_message_begin()
        self._in_headers, self._taken = True, 0
        if self._guard is None:
            self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header that is complete.

        Raises:
            ValueError: they are too large together; uvicorn then sends a 400.
        """
        super().on_header(name, value)
        self._taken += len(name) + len(value)
        if self._taken > MOST_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def on_headers_complete(self) -> None:
        """Stop the clock."""
        self._in_headers = False
        self._unwatch()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to an incomplete header too: the parser keeps it without a limit."""
        before, in_body = self._taken, self.cycle is not None and self.cycle.more_body
        super().data_received(data)
        if self._in_headers and not in_body and not self.transport.is_closing():
            self._taken = max(self._taken, before + len(data))
            if self._taken > MOST_HEADER_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or headers that are too large."""
        error = bad("this is no valid HTTP request, or its headers are too long", code="bad_http")
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: there are no web sockets here, and whoever asks for one gets a plain answer."""

    def _watch(self) -> None:
        self._guard = self.loop.call_later(HEADERS_S, self.transport.close)

    def _unwatch(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None
