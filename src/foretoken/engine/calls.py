"""Calls that share one engine: streams and whole answers, from one thread or several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from foretoken.engine.loop import Engine
from foretoken.engine.request import Emission, Request, Running
from foretoken.models.network.alone import lock_of


class Calls:
    """Calls to an engine that runs in its callers' threads.

    Every round serves all calls, and each call's output is queued until it is read. A stream may thus be read between
    the rounds of another call.

    Attributes:
        turn: lock for every use of the engine.
        others: takes the output of requests that belong to no call: those of a thread that serves the same engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: dict[int, deque[tuple[Running, Emission]]] = {}
        self.turn = lock_of(engine.target, "call")  # the target's: another engine of the same target shares its cache
        self.others: Callable[[Sequence[tuple[Running, Emission]]], None] | None = None
        self._limited_by: object | None = None
        self._own_limits: dict[str, Any] | None = None  # the engine's, while those of a service apply
        self._process = os.getpid()
        self._in_round = False

    def limit(self, service: object, **limits: Any) -> None:
        """Apply a service's limits to the engine, unless they apply already.

        A service does so when it is made and again when it starts: another one may have replaced them in between.
        """
        if self._limited_by is not service:
            own = self._own_limits or self._engine.limits
            self._engine.serve(**limits)
            self._limited_by, self._own_limits = service, own

    def release(self, service: object) -> bool:
        """Return to the engine's own limits if the service's apply: now, or as soon as no request runs. Returns whether
        they do."""
        if self._limited_by is not service:
            return False
        self._limited_by = None
        self._restore()
        return True

    def _restore(self) -> None:
        if self._limited_by is None and self._own_limits is not None and not self._engine.busy:
            self._engine.serve(**self._own_limits)
            self._own_limits = None

    def follow(self, request: Request) -> Iterator[tuple[Running, Emission]]:
        """Output of a request, round by round, until it ends or raises; closing the generator cancels it."""
        request_id = self._enter(request)
        try:
            while True:
                run, emission = self._next(request_id)
                if emission.error is not None:
                    raise emission.error
                yield run, emission
                if emission.finish_reason is not None:
                    return
        finally:
            self._exit(request_id)

    def finish(self, requests: Sequence[Request]) -> list[Running]:
        """Run requests together until all have ended, in their order. Raises the first error of one."""
        runs = self.end(requests)
        for run in runs:
            if run.error is not None:
                raise run.error
        return runs

    def end(self, requests: Sequence[Request]) -> list[Running]:
        """Run requests together until all have ended, by an error or not, in their order."""
        ids: list[int] = []
        finished: dict[int, Running] = {}
        try:
            ids.extend(self._enter(request) for request in requests)
            for request_id in ids:
                while request_id not in finished:
                    run, emission = self._next(request_id)
                    if emission.finish_reason is not None:
                        finished[request_id] = run
        finally:
            for request_id in ids:
                self._exit(request_id)
        return [finished[request_id] for request_id in ids]

    def _enter(self, request: Request) -> int:
        if os.getpid() != self._process and torch.get_num_threads() > 1:  # forked without PyTorch's threads: it hangs
            raise RuntimeError(
                "this Llm was loaded before the process was forked, and PyTorch's threads do not survive a fork: load "
                "it in each process, or call torch.set_num_threads(1) there"
            )
        with self.turn:
            self._restore()
            request_id = self._engine.add(request)
            self._boxes[request_id] = deque()
            return request_id

    def _exit(self, request_id: int) -> None:
        with self.turn:
            self._boxes.pop(request_id, None)
            self._engine.cancel(request_id)

    def _next(self, request_id: int) -> tuple[Running, Emission]:
        box = self._boxes[request_id]
        while not box:
            with self.turn:
                if not box:  # else another thread has served this request
                    if not self._engine.requests.holds(request_id):
                        raise RuntimeError("the request was dropped because its round was interrupted: submit it again")
                    self.round()
        return box.popleft()

    def round(self) -> None:
        """Run one round for all requests.

        Raises:
            RuntimeError: called inside a round, by a logits processor or another part of the caller's.
        """
        with self.turn:
            if self._in_round:  # of this thread, which has the lock
                raise RuntimeError(
                    "a logits processor (or another part of a request) called the Llm that was running it: give it an "
                    "Llm of its own"
                )
            self._in_round = True
            try:
                emitted = self._engine.step()
            finally:
                self._in_round = False
            others: list[tuple[Running, Emission]] = []
            for run, emission in emitted:
                box = self._boxes.get(run.id)
                (others if box is None else box).append((run, emission))
            if others and self.others is not None:
                self.others(others)
