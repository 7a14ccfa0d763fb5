"""Trial compilation of grammars: some of a few characters take minutes and gigabytes.

llguidance's own limits count steps, not their cost: ``.*`` twenty thousand times took 179 seconds and 6.7 GB until they
applied, and ``{"type": "integer", "multipleOf": 999983}`` 15 seconds.  A compiling thread cannot be stopped; a process
can.
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

TOO_MUCH = "it takes too much time or memory: make it smaller"
LIMIT_EXITS = [-getattr(signal, name) for name in ("SIGPROF", "SIGABRT") if hasattr(signal, name)]
"""Exit codes of a worker that has reached its limit of processor time or memory."""


class TrialBusy(Exception):
    """Another grammar is on trial."""


class _Interrupted(Exception):
    """A trial has ended without a result, and not by its limits: a busy machine, or a worker that was killed."""


class Trial:
    """A process that compiles grammars, started on demand and restarted after a grammar has ended it.

    The results of ``remembered`` grammars are kept.
    """

    def __init__(self, remembered: int = 256) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._result = lru_cache(remembered)(self._tried)
        atexit.register(self.close)

    def error(self, grammar: str, limits: dict[str, int], patience_s: float | None = None) -> str:
        """Reason why the grammar cannot be compiled, or an empty text.  Raises :class:`TrialBusy` if others are on
        trial for longer than ``patience_s`` (``None``: no limit)."""
        try:
            return self._result(json.dumps([grammar, limits]), patience_s)
        except _Interrupted:  # not remembered: the next request may have more luck
            return TOO_MUCH

    def _tried(self, line: str, patience_s: float | None) -> str:
        """Result of a trial; one grammar at a time, while remembered results do not wait."""
        if not self._lock.acquire(timeout=-1 if patience_s is None else patience_s):
            raise TrialBusy("another grammar is being compiled")
        try:
            return self._ask(line)
        finally:
            self._lock.release()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: str) -> str:
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process that compiles grammars has no pipes")
        # Wall-clock seconds for one grammar: more than its processor time, for a busy machine
        watch = threading.Timer(1.6, process.kill)
        watch.daemon = True
        watch.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        if not answer:
            code = process.wait()
            self.close()
            if code in LIMIT_EXITS:
                return TOO_MUCH
            raise _Interrupted
        return str(json.loads(answer))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        worker = str(Path(__file__).with_name("trial_worker.py"))
        self._process = subprocess.Popen(
            # Bytes of memory, and seconds of processor time for one grammar
            [sys.executable, "-I", worker, str(512 * 2**20), "0.7"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        if self._process.stdout is None or not self._process.stdout.readline():
            self.close()
            raise RuntimeError("the process that compiles grammars does not start")
        return self._process
