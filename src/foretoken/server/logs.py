"""The log: one JSON object a line, whatever is in it, written by a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Full, Queue
from typing import Any

MOST_LINES = 10_000
"""Lines that wait to be written; more are counted and lost."""


class JsonLines(logging.Formatter):
    """Control characters are escaped by JSON, so that nobody can write lines of others."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "plain", False):
            return record.getMessage()
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


class LineWriter(logging.Handler):
    """Writes lines in a thread of its own, so that no request waits for who reads them.

    A pipe that nobody empties is full after 64 KiB, and a write to it never returns: in the event loop it would stop
    the whole server.  At most ``most`` lines wait: later ones are lost, and their number is written as soon as there is
    room.
    """

    def __init__(self, descriptor: int, most: int = MOST_LINES) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self._descriptor, self._counting, self._lost = descriptor, threading.Lock(), 0
        self._lines: Queue[str | None] = Queue(most)
        threading.Thread(target=self._write_all, name="foretoken-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            with self._counting:
                self._lost += 1

    def flush(self) -> None:
        """Wait until everything is written, a second at most."""
        with self._lines.all_tasks_done:
            # Seconds that the end of the process waits for the last lines
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, 1.0)

    def close(self) -> None:
        """Let the thread end behind the lines that wait; where there is no room nobody reads, and it stays."""
        with suppress(Full):
            self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # nobody reads any more
                self._write(line)
                with self._counting:
                    lost, self._lost = self._lost, 0
                if lost:
                    notice = f"{lost} lines of the log were lost: stderr was not read"
                    self._write(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, notice, None, None)))
            self._lines.task_done()
        self._lines.task_done()

    def _write(self, line: str) -> None:
        unsent = line.encode() + b"\n"
        while unsent:
            unsent = unsent[os.write(self._descriptor, unsent) :]


def say(line: str, level: int = logging.INFO) -> None:
    """Tell whoever has started the server something, as it is; nobody waits until it is read."""
    logging.getLogger("foretoken.server").log(level, "%s", line, extra={"plain": True})


def _warn(message: Warning | str, *place: object, **more: object) -> None:
    """A warning as one line."""
    say(f"warning: {' '.join(str(message).split())}", logging.WARNING)


def keep_standard_files() -> None:
    """Open what was closed at the start of the process on ``/dev/null``.

    Else the next file or connection gets its number, and what is written to stderr, by whomever, ends up in that.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


LEVELS = {"foretoken": logging.INFO, "asyncio": logging.WARNING, "uvicorn": logging.WARNING}
"""The logs that are written so: ours, and what the event loop and uvicorn complain about."""


def install() -> None:
    """Send these logs to stderr so, for as long as the process lives."""
    if any(isinstance(handler, LineWriter) for handler in logging.getLogger("foretoken").handlers):
        return
    handler = logging.NullHandler() if sys.stderr is None else LineWriter(2)
    warnings.showwarning = _warn
    for name, level in LEVELS.items():
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False


@contextmanager
def installed() -> Iterator[None]:
    """The same inside the block; then everything is written and the logs are the caller's again, as they were."""
    logs = [logging.getLogger(name) for name in LEVELS]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in logs]
    showwarning = warnings.showwarning
    install()
    writer = logs[0].handlers[0]
    try:
        yield
    finally:
        writer.flush()
        for log, handlers, level, propagate in before:
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)
        warnings.showwarning = showwarning
        if writer not in before[0][1]:
            writer.close()
