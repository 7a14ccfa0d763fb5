"""Memory that large requests have freed goes back to the system.

The C library keeps what is freed, in an arena for each thread, for the next one who asks: six texts of 1.9 MB that
three threads have tokenised leave 600 MB behind, and 120 prompts of 4,500 tokens on SmolLM2, eight at a time, 1.4 GB.
glibc gives the pages back when it is told to.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
import threading
from collections.abc import Callable

ARENA_MAX = -8
"""glibc's M_ARENA_MAX in ``mallopt``."""
AFTER_S = 1.0
"""Seconds from the end of something large until memory is given back: once for all that end meanwhile."""


def trim() -> None:
    """Give back what is free; takes .1 s for 600 MB, and nothing where the C library has no such call."""
    call = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if call is not None:
        call(0)


def share_arenas() -> bool:
    """Let all threads of this process share two arenas; false where the C library has no such setting.

    By default every new thread gets one, up to eight for each core, and each keeps the most that its threads ever
    held at once: in a soak of twenty minutes a server grew by 39 MB in steps of 8 to 12, with two by 5.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and mallopt(ARENA_MAX, 2) == 1


class FreedMemory:
    """Gives memory back, in a thread of its own, ``after_s`` seconds after something large has ended, for all that has
    ended by then."""

    def __init__(self, after_s: float = AFTER_S, give_back: Callable[[], None] = trim) -> None:
        self._after_s, self._give_back = after_s, give_back
        self._lock = threading.Lock()
        self._is_due = False

    def large_one_ended(self) -> None:
        """Something large has ended; from any thread."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(self._after_s, self._return_freed)
        timer.daemon = True
        timer.start()

    def _return_freed(self) -> None:
        with self._lock:
            self._is_due = False  # what ends from here on is given back the next time
        self._give_back()


FREED = FreedMemory()
"""That of this process."""
TEXTS = FreedMemory(5.0)
"""For long texts that have ended: under a steady load of them it is done every five seconds."""
LARGE_TEXT = 2**24
"""Bytes of keys and values of a long text."""
