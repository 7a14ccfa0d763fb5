"""A real server on a free port, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

import httpx
import uvicorn

import foretoken as ft
from foretoken.llm import Llm
from foretoken.server.app import create_app
from foretoken.server.config import ServerSettings
from foretoken.server.protocol import guarded
from foretoken.server.serving import Serving


def make_llm(settings: ServerSettings) -> Llm:
    """The built-in target with a drafter that copies, in float32."""
    return ft.load("builtin", "ngram", dtype="float32", controller="constant", known=True)


class Running:
    """A server and its state.

    Attributes:
        url: where it is.
        serving: what its routes share.
    """

    def __init__(self, url: str, serving: Serving) -> None:
        self.url, self.serving = url, serving
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send JSON to the model that is served."""
        return self.client.post(path, json={"model": "builtin", **body})

    def complete(self, prompt: Any = "def fib(n):", **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 8, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion


@contextmanager
def served(make: Any = make_llm, send_buffer: int = 0, **settings: Any) -> Iterator[Running]:
    """A server with these settings, and so many bytes that the system takes of an answer that nobody reads."""
    sock = socket.socket()
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.bind(("127.0.0.1", 0))
    sock.listen(256)
    server_settings = ServerSettings(port=sock.getsockname()[1], **settings)
    serving = Serving(server_settings, make)
    app = create_app(server_settings, serving)
    config = uvicorn.Config(app, http=guarded(server_settings), lifespan="on", log_config=None, ws="none")
    server = uvicorn.Server(config)

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[sock]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server_settings.port}"
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and httpx.get(f"{url}/ready", timeout=30).status_code != 200:
            assert serving.failed is None, serving.failed
            time.sleep(0.05)
        yield Running(url, serving)
    finally:
        server.should_exit = True
        thread.join(30)
