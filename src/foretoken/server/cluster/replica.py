"""One replica: the application, called with a request's scope and body instead of over a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message

from foretoken.server.config import ServerSettings
from foretoken.server.keys import Caller

SPENT = "foretoken.spent"
"""Type of the message that reports to the gateway how many ``tokens`` a request has used since the last such."""
TAKEN = "foretoken.taken"
"""Type of the message that reports to the gateway how many ``choices`` of a request were admitted."""
REPORT_S = 1.0
"""Seconds between reports of used tokens while nothing is sent: no end is reported of a request whose client leaves."""


class Replica:
    """One model, one engine, one application; ``name`` is sent to clients in the header ``X-Replica``.

    Keys, origins and other names of counters are the gateway's business: only the caller of a request travels, and
    whether there are several keys, not the server's settings for them. ``make`` creates the state and by default loads
    the model.
    """

    def __init__(
        self, settings: ServerSettings, name: str, make: Callable[[ServerSettings], Any] | None = None
    ) -> None:
        from foretoken.server import logs
        from foretoken.server.app import create_app
        from foretoken.server.serving import Serving

        logs.install()
        self.name = name
        self.settings = replace(
            settings,
            api_keys=(),
            key_running=0,
            key_queued=-1,
            key_tokens_per_minute=0,
            allowed_origin=(),
            insecure=True,
            root_path="",
            metrics_compat="",
        )
        self.serving = (make or Serving)(self.settings)
        self.serving.reserve(len(settings.keys) > 1)
        self.app: ASGIApp = create_app(self.settings, self.serving)

    async def start(self) -> None:
        """Load the model, before any request arrives.  Raises the ``Exception`` that prevented it."""
        await self.serving.start()
        if self.serving.failed is not None:
            raise self.serving.failed

    async def stop(self) -> None:
        """Finish running requests and end the engine."""
        await self.serving.stop(self.settings.shutdown_timeout)

    def check(self) -> None:
        """Raise ``RuntimeError`` if the engine is dead or hangs."""
        if self.serving.trouble is not None:
            raise RuntimeError(self.serving.trouble)

    @property
    def is_chat(self) -> bool:
        return bool(self.serving.is_chat)

    def metrics(self) -> str:
        """Exposition of the replica's counters for Prometheus."""
        return str(self.serving.metrics.text())

    async def answer(
        self, scope: dict[str, Any], body: bytes, caller: Caller | None = None
    ) -> AsyncGenerator[list[Message], None]:
        """ASGI messages of an answer.  Each piece has all messages that are ready, so that a burst travels at once.
        The first message of an admitted request is :data:`TAKEN`; a :data:`SPENT` precedes what follows new tokens.

        Closing the generator ends the request.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        state: dict[str, Any] = {"caller": caller or Caller()}
        spent = _Spent(state, messages)
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", self.name.encode())]}
            spent.report()
            messages.put_nowait(message)

        def taken(choices: int) -> None:
            messages.put_nowait({"type": TAKEN, "choices": choices})

        async def run() -> None:
            state["on_take"] = taken
            reports = asyncio.create_task(spent.report_often())
            try:
                await self.app({**scope, "extensions": {}, "state": state}, receive, send)
            except Exception:  # the application has answered with 500 already
                logging.getLogger("foretoken.server").exception("a request failed")
            finally:
                reports.cancel()
                spent.report()
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (first := await messages.get()) is not None:
                piece = [first]
                last = False
                while not messages.empty():
                    following = messages.get_nowait()
                    last = last or following is None
                    piece += [following] if following is not None else []
                yield piece
                if last:
                    return
        finally:
            gone.set()
            with suppress(asyncio.CancelledError, TimeoutError):
                # Time limit for ending a request whose client has left
                await asyncio.wait_for(task, 5.0)


class _Spent:
    """Reports the tokens that a request has used, among the messages of its answer."""

    def __init__(self, state: dict[str, Any], messages: asyncio.Queue[Message | None]) -> None:
        self._state, self._messages, self._reported = state, messages, 0

    def report(self) -> None:
        """Report the tokens used since the last report, if any."""
        slot = self._state.get("slot")
        if slot is not None and slot.spent > self._reported:
            self._messages.put_nowait({"type": SPENT, "tokens": slot.spent - self._reported})
            self._reported = slot.spent

    async def report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self.report()
