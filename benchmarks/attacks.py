"""What clients that mean harm do to everybody else: ``/health`` and a small innocent request during each attack.

    python benchmarks/attacks.py [--target FOLDER] [--seconds 10]

Starts ``foretoken serve`` once for each attack and prints one JSON object a line: how many samples of ``/health``,
their median, p99 and largest in milliseconds, the same of a request for four tokens of another key, how the attack was
answered, and by how much the server's memory is larger twenty seconds afterwards.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import psutil
from reliability import TARGET, health_times, ms, served

ATTACKER, INNOCENT = "attacker-key-01234567", "innocent-key-01234567"
FLAGS = ("--api-key", ATTACKER, "--api-key", INNOCENT, "--max-running", "8", "--write-timeout", "10")
SETTLES_S = 20.0

Attack = Callable[[str, float, Counter[str]], None]
"""Address, time at which to stop, and answers by status."""


def headers(key: str) -> dict[str, str]:
    """Of a client with this key that sends JSON."""
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def posting(path: str, body: dict[str, Any], clients: int) -> Attack:
    """Several clients that send the same request again and again."""

    def attack(url: str, end: float, answers: Counter[str]) -> None:
        content = json.dumps({"model": "builtin", **body})

        def send() -> None:
            with httpx.Client(base_url=url, timeout=60, headers=headers(ATTACKER)) as client:
                while time.monotonic() < end:
                    try:
                        answers[str(client.post(path, content=content).status_code)] += 1
                    except httpx.HTTPError as error:
                        answers[type(error).__name__] += 1

        threads = [threading.Thread(target=send) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return attack


def stalled(clients: int) -> Attack:
    """Clients that ask for long answers with everything in them, and never read."""

    def attack(url: str, end: float, answers: Counter[str]) -> None:
        body = json.dumps({"model": "builtin", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "logprobs": 5})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n"
        sent = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        port = int(url.rsplit(":", 1)[1])
        sockets = []
        for _ in range(clients):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", port))
            sock.sendall(sent)
            sockets.append(sock)
        time.sleep(max(0.0, end - time.monotonic()))
        for sock in sockets:
            sock.settimeout(30)
            with suppress(OSError):
                answers[sock.recv(100).split(b"\r\n")[0].decode()[9:12] or "closed"] += 1
            sock.close()

    return attack


LARGE = {"prompt": "large words of a body " * 86_000, "max_tokens": 4}  # 1.9 MB
LONG = {"prompt": "a text that fits " * 1_500, "max_tokens": 4}
ATTACKS: dict[str, Attack] = {
    "none": lambda url, end, answers: time.sleep(max(0.0, end - time.monotonic())),
    "5 bodies of 1.9 MB": posting("/v1/completions", LARGE, 5),
    "20 bodies of 1.9 MB": posting("/v1/completions", LARGE, 20),
    "20 bodies of 1.9 MB to /tokenize": posting("/tokenize", {"prompt": LARGE["prompt"]}, 20),
    "8 prompts that nearly fit": posting("/v1/completions", LONG, 8),
    "32 clients with priority -5": posting("/v1/completions", {"prompt": "x", "max_tokens": 64, "priority": -5}, 32),
    "64 prompts, n = 8": posting("/v1/completions", {"prompt": ["x"] * 64, "n": 8, "max_tokens": 4}, 4),
    "hostile schemas": posting(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "(a{1,200}){1,200}" * 8}},
        8,
    ),
    "12 stalled readers": stalled(12),
}


def measured(attack: Attack, seconds: float) -> dict[str, Any]:
    """One attack on a server of its own."""
    with served(*FLAGS) as (process, url):
        server = psutil.Process(process.pid)
        small = {"model": "builtin", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=120, headers=headers(INNOCENT)) as client:
            for _ in range(8):
                client.post("/v1/completions", json=small)
        before = server.memory_info().rss
        end = time.monotonic() + seconds
        answers: Counter[str] = Counter()
        health: list[float] = []
        innocent: list[float] = []

        def ask() -> None:
            with httpx.Client(base_url=url, timeout=120, headers=headers(INNOCENT)) as client:
                while time.monotonic() < end:
                    start_s = time.perf_counter()
                    status = client.post("/v1/completions", json=small).status_code
                    if status != 200:
                        answers[f"innocent {status}"] += 1
                    innocent.append(time.perf_counter() - start_s)
                    time.sleep(0.1)

        watching = threading.Thread(target=lambda: health.extend(health_times(url, end)))
        threads = [watching, threading.Thread(target=ask)]
        for thread in threads:
            thread.start()
        attack(url, end, answers)
        for thread in threads:
            thread.join()
        time.sleep(SETTLES_S)
        grown = round((server.memory_info().rss - before) / 2**20)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "samples": len(health),
        "health_ms": {name: ms(health, share) for name, share in shares.items()},
        "innocent_ms": {name: ms(innocent, share) for name, share in shares.items()},
        "answers": dict(answers),
        "rss_mb": grown,
    }


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(ATTACKS))
    parser.add_argument("--target", default="builtin", help="a model")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    TARGET[:] = [args.target]
    for name in args.names or ATTACKS:
        print(json.dumps({"attack": name, **measured(ATTACKS[name], args.seconds)}), flush=True)


if __name__ == "__main__":
    main()
