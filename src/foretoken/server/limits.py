"""What comes before the routes: identity of a request, keys, sizes and times."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.errors import ApiError, bad

requests_log = logging.getLogger("foretoken.requests")
OPEN = ("/health", "/ready")
"""Routes that need no key: probes of orchestrators have none."""
WRITERS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""Routes that need a place in the engine."""
DEEPEST = 64
"""Levels of a JSON document."""
DISCARD_S = 1.0
"""Seconds for the rest of a body that is too large."""
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Gate:
    """Every request passes here first: it gets an id, shows its key, and is small enough and sent in time.

    Args:
        app: what comes behind.
        keys: any of them opens; none leaves all open.
        max_body: most bytes of a body.
        body_timeout: seconds in which it must have arrived.
        admit: raises an :class:`ApiError` while nothing can be taken: a full server refuses before it reads what was
            asked, or those whom it serves would wait for that.
        root_path: where a proxy has put the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        max_body: int,
        body_timeout: float,
        admit: Callable[[], None] | None = None,
        root_path: str = "",
    ) -> None:
        self.root_path = root_path.rstrip("/")
        self.app, self.max_body, self.body_timeout, self.admit = app, max_body, body_timeout, admit
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _id_of(headers)
        began = time.monotonic()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if _is_worth_a_line(scope, message["status"]):
                    log_request(scope, message["status"], began)
                found = MutableHeaders(scope=message)
                found["X-Request-Id"] = request_id
                for name, value in SECURITY.items():
                    found.setdefault(name, value)
            await send(message)

        try:
            # A proxy may send the path with the prefix that it has put the server under, or without it.
            state["tenant"] = self._check_key(scope["path"].removeprefix(self.root_path), headers)
            received = await self._body(scope, headers, receive)
            if self.admit is not None and scope["method"] == "POST" and scope["path"].endswith(WRITERS):
                self.admit()
        except ApiError as error:
            await error.response_to(scope["path"])(scope, receive, named)
            return
        await self.app(scope, received, named)

    def _check_key(self, path: str, headers: Headers) -> str:
        """Compare in constant time with all keys; returns whose texts and drafts may be reused for this request, which
        is nobody else's where there are several keys.

        Raises:
            ApiError: 401.
        """
        if not self.keys or path in OPEN:
            return ""
        digest = hashlib.sha256(_key_of(headers).encode()).digest()
        if not any([hmac.compare_digest(digest, key) for key in self.keys]):  # noqa: C419 (all of them, always)
            page = path in ("/", "/app.js", "/style.css")
            ask = {"WWW-Authenticate": 'Basic realm="foretoken"' if page else "Bearer"}
            raise ApiError(401, "give a valid key: Authorization: Bearer KEY", code="invalid_api_key", headers=ask)
        return digest.hex()[:16] if len(self.keys) > 1 else ""

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body, and hand it on in one piece.

        Raises:
            ApiError: 413, 408, or 400 for a document that is nested too deeply.
        """
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            return receive
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_body:
            await self._discard(receive)
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self.body_timeout)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", headers={"Connection": "close"}) from None
        if deeper_than(body, DEEPEST):
            raise bad(f"the JSON document is nested more than {DEEPEST} levels deep", code="json_too_deep")
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        return again

    async def _discard(self, receive: Receive) -> None:
        """Let up to twice the limit arrive: a client that is still sending would see a reset, not the answer."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while size < 2 * self.max_body:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body} bytes", headers={"Connection": "close"})


def _is_worth_a_line(scope: Scope, status: int) -> bool:
    """Whether the log should have a line of an answer: generations write their own, and probes come every second."""
    return status >= 400 and scope["path"] not in OPEN and not scope["state"].get("logged")


def log_request(scope: Scope, status: int, began_s: float, **fields: Any) -> None:
    """One line of the log about one request, at most once."""
    scope["state"]["logged"] = True
    told = {
        "request_id": scope["state"].get("request_id", ""),
        "route": scope["path"][:256],
        "status": status,
        **fields,
        "seconds": round(time.monotonic() - began_s, 4),
    }
    requests_log.info("request", extra={"fields": told})


def _id_of(headers: Headers) -> str:
    """The client's id, where it is one that can be put into a log, else a new one."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) else uuid.uuid4().hex


def _key_of(headers: Headers) -> str:
    if "x-api-key" in headers and "authorization" not in headers:  # Anthropic's clients
        return headers["x-api-key"]
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":  # what a browser asks for; any name, the key as the password
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return value.strip() if kind.lower() == "bearer" else ""


def deeper_than(body: bytes, most: int) -> bool:
    """Whether brackets outside of strings are nested more deeply."""
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    depth, text, at = 0, False, 0
    for found in re.finditer(rb'\\.|["\[\]{}]', body, re.DOTALL):
        at = body[found.start()]
        if at == 0x22:
            text = not text
        elif not text and at in b"[{":
            depth += 1
            if depth > most:
                return True
        elif not text and at in b"]}":
            depth -= 1
    return False
