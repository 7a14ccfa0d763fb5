"""Return of freed memory to the operating system.

The C library keeps freed memory for later allocations, in one arena per thread: six texts of 1.9 MB that three threads
have tokenised leave 600 MB allocated, and 120 prompts of 4,500 tokens on SmolLM2, eight at a time, 1.4 GB.  glibc
returns the pages on request.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable


def trim() -> None:
    """Return free memory to the system: 0.1 s for 600 MB.  Does nothing if the C library has no ``malloc_trim``."""
    call = getattr(_c_library(), "malloc_trim", None)
    if call is not None:
        call(0)


def _c_library() -> ctypes.CDLL | None:
    """The C library of this process; looking for its file would start a process."""
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def share_arenas() -> bool:
    """Let all threads of this process share two arenas; false if the C library has no such setting.

    By default every new thread gets an arena, up to eight per core, and each arena keeps the most that its threads ever
    held at once.  In a soak test of twenty minutes a server grew by 39 MB in steps of 8 to 12, with two arenas by 5.
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    return mallopt is not None and mallopt(-8, 2) == 1  # M_ARENA_MAX


class FreedMemory:
    """Returns memory in a separate thread, ``after_s`` seconds after something large has ended, for all that has ended
    by then."""

    def __init__(self, after_s: float = 1.0, give_back: Callable[[], None] = trim) -> None:
        self._after_s, self._give_back = after_s, give_back
        self._lock = threading.Lock()
        self._is_due = False

    def large_one_ended(self) -> None:
        """Note that something large has ended; callable from any thread."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(self._after_s, self._return_freed)
        timer.daemon = True
        timer.start()

    def _return_freed(self) -> None:
        with self._lock:
            self._is_due = False  # memory freed from here on is returned the next time
        self._give_back()


FREED = FreedMemory()
"""The instance of this process."""
LONG_PROMPTS = FreedMemory(5.0)
"""Instance for long sequences: under a steady load of them memory is returned every five seconds."""
LONG_PROMPT = 2**24
"""Least bytes of KV cache of a long sequence."""
