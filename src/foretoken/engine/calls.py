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
    """What callers ask of an engine that runs in their own threads.

    A stream may be read between the rounds of another call: every round serves all of them, so what each gained waits
    in a box of its own until it is asked for.

    Attributes:
        turn: held by whoever touches the engine.
        others: takes what requests gain that are nobody's call: those of a thread that serves the same engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: dict[int, deque[tuple[Running, Emission]]] = {}
        self.turn = lock_of(engine.target, "call")  # the target's: another engine of the same one shares its cache
        self.others: Callable[[Sequence[tuple[Running, Emission]]], None] | None = None
        self._limited_by: object | None = None
        self._process = os.getpid()

    def limit(self, service: object, **limits: Any) -> None:
        """Let the engine run within a service's limits, where it does not run within them already."""
        if self._limited_by is not service:
            self._engine.serve(**limits)
            self._limited_by = service

    def follow(self, request: Request) -> Iterator[tuple[Running, Emission]]:
        """What a request gains, round by round, until it ends or raises; who stops listening cancels it."""
        request_id = self._enter(request)
        try:
            while True:
                run, emission = self._next(request_id)
                yield run, emission
                if emission.finish_reason is not None:
                    return
        finally:
            self._exit(request_id)

    def finish(self, requests: Sequence[Request]) -> list[Running]:
        """Requests that run together, when all of them have ended, in their order; where one fails the others are
        cancelled."""
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
        if os.getpid() != self._process and torch.get_num_threads() > 1:  # PyTorch's threads are not forked: it waits
            raise RuntimeError(
                "this Llm was made before its process was forked, and PyTorch's threads stayed behind: load it in each "
                "process, or call torch.set_num_threads(1) there"
            )
        with self.turn:
            request_id = self._engine.add(request)
            self._boxes[request_id] = deque()
            return request_id

    def _exit(self, request_id: int) -> None:
        with self.turn:
            self._boxes.pop(request_id, None)
            self._engine.cancel(request_id)

    def _next(self, request_id: int) -> tuple[Running, Emission]:
        """What a request gained in its next round."""
        box = self._boxes[request_id]
        while not box:
            with self.turn:
                if not box:  # else another thread has served this request meanwhile
                    if not self._engine.holds(request_id):
                        raise RuntimeError("the request was dropped when a round was broken off: ask again")
                    self.round()
        run, emission = box.popleft()
        if emission.error is not None:
            raise emission.error
        return run, emission

    def round(self) -> None:
        """One round for everybody."""
        with self.turn:
            others: list[tuple[Running, Emission]] = []
            for run, emission in self._engine.step():
                box = self._boxes.get(run.id)
                (others if box is None else box).append((run, emission))
            if others and self.others is not None:
                self.others(others)
