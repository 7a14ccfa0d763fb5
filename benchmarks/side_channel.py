"""How well do the sizes of a stream's chunks tell which prompt was asked, and what do the two flags against it do?

    python benchmarks/side_channel.py

Twenty prompts, each asked six times at temperature 0.3.  Who listens knows the other five streams of every prompt, and
takes the nearest one (sum of differences of the sizes, the shorter filled up with zeros).  One in twenty is chance.
Prints one JSON object for each setting of ``--stream-pad`` and ``--stream-interval``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx

HEADS = ["def fib(n):", "class Stack:", "import os\n", "The river", "for i in range("]
TAILS = ["", "\n    # ", " = {", " and then"]
PROMPTS = [head + tail for head, tail in itertools.product(HEADS, TAILS)]
SETTINGS = [("none", []), ("pad", ["--stream-pad", "1024"])]
SETTINGS.append(("pad, interval 8", ["--stream-pad", "1024", "--stream-interval", "8"]))


def sizes(client: httpx.Client, prompt: str, seed: int, method: str | None) -> list[int]:
    """Bytes of every event of a stream."""
    body = {"model": "builtin", "prompt": prompt, "temperature": 0.3, "seed": seed, "max_tokens": 64, "stream": True}
    body["speculative"] = {"enabled": False} if method is None else {"method": method}
    body["ignore_eos"] = True
    with client.stream("POST", "/v1/completions", json=body) as answer:
        frames = answer.read().split(b"data: ")
    return [len(frame) for frame in frames[1:-1]]


def accuracy(streams: dict[str, list[list[int]]]) -> float:
    """Share of streams whose nearest other stream has the same prompt."""
    known = [(prompt, one) for prompt, found in streams.items() for one in found]
    right = 0
    for index, (prompt, one) in enumerate(known):
        others = [(distance(one, other), name) for place, (name, other) in enumerate(known) if place != index]
        right += min(others)[1] == prompt
    return right / len(known)


def distance(a: list[int], b: list[int]) -> int:
    """Sum of differences."""
    return sum(abs(x - y) for x, y in itertools.zip_longest(a, b, fillvalue=0))


def measure(name: str, flags: list[str], method: str | None, samples: int) -> dict[str, object]:
    """One setting."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--port", str(port), *flags]
    command += ["--drafter", "router,drafters=(model,k=4|ngram)"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            for _ in range(240):
                with suppress(httpx.HTTPError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.5)
            streams = {prompt: [sizes(client, prompt, seed, method) for seed in range(samples)] for prompt in PROMPTS}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    events = [len(one) for found in streams.values() for one in found]
    return {
        "setting": name,
        "drafter": method or "none",
        "found": round(accuracy(streams), 3),
        "events_per_stream": round(sum(events) / len(events), 1),
        "different_sizes": len({size for found in streams.values() for one in found for size in one}),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6)
    args = parser.parse_args()
    for name, flags in SETTINGS:
        print(json.dumps(measure(name, flags, "model", args.samples)), flush=True)


if __name__ == "__main__":
    main()
