"""The server's log: one JSON object per line, written by a separate thread."""

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


class JsonLines(logging.Formatter):
    """Formats records as JSON, which escapes control characters, so that no client can forge log lines."""

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
    """Writes lines in a separate thread, so that no request waits for the reader of the log.

    A pipe that nobody empties is full after 64 KiB, and a write to it never returns: in the event loop it would stop
    the whole server.  At most ``most`` lines wait.  Later ones are lost, and their number is written as soon as there
    is room.
    """

    def __init__(self, descriptor: int, most: int = 10_000) -> None:
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
        """Wait until everything is written, at most a second."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, 1.0)

    def close(self) -> None:
        """End the thread after the waiting lines.  It stays if the queue is full, as there is no reader then."""
        with suppress(Full):
            self._lines.put_nowait(None)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # the reader is gone
                self._write(line)
                with self._counting:
                    lost, self._lost = self._lost, 0
                if lost:
                    notice = f"{lost} log lines were dropped: stderr was not read"
                    self._write(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, notice, None, None)))
            self._lines.task_done()
        self._lines.task_done()

    def _write(self, line: str) -> None:
        unsent = line.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair would end the thread
        while unsent:
            unsent = unsent[os.write(self._descriptor, unsent) :]


def say(line: str, level: int = logging.INFO) -> None:
    """Write a plain line for the user who started the server; nothing waits until it is read."""
    logging.getLogger("foretoken.server").log(level, "%s", line, extra={"plain": True})


def _warn(message: Warning | str, *location: object, **more: object) -> None:
    say(f"warning: {' '.join(str(message).split())}", logging.WARNING)


LEVELS = {"foretoken": logging.INFO, "asyncio": logging.WARNING, "uvicorn": logging.WARNING}
"""Loggers in this format: foretoken's, and those of the event loop and uvicorn."""


def install() -> None:
    """Send these logs to stderr for the life of the process."""
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
    """Install the logs inside the block, then write everything out and restore the caller's logging."""
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
