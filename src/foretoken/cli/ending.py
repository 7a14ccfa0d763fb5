"""How commands that measure end at SIGTERM: as at Ctrl-C, with what they have so far."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
"""Exit codes of a command that Ctrl-C or SIGTERM has ended."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, with one line and an exit code of its own (:data:`TERMINATED`); only the
    main thread hears it."""
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
