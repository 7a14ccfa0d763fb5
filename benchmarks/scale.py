"""Two replicas under Ray Serve against one server: requests per second, ready time, overhead, memory, kill -9.

    python benchmarks/scale.py [--rounds 3] [--requests 64] [--json out.json]

All servers run on this machine, together, and are asked in turns; every arm must give the same texts.  On one core
(``taskset -c 0``) it shows what the gateway and Ray cost, on two or more also what a second replica gains.  Needs the
extras ``server`` and ``ray``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

ARMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "one server, 1 thread": ([], {"OMP_NUM_THREADS": "1"}),
    "one server, 2 threads": ([], {"OMP_NUM_THREADS": "2"}),
    "two replicas, 1 thread each": (["--replicas", "2"], {}),
}
FLAGS = ["--dtype", "float32", "--drafter", "ngram", "--controller", "constant"]


class Server:
    """One arm, started and ready."""

    def __init__(self, name: str) -> None:
        flags, env = ARMS[name]
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        start_s = time.monotonic()
        command = [sys.executable, "-m", "foretoken", "serve", "builtin", *FLAGS, *flags, "--port", str(port)]
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(command, env={**inherited, **env}, stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        while True:
            try:
                if self.client.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() - start_s > 240:
                raise RuntimeError(f"{name} did not start")
            time.sleep(0.05)
        self.ready_s = time.monotonic() - start_s

    def tree(self) -> list[psutil.Process]:
        """Its processes."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def memory(self) -> tuple[int, int]:
        """Processes, and bytes in which each shared page counts once."""
        sizes = []
        for process in self.tree():
            try:
                sizes.append(process.memory_full_info().pss)
            except psutil.Error:
                continue
        return len(sizes), sum(sizes)

    def complete(self, prompt: str, tokens: int) -> str:
        """A greedy text of so many tokens."""
        body = {"model": "builtin", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def events(self, prompt: str, tokens: int) -> list[float]:
        """When the events of a plain stream came, from the request on."""
        body = {"model": "builtin", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "speculative": {"enabled": False}}
        start_s = time.perf_counter()
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            return [time.perf_counter() - start_s for line in answer.iter_lines() if line.startswith("data: {")]

    def stop(self) -> float:
        """Seconds from SIGTERM to the end."""
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return time.monotonic() - start_s


@contextmanager
def started(name: str) -> Iterator[Server]:
    server = Server(name)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def overheads(servers: dict[str, Server], count: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a request without work, of one token, to the first event and between events; medians."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in servers}
    for number in range(count):
        for name, server in servers.items():
            times = found[name]
            start_s = time.perf_counter()
            server.client.get("/v1/models").raise_for_status()
            times.setdefault("GET /v1/models", []).append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            server.complete(f"{number} =", 1)
            times.setdefault("one token", []).append(time.perf_counter() - start_s)
            if number % 5 == 0:
                events = server.events(f"{number} and", 64)
                times.setdefault("first event", []).append(events[0])
                gaps = [after - before for before, after in pairwise(events)]
                times.setdefault("between events", []).append(statistics.median(gaps))
                times.setdefault("per event", []).append((events[-1] - events[0]) / (len(events) - 1))
    return {
        name: {measure: 1e3 * statistics.median(values) for measure, values in times.items()}
        for name, times in found.items()
    }


def throughput(servers: dict[str, Server], rounds: int, requests: int, at_once: int) -> dict[str, list[float]]:
    """Requests per second of a closed loop, by round; every arm must write the same."""
    prompts = [f"def function_{number}(x):\n" for number in range(requests)]
    found: dict[str, list[float]] = {name: [] for name in servers}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for name, server in servers.items():
            with ThreadPoolExecutor(at_once) as pool:
                start_s = time.perf_counter()
                texts[name] = list(pool.map(lambda prompt, server=server: server.complete(prompt, 48), prompts))
                if number:  # the first round warms up
                    found[name].append(requests / (time.perf_counter() - start_s))
        if len({tuple(each) for each in texts.values()}) != 1:
            raise RuntimeError("the arms do not write the same")
    return found


def killed(server: Server, calls: int) -> dict[str, Any]:
    """Calls while one of two replicas is killed, and how long it takes until there are two again."""
    outcomes: list[int] = []

    def call(number: int) -> None:
        try:
            server.complete(f"call {number}", 32)
            outcomes.append(200)
        except httpx.HTTPError as error:
            outcomes.append(getattr(getattr(error, "response", None), "status_code", 0))

    victim = max(
        (process for process in server.tree() if "ServeReplica" in "".join(process.cmdline())),
        key=lambda process: process.cpu_times().user,
    )
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(call, number) for number in range(calls)]
        while len(outcomes) < calls // 5:
            time.sleep(0.01)
        victim.kill()
        start_s = time.monotonic()
        for future in work:
            future.result()
    time.sleep(1.0)  # the gateway counts anew twice a second
    while server.client.get("/ready").json()["replicas"]["ready"] < 2:
        time.sleep(0.1)
    return {"calls": calls, "failed": sum(code != 200 for code in outcomes), "two_again_s": time.monotonic() - start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    report: dict[str, Any] = {"cores": cores, "load_before": os.getloadavg()}
    with ExitStack() as stack:
        # Two threads on one core wait for each other: that would measure nothing.
        arms = [name for name in ARMS if "2 threads" not in name or cores > 1]
        servers = {name: stack.enter_context(started(name)) for name in arms}
        report["ready_s"] = {name: server.ready_s for name, server in servers.items()}
        report["overhead_ms"] = overheads(servers, 40)
        report["requests_per_s"] = throughput(servers, options.rounds, options.requests, options.at_once)
        report["processes_and_pss_bytes"] = {name: server.memory() for name, server in servers.items()}
        replicas = servers["two replicas, 1 thread each"]
        report["kill"] = killed(replicas, 100)
        report["stop_s"] = {name: server.stop() for name, server in servers.items()}
    report["requests_per_s_median"] = {name: statistics.median(v) for name, v in report["requests_per_s"].items()}
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
