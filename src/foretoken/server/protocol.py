"""uvicorn's HTTP protocol, with a limit on how long the first request of a connection may take to begin."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
