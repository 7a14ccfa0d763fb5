"""The engine in a separate thread, fed by a queue: for servers, and for programs that use asyncio.

Callers never touch a tensor. Requests enter through :meth:`AsyncLlm.submit`, tickets deliver output, and cancellation
takes effect between two rounds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

from foretoken.core.values import check_counts, check_flags, named, with_article
from foretoken.engine.errors import Draining, EngineClosed, EngineDead, QueueFull, RequestFailed, TargetGone, failure_of
from foretoken.engine.output import Output, Piece, Pieces, output_of
from foretoken.engine.request import Emission, Request, Running
from foretoken.engine.service_calls import ServiceCalls, tell_end
from foretoken.engine.service_thread import EngineThread, start_thread
from foretoken.engine.stats import SpecStats
from foretoken.engine.status import EngineStatus as EngineStatus
from foretoken.engine.status import status_of
from foretoken.engine.stopping import FinishReason
from foretoken.engine.tickets import Ticket as Ticket
from foretoken.engine.tickets import hand_over

if TYPE_CHECKING:
    from foretoken.llm import Llm
    from foretoken.options import Options, Prompt

T = TypeVar("T")
OnEnd = Callable[[Request, float, SpecStats, FinishReason | None], None]

IDLE_S = 0.2
"""Heartbeat interval of an idle engine, and age limit of the controller's report."""


class AsyncLlm:
    """An :class:`~foretoken.llm.Llm` that serves concurrent requests.

    Args:
        llm: the served model. Other threads may call its methods meanwhile; every round serves all requests.
        max_running: most requests in the batch.
        max_queued: most waiting requests in addition; more are refused.
        kv_memory: bytes of keys and values for running and cached sequences; ``None`` for no limit.
        prefill_chunk: prompt tokens that are processed between two rounds.
        prefill_s: time limit of this while others run or wait (at least the time of a round); ``None`` for no limit.
        kept_places: part of ``max_running`` reserved for owners without a running request.
        prefix_cache: cache finished sequences for requests with the same prefix (and the same ``cache_salt``).
        prefix_bytes: largest size of this cache.
        on_end: called with the request, its arrival time, its statistics, and its finish reason, ``None`` after
            cancellation: for every request that ends in the engine, from the service's making to its close, those of
            the Llm's own calls included (in the thread that runs their round), and for one that is cancelled before it
            enters.  What it raises is logged.
    """

    def __init__(
        self,
        llm: Llm,
        *,
        max_running: int = 32,
        max_queued: int = 256,
        kv_memory: int | None = None,
        prefill_chunk: int = 256,
        prefill_s: float | None = None,
        kept_places: int = 0,
        prefix_cache: bool = True,
        prefix_bytes: int = 2**28,
        on_end: OnEnd | None = None,
    ) -> None:
        if not hasattr(llm, "calls"):
            raise TypeError(f"an AsyncLlm needs an Llm from foretoken.load, not {with_article(type(llm).__name__)}")
        if on_end is not None and not callable(on_end):
            raise TypeError(f"on_end must be a function, not {with_article(type(on_end).__name__)}")
        check_flags(prefix_cache=prefix_cache)
        check_counts({"max_running": max_running, "prefill_chunk": prefill_chunk, "kv_memory": kv_memory or 1}, 1)
        check_counts({"max_queued": max_queued, "kept_places": kept_places, "prefix_bytes": prefix_bytes}, 0)
        if kept_places >= max_running:  # of one owner's requests, only one would run at a time
            raise ValueError(f"kept_places must be less than max_running={max_running}, not {kept_places}")
        self.llm, self.max_running, self.max_queued = llm, max_running, max_queued
        cache_bytes = min(prefix_bytes, kv_memory or prefix_bytes) if prefix_cache else 0
        self._turn = llm.calls.turn  # acquired before ``_lock`` if both are held
        self._on_end = on_end
        self._limits = {
            "max_batch": max_running,
            "kv_memory": kv_memory,
            "prefill_chunk": prefill_chunk,
            "prefix_bytes": cache_bytes,
            "prefill_s": prefill_s,
            "kept_places": kept_places,
        }
        with self._turn:
            if llm.calls.others is None:  # a serving one keeps its limits
                self._take_over()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._new: dict[Ticket, None] = {}  # in order
        self._calls = ServiceCalls()
        self._cancelled: dict[Ticket, None] = {}
        self._tickets: dict[int, Ticket] = {}
        self._thread: EngineThread | None = None
        self._stopping = self._draining = False
        self._dead: str | None = None
        self._report: dict[str, Any] = {}
        self._beat, self._reported, self._mishaps = monotonic(), 0.0, 0
        llm.memory()  # a model measures the cost of a token once, by running: do it before the thread starts

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncLlm cannot be copied or pickled: load an Llm in each process and make one from it")

    def _take_over(self) -> None:
        self.llm.calls.limit(self, **self._limits)
        on_end = self._on_end
        self.llm.engine.requests.on_leave = on_end and (
            lambda run: tell_end(on_end, run.request, run.arrived_s, run.stats, run.finish_reason)
        )

    def _give_back(self) -> None:
        """Leave the Llm as it was before, unless another service has taken it over."""
        if self.llm.calls.release(self):
            self.llm.engine.requests.on_leave = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine's thread.

        Raises:
            ValueError, EngineClosed: another AsyncLlm serves the same :class:`Llm`; this one was closed.
        """
        if self._stopping:
            raise EngineClosed("this AsyncLlm is closed: make a new one from the same Llm")
        if self._thread is None:
            with self._turn:
                if self.llm.calls.others is not None:
                    raise ValueError("another AsyncLlm serves this Llm: use that one, or close it first")
                self._take_over()
                self.llm.calls.others = self._take_gains
            self._beat = monotonic()
            self._thread = start_thread(self, self._wake, IDLE_S)

    def drain(self) -> None:
        """Refuse new requests; present ones are finished."""
        self._draining = True

    async def close(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, wait for others, cancel them after ``drain_s``, and end the thread, or log its place."""
        self.drain()
        end = monotonic() + drain_s
        while self.num_open and monotonic() < end and self._dead is None:
            await asyncio.sleep(0.01)
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            with self._turn:
                self._give_back()
        elif stuck := await asyncio.to_thread(self._thread.end):
            self._dead = stuck
            hand_over([(ticket, EngineDead(stuck)) for ticket in (*self._new, *self._tickets.values())])

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        with self._lock:
            return len(self._new) + len(self._tickets)

    @property
    def status(self) -> EngineStatus:
        """Current state of the engine."""
        age_s = monotonic() - self._beat
        return status_of(self.llm.engine, self.num_open, age_s, self._dead, self._draining, self._report)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, checked: bool = False, arrived_s: float | None = None) -> Ticket:
        """Queue a request, from any thread.

        Args:
            checked: whether ``engine.check`` has accepted it already; for an event loop, which must not wait for that.
            arrived_s: its arrival by the monotonic clock, from which its times and deadline count; now by default.

        Raises:
            QueueFull: the queue is full.
            Draining: the server is shutting down.
            EngineDead: no engine is running.
            ValueError: the request is invalid.
        """
        if not checked and self._dead is None and not self._draining:
            self.llm.engine.check(request)
        ticket = Ticket(request, self, arrived_s)
        with self._lock:
            self._check_room(1)
            self._new[ticket] = None
        self._wake.set()
        return ticket

    def check_room(self, count: int = 1) -> None:
        """Raise the ``QueueFull``, ``Draining`` or ``EngineDead`` that :meth:`submit` would raise now."""
        with self._lock:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        self._check_life()
        if self._draining or self._stopping:
            raise Draining("the server is shutting down")
        most = self.max_running + self.max_queued
        leaving = sum(ticket in self._new or ticket.id in self._tickets for ticket in self._cancelled)
        # In one round no more may come and go than could stay
        if len(self._new) + len(self._tickets) - min(leaving, most) + count > most:
            raise QueueFull(f"{self.max_running} requests are running and {self.max_queued} are waiting already", 1.0)

    def _check_life(self) -> None:
        """Called under the lock, so that nothing is queued after the engine's last check."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._thread is None:
            raise EngineDead("this AsyncLlm is not running: await its start() first")
        if not self._thread.is_alive():
            raise EngineDead("its thread does not survive a fork: load the model in each process")

    def cancel(self, ticket: Ticket) -> None:
        """End a request before the next round; its place is free at once."""
        with self._lock:
            self._cancelled[ticket] = None
        self._wake.set()

    async def run(self, request: Request) -> Output:
        """The output of a request.

        Raises:
            RequestFailed: it ended with an error.
            DeadlineExceeded: its deadline passed before its first token.
            EngineDead: the engine has stopped.
        """
        ticket = self.submit(request)
        try:
            while True:
                run, emission = await ticket.next()
                if emission.finish_reason is not None:
                    return output_of(run, self.llm.tokenizer)
        finally:
            self.cancel(ticket)

    async def pieces(self, request: Request) -> AsyncGenerator[Piece, None]:
        """The output of a request, round by round; closing the generator cancels it."""
        async with aclosing(self.follow(self.submit(request))) as pieces:
            async for piece in pieces:
                yield piece

    async def follow(self, ticket: Ticket) -> AsyncGenerator[Piece, None]:
        """:meth:`pieces` of a queued request."""
        pieces = Pieces(self.llm.tokenizer)
        try:
            while True:
                run, emission = await ticket.next()
                yield pieces.push(run, emission)
                if emission.finish_reason is not None:
                    return
        finally:
            self.cancel(ticket)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Output:
        """Generate for one prompt; see :class:`foretoken.options.Options`."""
        return await self.run(self.llm.request(prompt, **options))

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """Generate for one prompt, a piece per round."""
        async with aclosing(self.pieces(self.llm.request(prompt, **options))) as pieces:
            async for piece in pieces:
                yield piece

    async def call(self, function: Callable[[Llm], T]) -> T:
        """Run a function of the :class:`Llm` between two rounds in the engine's thread, and return its result.

        Raises:
            EngineDead: no engine is running.
        """
        with self._lock:
            self._check_life()
            future: Future[T] = self._calls.add(function)
        self._wake.set()
        return await asyncio.wrap_future(future)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def serve_waiting(self) -> bool:
        """Run rounds while there is work. Returns false after closing."""
        try:
            while not self._stopping:
                self._show_life()
                self._take_in()
                self._check_target()
                self._fail_lost(
                    RuntimeError("the request was dropped because its round was interrupted: submit it again")
                )
                if not self.llm.engine.busy:
                    return True
                try:
                    self.llm.calls.round()
                    self._check_target()
                    self._mishaps = 0
                except TargetGone:
                    raise
                except Exception as error:
                    self._mishaps += 1
                    if self._mishaps == 3:  # in a row: the engine gives up
                        raise
                    self._fail_lost(error)
            self._finish("the engine was closed", EngineClosed)
        except TargetGone as error:
            self._finish(f"the engine has stopped: {error}")
        except BaseException as error:
            self._finish(f"the engine has stopped: {named(error)}")
            raise
        return False

    def _show_life(self) -> None:
        """Update the heartbeat and, from time to time, the controller's report, which no other thread may read while it
        learns."""
        self._beat = monotonic()
        controller = self.llm.engine.controller
        if controller is not None and self._beat - self._reported > IDLE_S:
            with self._turn:
                self._report, self._reported = self.llm.engine.requests.report_of(controller), self._beat

    def _check_target(self) -> None:
        """End the engine if its target is lost, because no request can be served."""
        trouble = self.llm.engine.target.trouble
        if trouble is not None:
            raise TargetGone(trouble)

    def _take_in(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, {}
            early = [ticket for ticket in cancelled if self._new.pop(ticket, ticket) is None]
            gone = self._tickets.keys() & {ticket.id for ticket in cancelled}
            for key in gone:
                del self._tickets[key]
            new = list(self._new)
        for ticket in early:
            tell_end(self._on_end, ticket.request, ticket.arrived_s, SpecStats(), None)
        for ticket in new:
            self._enter(ticket)
        for key in gone:
            with self._turn:
                self.llm.engine.cancel(key)
        self._calls.run(self.llm, self._turn)

    def _enter(self, ticket: Ticket) -> None:
        """Add a request, which was checked when it was submitted. Not under the lock: the event loop must not wait."""
        failed = None
        with self._turn:  # until the ticket is registered for delivery
            try:
                ticket.id = self.llm.engine.add(ticket.request, arrived_s=ticket.arrived_s, checked=True)
            except Exception as error:  # of this request alone
                failed = RequestFailed(str(error), "error")
            with self._lock:
                del self._new[ticket]
                if ticket.id is not None:
                    self._tickets[ticket.id] = ticket
        if failed is not None:
            ticket.put(failed)

    def _take_gains(self, emissions: Sequence[tuple[Running, Emission]]) -> None:
        """Deliver a round's output, run by the engine's thread or by a direct caller of the Llm, to the tickets."""
        if self.llm.engine.target.trouble is not None:
            return  # the engine's thread ends and reports this to all
        with self._lock:
            gains = [(self._tickets[run.id], (run, emission)) for run, emission in emissions if run.id in self._tickets]
            for run, emission in emissions:
                if emission.finish_reason is not None:
                    self._tickets.pop(run.id, None)
        hand_over(gains)

    def _fail_lost(self, error: Exception) -> None:
        with self._turn, self._lock:
            lost = self._tickets.keys() - self.llm.engine.requests.ids
            tickets = [self._tickets.pop(key) for key in lost]
        for ticket in tickets:
            ticket.put(failure_of(error))

    def _finish(self, reason: str, kind: type[EngineDead] = EngineDead) -> None:
        with self._lock:
            self._dead = reason
            open_ = [*self._new, *self._tickets.values()]
            self._new, self._tickets = {}, {}
        for ticket in open_:
            ticket.put(kind(reason))
        self._calls.fail(kind(reason))
        with self._turn:
            self.llm.calls.others = None
            for ticket in open_:
                if ticket.id is not None:
                    self.llm.engine.cancel(ticket.id)
            if kind is not EngineClosed:  # no one else continues these sequences
                self.llm.engine.close()
            self._give_back()
