"""Checks before the routes: request id, key, size and time limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.config import ServerSettings
from foretoken.server.errors import ApiError, Failed, answered, api_error, bad, is_anthropic, no_json
from foretoken.server.keys import Caller
from foretoken.server.memory import FREED
from foretoken.server.pages import PATHS as PAGE_PATHS
from foretoken.server.slots import AdmissionSlots

requests_log = logging.getLogger("foretoken.requests")
OPEN = ("/health", "/ready")
"""Routes that need no key and answer to any host name: probes of orchestrators have no key."""
WRITERS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""Routes that need a slot in the engine."""
LARGE = 64 * 1024
"""Bytes of a request or an answer from which freed memory is returned to the system."""
PIECE = 16 * 1024
"""Bytes of an answer that are written to a connection at once; the next ones wait until the client has taken these."""
BETWEEN = "between_events"
"""Key in a request's state: whether an event stream is between two events, so that a comment may follow."""
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
DEEPEST = 64
"""Maximum nesting depth of a JSON document."""
_STEP = np.zeros(256, dtype=np.int32)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


class Gate:
    """Entry point of every request: assigns an id, checks the key, and limits size and time of arrival.

    It adds to ``scope["state"]`` the ``request_id``, the ``slot``, the ``size`` of the body and the number of bytes
    ``sent``.

    Args:
        failed: called for every error answer of the gate.
        admit: raises an :class:`ApiError` while the caller has no room: a full server refuses before it parses the
            body, which would delay running requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        slots: AdmissionSlots,
        failed: Failed,
        admit: Callable[[Caller], None] | None = None,
    ) -> None:
        self.app, self.slots, self.failed, self.admit = app, slots, failed, admit
        self.max_body, self.body_timeout = settings.max_body, settings.body_timeout
        self.root = settings.root
        self.keys = settings.keys
        self.hosts = Hosts(settings.host, settings.allowed_host, len(self.keys) > 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.root:
            scope = {**scope, "root_path": self.root}
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"], state["sent"], state["begun"] = _id_of(headers), 0, False
        sender = self._sender(scope, send)
        slot = None
        try:
            try:
                slot = state["slot"] = self.slots.slot(self._caller(scope, headers), state.get("on_take"))
                received = await self._body(scope, headers, receive)
                if self.admit is not None and scope["method"] == "POST" and scope["path"].endswith(WRITERS):
                    self.admit(slot.caller)
            except ApiError as error:
                await answered(error, scope["path"], self.failed)(scope, receive, sender)
                return
            # The connection itself omits the body of an answer to HEAD, so the application sees a GET.
            request_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            try:
                await self.app(request_scope, received, sender)
            except Exception as error:
                if state["begun"]:
                    raise
                # Answered here, so that browsers of other origins can read the error and it carries the request id.
                await answered(api_error(error), scope["path"], self.failed)(scope, receive, sender)
        finally:
            if slot is not None:
                slot.close()
            if state.get("size", 0) >= LARGE or state["sent"] >= LARGE:
                FREED.large_one_ended()

    def _sender(self, scope: Scope, send: Send) -> Send:
        """A sender that adds our headers and writes in pieces: a client that does not read holds a piece, not the whole
        answer."""
        start_s, state, is_stream = time.monotonic(), scope["state"], False

        async def with_id(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                state["begun"] = True
                if _is_worth_a_line(scope, message["status"]):
                    log_request(scope, message["status"], start_s)
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = scope["state"]["request_id"]
                if is_anthropic(scope["path"]):  # its clients expect this name
                    headers["Request-Id"] = scope["state"]["request_id"]
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
            body = message.get("body", b"")
            state[BETWEEN], state["sent"] = False, state["sent"] + len(body)
            for at in range(0, max(0, len(body) - PIECE), PIECE):
                await send({"type": "http.response.body", "body": body[at : at + PIECE], "more_body": True})
            if len(body) > PIECE:
                last = (len(body) - 1) // PIECE * PIECE
                message = {**message, "body": body[last:]}
            await send(message)
            state[BETWEEN] = is_stream and body.endswith(b"\n\n")

        return with_id

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        """Caller of a request; a replica takes it from its gateway, and clients cannot set it.  Raises
        :class:`ApiError`: 421 for another server's name, 401 without a valid key."""
        earlier = scope["state"].get("caller")
        if isinstance(earlier, Caller):
            return earlier
        path = scope["path"].removeprefix(self.root)
        if path in OPEN:
            return Caller()
        self.hosts.check(headers.get("host", ""))
        caller = self.keys.caller(headers)
        if caller is None:
            page = path in PAGE_PATHS
            ask = {"WWW-Authenticate": 'Basic realm="foretoken"' if page else "Bearer"}
            raise ApiError(401, "give a valid key: Authorization: Bearer KEY", code="invalid_api_key", headers=ask)
        return caller

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body; the returned ``receive`` delivers it in one piece.  Raises :class:`ApiError` 413, 408,
        or as :func:`checked` does."""
        scope["state"]["size"] = 0
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_body:
            await self._discard(receive)
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self.body_timeout)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", headers={"Connection": "close"}) from None
        body = checked(body)
        scope["state"]["size"] = len(body)
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        return again

    async def _discard(self, receive: Receive) -> None:
        """Read up to twice the limit: a client that is still sending would see a reset instead of the answer."""
        size = 0
        with suppress(TimeoutError):
            # Time limit for the rest of an oversized body
            async with asyncio.timeout(1.0):
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
    """Whether an answer is logged here: generations write their own line, and probes come every second."""
    return status >= 400 and scope["path"] not in OPEN and not scope["state"].get("logged")


def log_request(scope: Scope, status: int, began_s: float, **fields: Any) -> None:
    """Write the log line of a request, at most once."""
    scope["state"]["logged"] = True
    entry = {
        "request_id": scope["state"].get("request_id", ""),
        "route": scope["path"][:256],
        "status": status,
        **fields,
        "seconds": round(time.monotonic() - began_s, 4),
    }
    requests_log.info("request", extra={"fields": entry})


def _id_of(headers: Headers) -> str:
    """The client's id if it is safe to log, else a new one."""
    request_id = headers.get("x-request-id", "")
    return request_id if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", request_id) else uuid.uuid4().hex


def checked(body: bytes) -> bytes:
    """The document as UTF-8, from any Unicode encoding.  Raises :class:`ApiError` 400 if it is nested too deeply or its
    bytes are no text."""
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise no_json(f"its bytes are not {encoding.upper()}") from None
    if deeper_than(body, DEEPEST):
        raise bad(f"the JSON document is nested more than {DEEPEST} levels deep", code="json_too_deep")
    return body


def deeper_than(body: bytes, most: int) -> bool:
    """Whether brackets outside of strings are nested deeper than ``most``, in UTF-8.

    NumPy arrays instead of a loop or a pattern: the worst two megabytes take some ten milliseconds, during which every
    other request waits.
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    codes = np.frombuffer(body, dtype=np.uint8)
    steps = _STEP[codes]
    brackets = np.flatnonzero(steps)
    outside = np.searchsorted(_quotes(codes), brackets) % 2 == 0
    depths = steps[brackets[outside]].cumsum()
    return len(depths) > 0 and int(depths.max()) > most


def _quotes(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions where strings begin and end: quotes with an even number of backslashes before them."""
    quotes = np.flatnonzero(codes == ord('"'))
    if not (codes == ord("\\")).any():
        return quotes
    indices = np.arange(len(codes), dtype=np.int32)
    others = np.maximum.accumulate(np.where(codes == ord("\\"), -1, indices))  # the last other character
    before = np.concatenate([np.array([-1], dtype=np.int32), others])[quotes]
    return quotes[(quotes - 1 - before) % 2 == 0]


def across_origins(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """The application, wrapped for web pages of other origins if some are allowed.

    The wrapper is outside of the :class:`Gate`: a browser's preflight request has no key, and pages must be able to
    read refusals.
    """
    if not settings.allowed_origin:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.allowed_origin,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # for pages on the internet that use a server on this machine or in its network
        expose_headers=("X-Request-Id", "Request-Id", "X-Ignored-Fields", "X-Replica", "Retry-After"),
    )


class Hosts:
    """Names allowed in the ``Host`` header.

    Args:
        bound: address that the server listens on.
        allowed: more names; ``*`` allows all.
        keyed: whether every request needs a key.  A stranger's page has none, so all names are allowed unless
            ``allowed`` lists some.
    """

    def __init__(self, bound: str, allowed: Sequence[str], keyed: bool) -> None:
        self._bound = bound
        self._names = {"localhost", bound.lower(), *(name.lower() for name in allowed)}
        self._any = "*" in allowed or (keyed and not allowed)

    def check(self, header: str) -> None:
        """Raise :class:`ApiError` 421 for a name that is not this server's; a client without ``Host`` is no browser."""
        name = _name_of(header)
        if self._any or not header or name in self._names or self._is_own_address(name):
            return
        raise ApiError(
            421,
            f"the host {name[:64]!r} is not allowed: start the server with --allowed-host {name[:64]}, or use the "
            "address that it listens on",
            code="unknown_host",
        )

    def _is_own_address(self, name: str) -> bool:
        """Whether an address is this server's, not another server's name.  If the server listens on all addresses, any
        may be."""
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._bound in ("0.0.0.0", "::")


def _name_of(header: str) -> str:
    """Host name without the port and the brackets of an IPv6 address."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")
