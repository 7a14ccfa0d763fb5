"""Servers on a loopback port: the real application, and one that misbehaves as its prompts say."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@contextmanager
def running(app: Any, path: str = "/v1/models") -> Iterator[str]:
    """The address of an application, once it answers at ``path``."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and httpx.get(url + path, timeout=30).status_code >= 500:
            time.sleep(0.02)
        yield url
    finally:
        server.should_exit = True
        thread.join(20)


def event(text: str = "", reason: str | None = None, **more: Any) -> str:
    """One event of a completion."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': reason, **more}]})}\n\n"


class Scripted:
    """A server that does what the prompt names.

    Attributes:
        seen: bodies of all requests.
        most: most requests that were open at the same time.
        pause_s: between two chunks.
        owner: ``owned_by`` of its model.
        key: which it wants, if any.
        drafted: draft tokens of its Prometheus page.
        switches: whether ``speculative: {"enabled": false}`` is heeded.
        logprobs: what it says of the next token.
        skew: appended to texts of requests without ``speculative``.
    """

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.open = self.most = self.drafted = 0
        self.pause_s, self.owner, self.key, self.skew = 0.0, "somebody", "", ""
        self.switches = True
        self.logprobs: dict[str, float] = {}
        routes = [
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"data": [{"id": "toy", "owned_by": self.owner}]})

    async def _metrics(self, request: Request) -> Response:
        lines = [
            f'vllm:spec_decode_num_drafts_total{{model_name="toy"}} {self.drafted / 4}',
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="toy"}} {self.drafted}',
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="toy"}} {self.drafted / 2}',
        ]
        return PlainTextResponse("\n".join(lines))

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [5, 6]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        if body.get("logprobs"):
            return JSONResponse({"choices": [{"logprobs": {"top_logprobs": [self.logprobs]}}]})
        if body["prompt"] == "full":
            return JSONResponse({"error": {"message": "no room"}}, 503)
        if body["prompt"] == "detail":
            return JSONResponse({"detail": "not like this"}, 422)
        return StreamingResponse(self._counted(body), media_type="text/event-stream")

    async def _counted(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.open += 1
        self.most = max(self.most, self.open)
        self.drafted += 8
        try:
            async for chunk in self._chunks(body):
                yield chunk
        finally:
            self.open -= 1

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        what = body["prompt"]
        plain = body.get("speculative") == {"enabled": False}
        yield ": ping\n\n"
        for i in range(3):
            yield event(f"block {i} ", token_ids=[i])
            await asyncio.sleep(30 if what == "hang" and i else self.pause_s)
            if what == "die":
                raise RuntimeError("as asked")
            if what == "cut":
                yield event("more")[:20]
                return
            if what == "error":
                yield 'data: {"error": {"message": "out of luck"}}\n\n'
                return
            if what == "words":
                yield "data: all is well\n\n"
                return
        if what != "endless":
            skew = "" if plain else self.skew
            yield event("end" + skew, "length", token_ids=[8 if skew else 9])
        drafted = 0 if plain and self.switches else 4
        spec = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": drafted // 2, "num_spec_steps": 2}
        more = {} if what == "untold" else {"metrics": {"speculative_decoding": spec}}
        if what != "uncounted":
            usage = {"completion_tokens": 13, "prompt_tokens": 5}
            yield f"data: {json.dumps({'choices': [], 'usage': usage, **more})}\n\n"
        if what != "undone":
            yield "data: [DONE]\n\n"
