"""Memory that a training step frees is used again by the next one, instead of being handed back and asked for anew."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""glibc's names in ``mallopt``."""


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed; false where there is no such allocator.

    By default every block above 32 MB comes from the kernel and goes back to it: the logits of a training step
    on CPU are larger than that, and touching their fresh pages takes two fifths of the time (docs/log.md).
    For commands only: it changes the whole process.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    taken = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings]
    return all(taken)
