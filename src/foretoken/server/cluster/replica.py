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
"""Type of the message that tells the gateway how many ``tokens`` a request has used."""
ANYBODY = Caller()


class Replica:
    """One model, one engine, one application; ``name`` is told to clients in the header ``X-Replica``.

    Keys and origins are the gateway's business: they do not travel with the server's settings, only who asks does.
    ``make`` makes the state; by default it loads the model.
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
        )
        self.serving = (make or Serving)(self.settings)
        self.app: ASGIApp = create_app(self.settings, self.serving)

    async def start(self) -> None:
        """Load the model; nobody is sent here before that.  Raises ``Exception`` where it cannot be loaded."""
        await self.serving.start()
        if self.serving.failed is not None:
            raise self.serving.failed

    async def stop(self) -> None:
        """Finish what runs, and end the engine."""
        await self.serving.stop(self.settings.shutdown_timeout)

    def check(self) -> None:
        """Whether this replica should go on living.  Raises ``RuntimeError`` where the engine is dead or hangs."""
        if self.serving.trouble is not None:
            raise RuntimeError(self.serving.trouble)

    @property
    def is_chat(self) -> bool:
        return bool(self.serving.is_chat)

    def metrics(self) -> str:
        """Its counters, as Prometheus reads them."""
        return str(self.serving.metrics.text().decode())

    async def answer(
        self, scope: dict[str, Any], body: bytes, caller: Caller = ANYBODY
    ) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of an answer: in each piece those that are there, so that a burst travels at once.  The
        last one is ours (:data:`SPENT`).

        Who stops listening ends the request.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", self.name.encode())]}
            messages.put_nowait(message)

        async def run() -> None:
            state: dict[str, Any] = {"caller": caller}
            try:
                await self.app({**scope, "extensions": {}, "state": state}, receive, send)
            except Exception:  # the application has answered with 500 already
                logging.getLogger("foretoken.server").exception("a request failed")
            finally:
                place = state.get("place")
                messages.put_nowait({"type": SPENT, "tokens": 0 if place is None else place.spent})
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
                # Seconds in which the application must end a request whose client has left
                await asyncio.wait_for(task, 5.0)
