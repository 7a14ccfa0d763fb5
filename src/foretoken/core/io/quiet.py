"""Transformers' log level and progress bars, which are process-wide; they are restored after use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any


class ProcessSetting:
    """A process-wide setting that concurrent blocks of several threads change.

    The first block saves the value and the last one restores it. If each block did so, blocks that end in another order
    than they began would leave the changed value.

    Args:
        read: returns the setting.
        change: sets the value for the blocks.
        write: sets a value that ``read`` returned.
    """

    def __init__(self, read: Callable[[], Any], change: Callable[[], None], write: Callable[[Any], None]) -> None:
        self._read, self._change, self._write = read, change, write
        self._lock, self._count, self._before = Lock(), 0, None

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Change the setting inside the block."""
        with self._lock:
            if not self._count:
                self._before = self._read()
                self._change()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._write(self._before)


def _logging() -> Any:
    from transformers.utils import logging

    return logging


def _bars() -> tuple[bool, bool]:
    """Whether Transformers and huggingface_hub show progress bars; switching the former also switches the latter."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    return bool(_logging().is_progress_bar_enabled()), not are_progress_bars_disabled()


def _no_bars() -> None:
    if _bars() != (False, False):  # disabling disabled bars warns if an environment variable controls them
        _logging().disable_progress_bar()


def _set_bars(bars: tuple[bool, bool]) -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if bars[0] and _bars() != bars:
        _logging().enable_progress_bar()
    if _bars()[1] != bars[1]:
        (enable_progress_bars if bars[1] else disable_progress_bars)()


ERRORS_ONLY = ProcessSetting(
    lambda: _logging().get_verbosity(),
    lambda: _logging().set_verbosity_error(),
    lambda level: _logging().set_verbosity(level),
)
"""Transformers logs errors only."""
NO_BARS = ProcessSetting(_bars, _no_bars, _set_bars)
"""Transformers shows no progress bars."""
