"""Figures of a server under overload, disconnects, signals and huge input.

    python benchmarks/reliability.py [--target FOLDER]

Starts ``foretoken serve`` a few times and prints one JSON object a line: R3 overload, R4 disconnect, R5 drain,
R9 health under load, R14 starts that must fail, R15 limits (as in ``docs/reliability.md``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

TARGET = ["builtin"]
"""What is served."""
LONG = {"model": "builtin", "prompt": "x", "ignore_eos": True, "temperature": 1}


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "foretoken",
        "serve",
        *TARGET,
        "--served-name",
        "builtin",
        "--port",
        str(port),
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        keys = [flags[place + 1] for place, flag in enumerate(flags) if flag == "--api-key"]
        key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 8}, timeout=60, headers=key)
        yield process, url
    finally:
        process.kill()
        process.wait(30)


def ms(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else 0.0


def together(count: int, work: Callable[[int], None]) -> None:
    """Run something in several threads, and wait."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def health_times(url: str, end: float) -> list[float]:
    """Seconds that each ``/health`` took until this time of the monotonic clock, fifty of them a second at most."""
    seconds: list[float] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end:
            start_s = time.perf_counter()
            client.get("/health")
            seconds.append(time.perf_counter() - start_s)
            time.sleep(0.02)
    return seconds


def running(url: str) -> float:
    """Requests that run or wait."""
    state = httpx.get(f"{url}/v1/spec", timeout=30).json()["state"]
    return float(state["running"] + state["waiting"])


async def burst(url: str, count: int, body: dict[str, Any]) -> list[tuple[int, float, dict[str, str]]]:
    """Status, seconds until the headers are there, and headers of requests that are sent at once.

    They are bytes on open connections: 120 clients of a library would take longer than the server to be refused.
    """
    port = int(url.rsplit(":", 1)[1])
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    await asyncio.sleep(1.0)  # the server has them all
    start_s = time.perf_counter()

    async def ask(reader: asyncio.StreamReader) -> tuple[int, float, dict[str, str]]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        spent = time.perf_counter() - start_s
        return int(lines[0].split()[1]), spent, dict(x.lower().split(": ", 1) for x in lines[1:] if x)

    for _, writer in streams:
        writer.write(sent)
    found = await asyncio.gather(*(ask(reader) for reader, _ in streams))
    for _, writer in streams:
        writer.close()
    return list(found)


def r3_overload() -> dict[str, Any]:
    """120 requests at once where 2 run and 4 wait."""
    with served("--max-running", "2", "--max-queued", "4") as (_, url):
        answers = asyncio.run(burst(url, 120, {**LONG, "max_tokens": 60}))
        metrics = httpx.get(f"{url}/metrics").text
    statuses = Counter(status for status, _, _ in answers)
    refused = [spent for status, spent, _ in answers if status == 503]
    counted = sum(
        float(x.rsplit(" ", 1)[1])
        for x in metrics.splitlines()
        if x.startswith("foretoken:admission_rejections_total{")
    )
    return {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "refused_ms_p50": ms(refused, 0.5),
        "refused_ms_p99": ms(refused, 0.99),
        "retry_after": sorted({headers.get("retry-after", "") for status, _, headers in answers if status == 503}),
        "counted": counted,
    }


def r4_disconnect() -> dict[str, Any]:
    """Twenty clients that go away in the middle: how long until place and memory are free, beside a round's length."""
    freed: list[float] = []
    with served("--no-prefix-cache") as (_, url), httpx.Client(base_url=url, timeout=60) as watcher:
        for _ in range(20):
            client = httpx.Client(base_url=url, timeout=60)
            with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 900, "stream": True}) as answer:
                next(answer.iter_lines())
                start_s = time.perf_counter()
            client.close()
            while True:
                answer_now = watcher.get("/v1/spec")
                if answer_now.status_code != 200:
                    raise SystemExit(f"/v1/spec answered {answer_now.status_code}: {answer_now.text[:300]}")
                state = answer_now.json()["state"]
                if not state["running"] and not state["kv_bytes"]:
                    break
                time.sleep(0.01)  # who asks without a pause takes a core from the rounds that are waited for
            freed.append(time.perf_counter() - start_s)
        whole = watcher.post("/v1/completions", json={**LONG, "max_tokens": 100}).json()["metrics"]
    spec = whole["speculative_decoding"]
    return {
        "freed_ms_p50": ms(freed, 0.5),
        "freed_ms_max": ms(freed, 1.0),
        "round_ms": round(whole["generation_time_ms"] / spec["num_spec_steps"], 1),
    }


def r5_drain() -> dict[str, Any]:
    """SIGTERM with one stream open."""
    lines: list[str] = []
    begun = threading.Event()
    with served() as (process, url):
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]

        def read(index: int) -> None:
            body = {**LONG, "max_tokens": 300, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read, args=(0,))
        reader.start()
        begun.wait(60)
        process.send_signal(signal.SIGTERM)
        start_s = time.perf_counter()
        unready = None
        with suppress(httpx.TransportError):
            while unready is None and process.poll() is None:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 503:
                    unready = time.perf_counter() - start_s
        reader.join()
        code = process.wait(60)
        ended = time.perf_counter() - start_s
        time.sleep(0.5)
        remaining = [pid for pid in children if psutil.pid_exists(pid)]
    return {
        "unready_ms": None if unready is None else round(1e3 * unready, 1),
        "stream_finished": "data: [DONE]" in lines,
        "last_line": next((line for line in reversed(lines) if line), "")[-200:],
        "exit_code": code,
        "exit_s": round(ended, 2),
        "children_left": remaining,
    }


def r9_health(seconds: float) -> dict[str, Any]:
    """/health while sixteen streams run and large prompts come in."""
    tokens = 0
    with served() as (_, url):
        end = time.monotonic() + seconds

        def load(index: int) -> None:
            nonlocal tokens
            with httpx.Client(base_url=url, timeout=120) as client:
                while time.monotonic() < end:
                    prompt = "def f(x):\n    return x\n" * (40 if index % 4 == 0 else 1)
                    answer = client.post("/v1/completions", json={**LONG, "prompt": prompt, "max_tokens": 64})
                    tokens += answer.json()["usage"]["completion_tokens"]

        thread = threading.Thread(target=together, args=(16, load))
        thread.start()
        time.sleep(1.0)
        times = health_times(url, end)
        thread.join()
    figures = {f"p{int(100 * share)}": ms(times, share) for share in (0.5, 0.99)}
    return {
        "samples": len(times),
        "health_ms": figures | {"max": ms(times, 1.0)},
        "tokens_per_s": round(tokens / seconds),
    }


def r14_starts() -> dict[str, Any]:
    """What cannot start: one line, exit code 2, and how long that took."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        broken = Path(folder) / "broken"
        zoo = Path(__file__).parents[1] / "src" / "foretoken" / "zoo" / "target"
        broken.mkdir()
        for file in zoo.iterdir():
            data = file.read_bytes()
            (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
        for name, flags in {
            "no such path": ["/nowhere/model"],
            "half a checkpoint": [str(broken)],
            "port in use": ["builtin", "--port", str(busy.getsockname()[1])],
            "unknown drafter": ["builtin", "--port", "0", "--drafter", "telepathy"],
            "public without a key": ["builtin", "--host", "0.0.0.0"],
            "no memory": ["builtin", "--port", "0", "--kv-memory", "lots"],
        }.items():
            start_s = time.perf_counter()
            command = [sys.executable, "-m", "foretoken", "serve", *flags]
            process = subprocess.run(command, capture_output=True, text=True, timeout=120)
            errors = [line for line in process.stderr.splitlines() if line.startswith("error:")]
            found[name] = [
                process.returncode,
                round(time.perf_counter() - start_s, 1),
                len(errors),
                "Traceback" in process.stderr,
            ]
    return {"code_seconds_lines_traceback": found}


def r15_limits() -> dict[str, Any]:
    """Memory that hostile input takes."""
    with served() as (process, url):
        server = psutil.Process(process.pid)
        before = server.memory_info().rss
        found: dict[str, Any] = {}

        def note(name: str, outcome: Any) -> None:
            found[name] = [outcome, round((server.memory_info().rss - before) / 2**20)]

        with httpx.Client(base_url=url, timeout=60) as client:
            deep = b'{"model":"builtin","prompt":' + b"[" * 1000 + b"]" * 1000 + b"}"
            note("1,000 levels", client.post("/v1/completions", content=deep).status_code)
            wrong = json.dumps({"model": "builtin", "prompt": [1, *["a"] * 300_000]})
            note("300,000 wrong elements", client.post("/v1/completions", content=wrong).status_code)

        def endless() -> Iterator[bytes]:
            for _ in range(100):
                yield b"x" * 2**20

        for name, sent in (("100 MB declared", b"x" * 100 * 2**20), ("100 MB in pieces", endless())):
            try:
                note(name, httpx.post(f"{url}/v1/completions", content=sent, timeout=60).status_code)
            except httpx.TransportError as error:
                note(name, type(error).__name__)
        port = int(url.rsplit(":", 1)[1])
        for name, text in {
            "10,000 headers": b"GET /health HTTP/1.1\r\nHost: x\r\n"
            + b"".join(b"h%d: x\r\n" % i for i in range(10_000)),
        }.items():
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, suppress(OSError):
                sock.sendall(text + b"\r\n")
                note(name, sock.recv(100).split(b"\r\n")[0].decode())
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            start_s = time.perf_counter()
            with suppress(OSError):
                while time.perf_counter() - start_s < 40:
                    sock.sendall(b"G")
                    time.sleep(0.5)
            note("a byte each half second", f"closed after {time.perf_counter() - start_s:.0f} s")
    return {"status_and_rss_mb": found}


TESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "R3": r3_overload,
    "R4": r4_disconnect,
    "R5": r5_drain,
    "R9": lambda: r9_health(20.0),
    "R14": r14_starts,
    "R15": r15_limits,
}


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(TESTS))
    parser.add_argument("--target", default="builtin", help="a model")
    args = parser.parse_args()
    TARGET[:] = [args.target]
    for name in args.names or TESTS:
        print(json.dumps({"test": name, **TESTS[name]()}), flush=True)


if __name__ == "__main__":
    main()
