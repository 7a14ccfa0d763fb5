"""The thread of a service, which lives as long as the service is referenced."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from foretoken.engine.background import AsyncLlm


def start_thread(service: AsyncLlm, wake: Event, idle_s: float) -> Thread:
    """Serve in a thread whenever ``wake`` is set, and every ``idle_s`` seconds.

    While it waits, the thread holds no reference to the service. An abandoned service, for example in a notebook, is
    garbage-collected with its model, and the thread ends.
    """
    thread = Thread(target=_serve, args=(ref(service), wake, idle_s), name="foretoken-engine", daemon=True)
    thread.start()
    return thread


def _serve(service: ref[AsyncLlm], wake: Event, idle_s: float) -> None:
    while (owner := service()) is not None and owner.serve_waiting():
        del owner
        wake.wait(idle_s)
        wake.clear()
