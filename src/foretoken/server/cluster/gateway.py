"""Gateway of many replicas: one address and one format of errors.

It checks keys and sizes, determines the session, and passes a request to a replica.  If that is lost before the client
has received anything, the request goes to another one.  An interrupted stream ends with an error event and without
``[DONE]``, so that no client takes a part for the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.cluster.fleet_metrics import FleetMetrics
from foretoken.server.cluster.replica import SPENT, TAKEN
from foretoken.server.cluster.routing import asked_of, choices_of, session_of
from foretoken.server.config import ServerSettings
from foretoken.server.errors import ApiError, answered, api_error, shutting_down, still_loading
from foretoken.server.keys import Caller
from foretoken.server.limits import WRITERS, Gate, across_origins
from foretoken.server.running import ClientGone, while_connected
from foretoken.server.slots import AdmissionSlots, RequestSlot, slot_of
from foretoken.server.sse import Dialect, dialect_of, event

CARRIED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
"""Fields of a scope that are passed on."""
LOST = ApiError(503, "the replica of this request is gone: the answer is incomplete", code="replica_lost")
"""Error at the end of a stream that a replica has left."""


class ReplicaLost(Exception):
    """The replica that served a request is gone."""


class Replicas(Protocol):
    """The replicas behind a gateway."""

    @property
    def num_ready(self) -> int:
        """Number of replicas that can serve."""

    @property
    def num_wanted(self) -> int:
        """Configured number of replicas."""

    async def start(self) -> None:
        """Start the replicas; returns when all can serve.  Raises ``ValueError`` if they cannot be started."""

    def answer(self, scope: dict[str, Any], body: bytes, session: str, caller: Caller) -> AsyncIterator[list[Message]]:
        """Messages of an answer, from the replica that suits the session, which reuses the caller's texts for that
        caller only. Raises ``ReplicaLost`` if the replica dies meanwhile."""

    async def metrics(self) -> Mapping[str, str]:
        """Counters of each replica, by name."""

    async def is_chat(self) -> bool:
        """Whether the model comes with a chat template."""

    async def stop(self) -> None:
        """End the replicas."""

    def abandon(self) -> None:
        """End at once what :meth:`start` has begun; the process ends afterwards."""


class Fleet:
    """A gateway's state, with the interface of :class:`foretoken.server.serving.Serving`, so that one loop watches
    both.

    Attributes:
        failed: error that prevented the start.
        draining: whether new requests are refused.
        stopped: whether open requests are ended, too.
        is_chat: whether the model comes with a chat template.
        end_s: seconds within which the replicas and Ray must have ended.
        num_open: requests that have not ended.
        num_admitted: their choices that replicas have admitted, whose answers clients have not read to the end.
        num_undecided: those that no replica has admitted or refused yet.
    """

    end_s = 60.0

    def __init__(self, settings: ServerSettings, replicas: Replicas) -> None:
        self.settings, self.replicas = settings, replicas
        self.failed: Exception | None = None
        self.draining = self.stopped = self.is_loaded = self.is_chat = False
        self.num_open = self.num_admitted = self.num_undecided = 0
        self._limits: set[asyncio.Timeout] = set()
        self.metrics = FleetMetrics(settings.name, settings.metrics_compat)
        self.slots = AdmissionSlots(None)  # each replica has its own limit; limits of keys hold here, across replicas

    async def start(self) -> None:
        try:
            await self.replicas.start()
            self.is_chat = await self.replicas.is_chat()
            self.is_loaded = True
        except Exception as error:  # reported by the loop that watches the server
            self.failed = error

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, and end those with an error that are open after ``drain_s``."""
        self.drain()
        await asyncio.sleep(drain_s)
        self.stopped = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    @asynccontextmanager
    async def limited(self, end: float) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` inside the block at ``end`` by the event loop's clock, or when the fleet stops."""
        async with asyncio.timeout_at(0.0 if self.stopped else end) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)

    def abandon(self) -> None:
        """End replicas that are still being started."""
        self.replicas.abandon()

    @property
    def trouble(self) -> str | None:
        """Error that prevents serving, if any."""
        return None if self.failed is None else str(self.failed)

    @property
    def capacity(self) -> int:
        """Number of choices that all replicas together run and queue."""
        each = self.settings.max_running + self.settings.max_queued
        return each * max(1, self.replicas.num_ready)

    def check(self) -> None:
        """Raise ``ApiError`` 503, with the seconds until a retry, if no request can be taken."""
        if self.draining:
            raise shutting_down()
        if self.failed is not None:
            raise ApiError(503, "the replicas could not be started", code="engine_dead", headers={"Retry-After": "30"})
        if not self.is_loaded:
            raise still_loading()

    def check_room(self) -> None:
        """Raise ``ApiError`` 503 if the replicas can admit no choice.

        Requests that are undecided may all be refused, so they take no room from the others; but there may not be more
        of them than the replicas could take.
        """
        if max(self.num_admitted, self.num_undecided) >= self.capacity:
            raise ApiError(503, "all replicas are busy; try again", code="queue_full", headers={"Retry-After": "1"})

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count refusals inside the block."""
        try:
            yield
        except ApiError as error:
            self.metrics.rejected(error.reason)
            error.counted = True
            raise


class Admission:
    """A request's part in the counts of a fleet: undecided, then with its admitted choices; nothing once refused.

    Args:
        writes: whether the request needs room in a replica; else it never counts.
    """

    def __init__(self, fleet: Fleet, slot: RequestSlot, writes: bool) -> None:
        self.slot, self._fleet, self._writes = slot, fleet, writes
        self._is_undecided, self._choices, self._spent = False, 0, 0

    def wait(self) -> None:
        """No replica has decided yet, or the one that had is lost, and what it has spent was in vain."""
        self.end()
        self.slot.spend(-self._spent)
        self._spent = 0
        self._is_undecided = self._writes
        self._fleet.num_undecided += self._is_undecided

    def takes(self, message: Message) -> bool:
        """Whether a message is a replica's report, which is noted here, and no part of its answer."""
        if message["type"] == SPENT:
            self.slot.spend(message["tokens"])
            self._spent += message["tokens"]
            return True
        is_report = message["type"] == TAKEN
        self._decide(message["choices"] if is_report else 0)  # an answer without admitted choices is a refusal
        return is_report

    def end(self) -> None:
        """The answer was read to the end, or is lost."""
        self._decide(-self._choices)

    def _decide(self, choices: int) -> None:
        self._fleet.num_undecided -= self._is_undecided
        self._fleet.num_admitted += choices
        self._is_undecided, self._choices = False, self._choices + choices


class Gateway:
    """The ASGI application in front of replicas.

    Attributes:
        pause_s: seconds before the first retry; doubled each time, up to two seconds.
        grace_s: seconds beyond its own time limit after which a replica counts as hung.
    """

    pause_s, grace_s = 0.2, 10.0

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._loading: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or start and stop with the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            await self._route(scope, receive, send)
        except OSError:
            raise  # the answer has begun: only a broken connection shows that it is incomplete
        except Exception as error:
            await answered(api_error(error), scope["path"], self.fleet.metrics.failed)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loading = asyncio.create_task(self.fleet.start())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if not self._loading.done():
            self._loading.cancel()
        await self.fleet.replicas.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        routes = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}
        path = scope["path"].removeprefix(self.fleet.settings.root)
        if path in routes and scope["method"] in ("GET", "HEAD"):
            await (await routes[path]())(scope, receive, send)
            return
        writes = scope["method"] == "POST" and path.endswith(WRITERS)
        with self.fleet.refusals() if writes else nullcontext():
            self.fleet.check()
            if writes:
                self.fleet.check_room()
        self.fleet.num_open += 1
        try:
            await self._forward({**scope, "path": path}, receive, send, writes)
        finally:
            self.fleet.num_open -= 1

    async def _health(self) -> Response:
        """Liveness of this process; replicas that die are replaced."""
        if self.fleet.failed is not None:
            raise ApiError(503, f"the replicas could not be started: {self.fleet.failed}", code="unhealthy")
        return JSONResponse({"status": "ok", "replicas": self._counts()})

    async def _ready(self) -> Response:
        """Readiness: one replica is enough."""
        fleet = self.fleet
        if fleet.draining or fleet.failed is not None or not fleet.is_loaded:
            fleet.check()
        if not fleet.replicas.num_ready:
            raise ApiError(503, "no replica is ready", code="loading", headers={"Retry-After": "5"})
        return JSONResponse({"status": "ready", "model": fleet.settings.name, "replicas": self._counts()})

    def _counts(self) -> dict[str, int]:
        return {"ready": self.fleet.replicas.num_ready, "wanted": self.fleet.replicas.num_wanted}

    async def _metrics(self) -> Response:
        replicas = self.fleet.replicas
        counters = await replicas.metrics() if self.fleet.is_loaded else {}
        text = self.fleet.metrics.text(counters, replicas.num_ready, self.fleet.num_open)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, scope: Scope, receive: Receive, send: Send, writes: bool) -> None:
        body = await _body(receive)
        slot, fields = slot_of(scope), asked_of(body)
        if writes:
            with self.fleet.refusals():
                slot.take(choices_of(scope["path"], fields))
        inner_scope = {**{name: scope[name] for name in CARRIED if name in scope}, "root_path": ""}
        request_id = scope.get("state", {}).get("request_id", "")
        dropped = (b"authorization", b"x-api-key", b"x-request-id")  # the gateway checks keys and sets ids
        headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
        inner_scope["headers"] = [*headers, (b"x-request-id", request_id.encode())]
        session = session_of(Headers(scope=scope), fields, slot.caller.tenant)
        admission = Admission(self.fleet, slot, writes)
        try:
            with suppress(ClientGone):
                await while_connected(receive, self._answer(inner_scope, body, session, admission, send))
        finally:
            admission.end()

    async def _answer(self, scope: dict[str, Any], body: bytes, session: str, admission: Admission, send: Send) -> None:
        """Send the answer of a replica, or of another one if it is lost before anything was sent.  Raises
        :class:`ApiError`: 503 if every replica tried is gone or the gateway stops, 504 when the time is up."""
        sent = _Sent(send, dialect_of(scope["path"]))
        # A replica enforces the time limit itself; this is for one that hangs.
        end = asyncio.get_running_loop().time() + self.fleet.settings.request_timeout + self.grace_s
        admission.wait()
        # Replicas that a request may lose before it is given up
        for attempt in range(8):
            try:
                async with self.fleet.limited(end):
                    answer = self.fleet.replicas.answer(scope, body, session, admission.slot.caller)
                    async with aclosing(answer) as pieces:  # type: ignore[type-var]
                        async for message in (part async for piece in pieces for part in piece):
                            if not admission.takes(message):
                                await sent(message)
            except ReplicaLost:
                if sent.begun:
                    self.fleet.metrics.broken += 1
                    await sent.break_off(LOST)
                    return
            except TimeoutError:
                if not sent.begun:
                    late = ApiError(504, "the request exceeded its time limit", code="deadline_exceeded")
                    raise (shutting_down() if self.fleet.stopped else late) from None
                await sent.break_off(shutting_down() if self.fleet.stopped else LOST)
                return
            except OSError:
                raise  # the client's connection
            except Exception as error:
                if not sent.begun:
                    raise
                await sent.break_off(api_error(error))
                return
            else:
                if sent.ended:
                    return
                if sent.begun:
                    await sent.break_off(LOST)
                    return
            admission.wait()
            self.fleet.metrics.retried += 1
            await asyncio.sleep(min(2.0, self.pause_s * 2**attempt))
        raise ApiError(
            503, "the replica of this request is gone; try again", code="replica_lost", headers={"Retry-After": "5"}
        )


class _Sent:
    """Progress of an answer that is sent to a client."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send, self._dialect = send, dialect
        self._start: Message | None = None
        self.begun = self.ended = False

    async def __call__(self, message: Message) -> None:
        # The head of an answer waits for its first byte: until then another replica can take the request.
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None and not self.begun:
            self.begun = True
            await self._send(self._start)
        await self._send(message)
        self.ended = not message.get("more_body", False)

    async def break_off(self, error: ApiError) -> None:
        """End a stream with an error event.  Raises ``ConnectionError`` for other answers: only a broken connection
        shows that something is missing."""
        names = dict(self._start["headers"]) if self._start is not None else {}
        if not names.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise ConnectionError("an answer was interrupted")
        frame = event(self._dialect.error(error), named=self._dialect.named)
        await self._send({"type": "http.response.body", "body": frame, "more_body": False})
        self.ended = True


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts)


def create_gateway(fleet: Fleet) -> ASGIApp:
    """The application; ids, keys, sizes and times are checked as on one machine."""
    gate = Gate(Gateway(fleet), fleet.settings, fleet.slots, fleet.metrics.failed)
    return across_origins(gate, fleet.settings)
