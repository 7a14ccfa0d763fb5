"""From start to end of a server's process: an early check of what can go wrong, signals, and the exit code."""

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
from typing import Any, NoReturn

from foretoken.server import logs
from foretoken.server.config import ServerSettings

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask the server to stop."""


def listener(settings: ServerSettings) -> socket.socket:
    """The bound socket, before anything heavy is imported or loaded.  Raises ``ValueError`` where it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; else small chunks wait 40 ms for an ACK.
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


def run(settings: ServerSettings, sock: socket.socket) -> int:
    """Serve until a signal comes or the engine stops; returns the exit code."""
    from foretoken.server.app import create_app
    from foretoken.server.memory import share_arenas
    from foretoken.server.serving import Serving

    share_arenas()
    serving = Serving(settings)
    return run_app(create_app(settings, serving), serving, sock)


@contextlib.contextmanager
def answer_signals() -> Iterator[None]:
    """End the process at a signal until the event loop has handlers of its own; the caller's come back at the end.

    The imports before it take seconds, and process 1 of a container does not notice a signal without a handler.
    """
    before = {number: signal.signal(number, _stopped_while_loading) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def run_app(app: Any, serving: Any, sock: socket.socket) -> int:
    """Serve an application until a signal comes or its state is in trouble; returns the exit code.

    Args:
        serving: its state: ``failed``, ``trouble``, ``is_loaded``, ``num_open``, ``end_s``, ``is_chat``,
            ``settings``, ``drain()`` and ``abandon()``.
    """
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
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop, where it exists
        return runner.run(_serve(uvicorn.Server(config), serving, sock))


async def _serve(server: Any, serving: Any, sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    server.capture_signals = contextlib.nullcontext  # ours drain first

    def stop() -> None:
        if stopping.is_set():  # the second one is meant
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
    """End the process: nothing is lost, and Python would wait for the thread that loads, which cannot be stopped."""
    logs.say("stopped while the model was loading")
    logging.shutdown()
    os._exit(0)


async def _watched(serving: Any, stopping: asyncio.Event, task: asyncio.Task[None]) -> int:
    """Until it is asked to stop and has drained, or something has failed."""
    greeted = False
    while not task.done():
        if serving.failed is not None:
            return 2
        if serving.trouble is not None:
            await asyncio.sleep(0.5)  # open streams are told
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


async def _drained(serving: Any, timeout_s: float) -> None:
    """Refuse new requests, and wait for those that run."""
    serving.drain()
    end = asyncio.get_running_loop().time() + timeout_s
    while serving.num_open and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)
    if serving.num_open:
        await serving.stop(0.0)  # streams that take longer end with an error, not in the middle of a line
    await asyncio.sleep(0.2)  # the last answers are on their way


def greeting(settings: ServerSettings, is_chat: bool = False) -> str:
    """Where the server is, and how it is asked: a model with a chat template by a chat."""
    url = f"http://{settings.host}:{settings.port}{settings.root_path}"
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
    """The environment that points an agent at the server, a line for each vendor's."""
    key = "KEY" if settings.api_keys else "none"
    name = shlex.quote(settings.name)
    return (
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={name}\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={name}"
    )
