"""A server under mixed load for a while: does anything leak, and do its counters say what its clients saw?

    python benchmarks/soak.py --minutes 20 [--target FOLDER]

Starts ``foretoken serve`` with API keys, sends completions and chats of every kind from several threads, of which
some are cancelled in the middle of a stream and some are malformed, and looks at the server's memory, threads and open
files every ten seconds.  At the end it prints one JSON object and exits with 1 if

* the memory grows by more than 1 MB per 1,000 requests (least squares, the first third left out),
* threads or open files are more at the end than after the first third,
* an answer has no finish reason, a stream no end, or a status is one that the request did not call for,
* the server's counters are not what the clients have counted, or any request is a 5xx.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil

PROMPTS = [
    "def fib(n):",
    "class Stack:\n    def __init__(self):",
    "Once upon a time there was a",
    "import os\nimport sys\n\ndef main(",
    "The history of the city begins with the",
    "for name in sorted(names):\n    print(",
]
BAD: list[dict[str, Any]] = [
    {"max_tokens": -5},
    {"temperature": "hot"},
    {"prompt": []},
    {"n": 9},
    {"logit_bias": {"999999": 1}},
    {"stop": [""]},
    {"allowed_token_ids": [2**31 - 1]},
    {"structured_outputs": {"regex": "("}},
    {"model": "another"},
    {"speculative": {"method": "telepathy"}},
]
ENDED = "request_success_total"
CANCELLED_TOKENS = 200
"""That a request asks for which will be cancelled."""
KEY = "soak-key-0123456789"


class Soak:
    """What the clients have seen."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        status = httpx.get(f"{url}/v1/spec", headers={"Authorization": f"Bearer {KEY}"}, timeout=30).json()
        self.methods = [None, None, "none", *status["members"]]  # what auto chooses from is measured at load
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.wrong: list[str] = []
        self.end = 0.0

    def note(self, kind: str, tokens: int = 0) -> None:
        """Count a request."""
        with self.lock:
            self.counts[kind] += 1
            self.tokens += tokens

    def complain(self, fault: str) -> None:
        """Note what should not be."""
        with self.lock:
            self.wrong.append(fault[:300])

    def work(self, index: int) -> None:
        """Send requests until the time is up."""
        draw = random.Random(self.seed * 1000 + index)
        with httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {KEY}"}) as client:
            while time.monotonic() < self.end:
                try:
                    self.one(client, draw)
                except httpx.HTTPError as error:
                    self.complain(f"{type(error).__name__}: {error}")

    def one(self, client: httpx.Client, draw: random.Random) -> None:
        """One request, of a random kind."""
        chance = draw.random()
        if chance < 0.05:
            answer = client.post("/v1/completions", json={"model": "builtin", "prompt": "x", **draw.choice(BAD)})
            if answer.status_code not in (400, 404) or "error" not in answer.json():
                self.complain(f"a bad request: {answer.status_code} {answer.text[:100]}")
            self.note("bad")
        elif chance < 0.10:
            self.cancel(client, draw)
        else:
            path, body = self.request(draw)
            self.stream(client, path, body) if draw.random() < 0.5 else self.whole(client, path, body)

    def request(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        """A good one."""
        text = draw.choice(PROMPTS) + (
            " " + " ".join(draw.choices(PROMPTS, k=draw.randint(1, 6))) if draw.random() < 0.3 else ""
        )
        body: dict[str, Any] = {"model": "builtin", "max_tokens": draw.randint(1, 48)}
        body["temperature"] = draw.choice([0, 0, 0.7, 1.0])
        if draw.random() < 0.4:
            body["seed"] = draw.randrange(2**31)
        if draw.random() < 0.2:
            body["frequency_penalty"] = 0.5
        if draw.random() < 0.2:
            body["stop"] = ["\n\n", "return"]
        method = draw.choice(self.methods)
        if method is not None or draw.random() < 0.2:
            body["speculative"] = {"method": method, "explain": draw.random() < 0.3} if method else {"explain": True}
        if draw.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
        if draw.random() < 0.2:
            body["cache_salt"] = f"tenant{draw.randrange(5)}"
        if draw.random() < 0.3:
            if draw.random() < 0.3:
                body["prediction"] = {"type": "content", "content": text}
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
        if draw.random() < 0.2:
            body |= {"logprobs": 2, "ignore_eos": True}
        return "/v1/completions", {**body, "prompt": text}

    def whole(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        """An answer in one piece."""
        answer = client.post(path, json=body)
        if answer.status_code != 200:
            self.complain(f"{answer.status_code} {answer.text[:200]} for {json.dumps(body)[:200]}")
            self.note("failed")
            return
        found = answer.json()
        if found["choices"][0]["finish_reason"] not in ("stop", "length"):
            self.complain(f"finish_reason {found['choices'][0]['finish_reason']}")
        self.note("ok", found["usage"]["completion_tokens"])

    def stream(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        """A stream to its end."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reason, tokens, ended = None, 0, False
        with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                self.complain(f"stream: {answer.status_code} {answer.read()[:200]!r}")
                self.note("failed")
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    found = json.loads(line[6:])
                    if "error" in found:
                        self.complain(f"in a stream: {found}")
                    for choice in found.get("choices", ()):
                        reason = choice["finish_reason"] or reason
                    tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
        if not ended or reason not in ("stop", "length"):
            self.complain(f"a stream ended with done={ended}, finish_reason={reason}")
        self.note("ok", tokens)

    def cancel(self, client: httpx.Client, draw: random.Random) -> None:
        """Read a few events of a stream, and go away."""
        body = {"model": "builtin", "prompt": draw.choice(PROMPTS), "max_tokens": CANCELLED_TOKENS, "ignore_eos": True}
        remaining = draw.randint(0, 5)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for _ in answer.iter_lines():
                remaining -= 1
                if remaining <= 0:
                    break
        self.note("cancelled")


def counter(text: str, name: str, **labels: str) -> float:
    """The sum of a metric over all other labels."""
    found = 0.0
    for line in text.splitlines():
        if line.startswith(f"foretoken:{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            found += float(line.rsplit(" ", 1)[1])
    return found


def slope(samples: list[tuple[float, float]]) -> float:
    """Least squares."""
    if len(samples) < 2:
        return 0.0
    mean_x, mean_y = (sum(column) / len(samples) for column in zip(*samples, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def started(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """A server that is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", args.target, "--port", str(port), "--max-running", "8"]
    command += ["--served-name", "builtin"]
    command += ["--api-key", KEY, "--api-key", "another-key", "--kv-memory", args.kv_memory]
    log = os.open(args.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    process = subprocess.Popen(command, stderr=log)
    os.close(log)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    process.kill()
    raise SystemExit("the server did not get ready")


def watch(process: subprocess.Popen[bytes], soak: Soak, every_s: float) -> tuple[list[dict[str, float]], list[float]]:
    """Samples of the server's process, and how long /health took."""
    server = psutil.Process(process.pid)
    samples: list[dict[str, float]] = []
    health: list[float] = []
    start_s = time.monotonic()
    next_s = 0.0
    with httpx.Client(base_url=soak.url, timeout=30) as client:
        while time.monotonic() < soak.end and process.poll() is None:
            at = time.perf_counter()
            if client.get("/health").status_code != 200:
                soak.complain("/health is not 200")
            health.append(time.perf_counter() - at)
            if time.monotonic() - start_s >= next_s:
                next_s += every_s
                requests = sum(soak.counts.values())
                rss = server.memory_info().rss / 2**20
                sample = {"s": time.monotonic() - start_s, "requests": requests, "rss_mb": rss}
                metrics = client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
                cached_mb = {name: counter(metrics, f"{name}_cache_bytes") / 2**20 for name in ("kv", "prefix")}
                samples.append({**sample, "threads": server.num_threads(), "files": server.num_fds(), **cached_mb})
                print(json.dumps({name: round(value, 1) for name, value in samples[-1].items()}), file=sys.stderr)
            time.sleep(0.5)
    return samples, health


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin", help="a model; one of another folder drafts for itself")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--log", default="", help="file for the server's log")
    args = parser.parse_args()
    process, url = started(args)
    soak = Soak(url, args.seed)
    try:
        soak.end = time.monotonic() + 60 * args.minutes
        threads = [threading.Thread(target=soak.work, args=(index,)) for index in range(args.clients)]
        for thread in threads:
            thread.start()
        samples, health = watch(process, soak, 10.0)
        for thread in threads:
            thread.join()
        time.sleep(2)  # the last cancelled requests leave
        text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    report = judged(soak, samples, health, text, code)
    print(json.dumps(report))
    sys.exit(0 if report["passed"] else 1)


def judged(soak: Soak, samples: list[dict[str, float]], health: list[float], text: str, code: int) -> dict[str, Any]:
    """The figures, and what is wrong with them."""
    settled = [sample for sample in samples if sample["s"] >= samples[-1]["s"] / 3]
    first = settled[0]
    grows = 1000 * slope([(sample["requests"], sample["rss_mb"]) for sample in settled])
    wrong = list(soak.wrong)
    if grows > 1.0:
        wrong.append(f"memory grows by {grows:.2f} MB per 1,000 requests")
    for name in ("threads", "files"):
        if samples[-1][name] > first[name] + (8 if name == "files" else 0):  # connections that are being closed
            wrong.append(f"{name} grew from {first[name]:.0f} to {samples[-1][name]:.0f}")
    of_server = {
        "requests": sum(counter(text, ENDED, finished_reason=reason) for reason in ("stop", "length")),
        "aborted": counter(text, ENDED, finished_reason="abort"),
        "tokens": counter(text, "generation_tokens_total"),
        "failures": counter(text, "request_failure_total"),
        "running": counter(text, "num_requests_running"),
        "waiting": counter(text, "num_requests_waiting"),
    }
    cancelled = soak.counts["cancelled"]
    of_clients = {"requests": soak.counts["ok"], "aborted": cancelled, "failures": 0, "running": 0, "waiting": 0}
    wrong += [
        f"{name}: the server counts {of_server[name]:.0f}, its clients {of_clients[name]}"
        for name in of_clients
        if of_server[name] != of_clients[name]
    ]
    # Who cancels does not know what it was given: some tokens, and fewer than it has asked for.
    if not soak.tokens + cancelled <= of_server["tokens"] < soak.tokens + CANCELLED_TOKENS * max(1, cancelled):
        wrong.append(
            f"tokens: the server counts {of_server['tokens']:.0f}, its clients {soak.tokens} besides {cancelled}"
        )
    if code:
        wrong.append(f"the server ended with {code}")
    health.sort()
    return {
        "passed": not wrong,
        "wrong": wrong[:20],
        "minutes": round(samples[-1]["s"] / 60, 1),
        "counts": dict(soak.counts),
        "tokens": soak.tokens,
        "rss_mb": [round(samples[0]["rss_mb"]), round(settled[0]["rss_mb"]), round(samples[-1]["rss_mb"])],
        "rss_mb_per_1000_requests": round(grows, 3),
        "threads": [first["threads"], samples[-1]["threads"]],
        "files": [first["files"], samples[-1]["files"]],
        "health_ms": {f"p{p}": round(1e3 * health[min(len(health) - 1, len(health) * p // 100)], 1) for p in (50, 99)},
        "server": of_server,
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
