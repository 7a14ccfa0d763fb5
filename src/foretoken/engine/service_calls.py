"""Functions of a service's callers that run in the engine's thread: what they raise does not end the engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from foretoken.engine.errors import EngineDead, contained

if TYPE_CHECKING:
    from foretoken.llm import Llm

log = logging.getLogger("foretoken.engine")


class ServiceCalls:
    """Functions of the :class:`Llm` that wait for the time between two rounds."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[Llm], Any], Future[Any]]] = deque()

    def add(self, function: Callable[[Llm], Any]) -> Future[Any]:
        """Queue a function; returns the future of its result."""
        future: Future[Any] = Future()
        self._waiting.append((function, future))
        return future

    def run(self, llm: Llm, turn: AbstractContextManager[Any]) -> None:
        """Run those that wait now. An interrupt of one ends the engine, which then fails the others."""
        for _ in range(len(self._waiting)):
            function, future = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # the caller is gone
            try:
                with turn:
                    result = function(llm)
            except KeyboardInterrupt:
                future.set_exception(EngineDead("the engine has stopped: the function was interrupted"))
                raise
            except BaseException as error:  # the caller's error
                future.set_exception(contained(error))
            else:
                future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Tell all that wait that they will not run."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def tell_end(on_end: Callable[..., None] | None, *what: Any) -> None:
    """Call a service's ``on_end``. What it raises is logged: the request has ended, and nothing else needs it."""
    if on_end is None:
        return
    try:
        on_end(*what)
    except BaseException as error:
        log.warning("on_end failed at the end of a request: %s", error, exc_info=contained(error))
