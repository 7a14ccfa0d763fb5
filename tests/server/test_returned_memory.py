"""Memory that large requests took is given back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running_server import Running

from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.server.config import ServerSettings
from foretoken.server.memory import LONG_PROMPT, FreedMemory
from foretoken.server.serving import Serving
from foretoken.server.workers import LARGE, FairQueue


def test_it_is_given_back_once_for_all_and_never_forgotten() -> None:
    times, several, begun, go = [], threading.Event(), threading.Event(), threading.Event()

    def give_back() -> None:
        begun.set()
        go.wait(60)
        times.append(time.monotonic())
        if len(times) == 2:
            several.set()

    freed = FreedMemory(0.05, give_back)
    for _ in range(100):
        freed.large_one_ended()
    assert begun.wait(60)
    freed.large_one_ended()  # while it is given back: that is too late for this one
    go.set()
    assert several.wait(60)
    time.sleep(0.2)
    assert len(times) == 2


def test_large_work_says_that_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("foretoken.server.workers.FREED.large_one_ended", lambda: ended.append(1))
    queue = FairQueue(2, "test")
    for cost in (1, LARGE, LARGE - 1):
        queue.submit(lambda: None, cost).result(60)
    wait = queue.submit(lambda: None)
    wait.result(60)
    end = time.monotonic() + 20
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == [1]


def test_a_long_text_that_has_ended_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("foretoken.server.serving.LONG_PROMPTS.large_one_ended", lambda: ended.append(1))
    serving = Serving(ServerSettings())
    for tokens, reason in ((1_023, "stop"), (1_024, "stop"), (5_000, None)):
        request = Request(prompt=[1] * tokens)
        serving._ended(LONG_PROMPT // 1_024, request, time.monotonic(), SpecStats(), reason)  # type: ignore[arg-type]
    assert ended == [1, 1]


ARENAS = """
import ctypes, sys, threading
from foretoken.server.memory import share_arenas
assert sys.argv[1] == "all" or share_arenas()
libc, together = ctypes.CDLL(None), threading.Barrier(8)
def work():
    kept = [bytes(100_000) for _ in range(3)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no arenas")
def test_threads_share_two_arenas(tmp_path: Path) -> None:
    """What each keeps for itself looks like a leak: a thread that comes late brings eight megabytes."""
    arenas = {}
    for ways in ("all", "two"):
        file = tmp_path / ways
        subprocess.run([sys.executable, "-c", ARENAS, ways, str(file)], check=True, timeout=120)
        arenas[ways] = file.read_text().count("<heap nr=")
    assert arenas["two"] <= 2 < arenas["all"], arenas


def rss_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other C libraries have no malloc_trim")
def test_bodies_of_two_megabytes_leave_nothing_behind(server: Running) -> None:
    """Twelve of them, three at a time: without giving back there are hundreds of megabytes."""
    text = "large words of a body " * 86_000
    server.post("/tokenize", prompt=text[:1000])
    before = rss_mb()
    with ThreadPoolExecutor(3) as pool:
        statuses = list(pool.map(lambda _: server.post("/tokenize", prompt=text).status_code, range(12)))
    assert statuses == [200] * 12
    end = time.monotonic() + 60
    while rss_mb() - before > 64 and time.monotonic() < end:
        time.sleep(0.1)
    assert rss_mb() - before <= 64
