"""Threads for what would stop the event loop, a few for each kind of work, so that one kind cannot hold up another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

TEXTS = ThreadPoolExecutor(4, "foretoken-texts")
"""Tokenising and making requests."""
TEMPLATES = ThreadPoolExecutor(2, "foretoken-templates")
"""Chat templates, which are programs."""
GRAMMARS = ThreadPoolExecutor(32, "foretoken-grammars")
"""Compiling grammars; nearly all of these threads only wait for the one grammar that is on trial."""


async def in_thread(pool: ThreadPoolExecutor, work: Callable[[], T], timeout_s: float | None = None) -> T:
    """The result of some work in a thread.

    Raises:
        TimeoutError: it takes longer than it may; a thread cannot be stopped and goes on, but nobody waits.
    """
    return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, work), timeout_s)
