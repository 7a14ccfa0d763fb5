"""uvicorn's HTTP protocol, with a limit on how long the first request of a connection may take to begin, and with
errors in OpenAI's shape for what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.server.errors import bad
from foretoken.server.lifecycle import HEADERS_S


class GuardedProtocol(H11Protocol):
    """Connections that send nothing, or headers drop by drop, are closed."""

    _guard: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._guard = self.loop.call_later(HEADERS_S, self._close_when_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        if self._guard is not None:
            self._guard.cancel()
        super().connection_lost(exc)

    def _close_when_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or headers that are too long."""
        body = json.dumps(
            bad("this is no valid HTTP request, or its headers are too long", code="bad_http").body
        ).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
