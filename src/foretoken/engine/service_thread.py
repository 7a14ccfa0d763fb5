"""The thread of a service, which lives as long as the service is referenced."""

from __future__ import annotations

import logging
from threading import Event, Thread
from typing import TYPE_CHECKING
from weakref import ref

from foretoken.engine.errors import place_of

if TYPE_CHECKING:
    from foretoken.engine.background import AsyncLlm


log = logging.getLogger("foretoken.engine")
END_S = 10.0
"""Seconds in which the thread must end."""


class EngineThread(Thread):
    """The thread of a service.

    Attributes:
        stuck: why it did not end; empty before.
    """

    stuck = ""

    def end(self) -> str:
        """Wait for the end, once. A thread that does not end is logged; returns why, and where it is, else nothing."""
        if not self.stuck:
            self.join(END_S)
            if self.is_alive():
                self.stuck = f"the engine did not stop: it is in {place_of(self)}"
                log.error(self.stuck)
        return self.stuck


def start_thread(service: AsyncLlm, wake: Event, idle_s: float) -> EngineThread:
    """Serve in a thread whenever ``wake`` is set, and every ``idle_s`` seconds.

    While it waits, the thread holds no reference to the service. An abandoned service, for example in a notebook, is
    garbage-collected with its model, and the thread ends.
    """
    thread = EngineThread(target=_serve, args=(ref(service), wake, idle_s), name="foretoken-engine", daemon=True)
    thread.start()
    return thread


def _serve(service: ref[AsyncLlm], wake: Event, idle_s: float) -> None:
    while (owner := service()) is not None and owner.serve_waiting():
        del owner
        wake.wait(idle_s)
        wake.clear()
