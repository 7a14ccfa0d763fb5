"""Signal handling of commands that measure: SIGTERM ends them like Ctrl-C, with the results so far."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
"""Exit codes after Ctrl-C and SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM end a command as Ctrl-C does, with one line and exit code :data:`TERMINATED`.  Has no effect outside
    the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended: list[int] = []

    def stop(number: int, frame: object) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, typer.Exit) as error:
        if not ended or (isinstance(error, typer.Exit) and error.exit_code != INTERRUPTED):
            raise
        print("terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
