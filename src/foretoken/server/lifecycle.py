"""Lifecycle of a server process: early checks, signals and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from foretoken.server import logs
from foretoken.server.config import ServerSettings

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop the server."""


class ServerState(Protocol):
    """State of a server, as the loop that watches it needs it.

    Attributes:
        failed: error that prevented the start.
    """

    settings: ServerSettings
    failed: Exception | None

    @property
    def trouble(self) -> str | None:
        """Error that prevents serving, if any."""

    @property
    def is_loaded(self) -> bool:
        """Whether requests can be served."""

    @property
    def is_chat(self) -> bool:
        """Whether the model comes with a chat template."""

    @property
    def num_open(self) -> int:
        """Number of unfinished requests."""

    @property
    def end_s(self) -> float:
        """Seconds within which the server must have ended after a stop signal."""

    def drain(self) -> None:
        """Refuse new requests from now on."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, and end those with an error that are open after ``drain_s``."""

    def abandon(self) -> None:
        """End at once what is still being loaded; the process ends afterwards."""


def listener(settings: ServerSettings) -> socket.socket:
    """The bound socket, created before anything heavy is imported.  Raises ``ValueError`` if the address is not
    available."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With an explicit protocol asyncio turns Nagle's algorithm off; otherwise small chunks wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}; choose another --port or --host"
        ) from None
    sock.set_inheritable(True)
    return sock


def bound(settings: ServerSettings, sock: socket.socket) -> ServerSettings:
    """The settings with the port of the socket: ``--port 0`` leaves its choice to the system."""
    return replace(settings, port=sock.getsockname()[1])


def run(settings: ServerSettings, sock: socket.socket) -> int:
    """Serve until a signal arrives or the engine stops; returns the exit code."""
    from foretoken.server.app import create_app
    from foretoken.server.memory import share_arenas
    from foretoken.server.serving import Serving

    share_arenas()
    settings = bound(settings, sock)
    serving = Serving(settings)
    return run_app(create_app(settings, serving), serving, sock)


@contextlib.contextmanager
def answer_signals() -> Iterator[None]:
    """End the process at a signal until the event loop has installed its handlers, and restore the caller's at the end.

    The imports before that take seconds, and process 1 of a container ignores a signal without a handler.
    """
    before = {number: signal.signal(number, _stopped_while_loading) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def run_app(app: Any, serving: ServerState, sock: socket.socket) -> int:
    """Serve an application until a signal arrives or its state reports trouble; returns the exit code."""
    import uvicorn

    from foretoken.server.protocol import guarded

    config = uvicorn.Config(
        app,
        http=guarded(serving.settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop, if installed
        return runner.run(_serve(uvicorn.Server(config), serving, sock))


async def _serve(server: Any, serving: ServerState, sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    server.capture_signals = contextlib.nullcontext  # our handlers drain first

    def stop() -> None:
        if stopping.is_set():  # a second signal forces the end
            os._exit(1)
        stopping.set()

    for number in STOPPING:
        loop.add_signal_handler(number, stop)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    code = await _watched(serving, stopping, task)
    if stopping.is_set() and not code and not serving.is_loaded:
        await asyncio.to_thread(serving.abandon)
        _stopped_while_loading()
    server.should_exit = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), serving.end_s)
    server.force_exit = True
    await asyncio.wait({task}, timeout=2.0)
    if code:
        logs.say(f"error: {serving.trouble}", logging.ERROR)
    return code


def _stopped_while_loading(*_: object) -> NoReturn:
    """End the process: nothing is lost, and Python would wait for the loading thread, which cannot be stopped."""
    logs.say("stopped while the model was loading")
    logging.shutdown()
    os._exit(0)


async def _watched(serving: ServerState, stopping: asyncio.Event, task: asyncio.Task[None]) -> int:
    """Exit code, once the server has drained after a signal or something has failed."""
    greeted = False
    while not task.done():
        if serving.failed is not None:
            return 2
        if serving.trouble is not None:
            await asyncio.sleep(0.5)  # time for open streams to report the error
            # Exit code when the engine has stopped by itself
            return 70
        if serving.is_loaded and not greeted:
            greeted = True
            logs.say(greeting(serving.settings, serving.is_chat))
        if stopping.is_set():
            await _drained(serving, serving.settings.shutdown_timeout)
            return 0
        await asyncio.sleep(0.05)
    return 1


async def _drained(serving: ServerState, timeout_s: float) -> None:
    """Refuse new requests and wait for running ones."""
    serving.drain()
    end = asyncio.get_running_loop().time() + timeout_s
    while serving.num_open and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)
    if serving.num_open:
        await serving.stop(0.0)  # longer streams end with an error, not in the middle of a line
    await asyncio.sleep(0.2)  # time to send the last answers


def greeting(settings: ServerSettings, is_chat: bool = False) -> str:
    """Startup message: the server's address and an example request, a chat for a model with a chat template."""
    url = settings.url
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    question = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "def fib(n):"}
    path = "chat/completions" if is_chat else "completions"
    body = json.dumps({"model": settings.name, **question, "max_tokens": 64, "temperature": 0})
    return (
        f"serving {settings.name} at {url} (page at {url}/)\n"
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
        f"{agents(settings, url)}"
    )


def agents(settings: ServerSettings, url: str) -> str:
    """Environment variables that point agents at the server, one line per vendor."""
    key = "KEY" if settings.api_keys else "none"
    name = shlex.quote(settings.name)
    return (
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={name}\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={name}"
    )
