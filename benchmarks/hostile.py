"""Schemathesis against a server: thousands of requests that follow the OpenAPI document, and that break it.

    python benchmarks/hostile.py --requests 5000 [--target FOLDER]
    python benchmarks/hostile.py --requests 300 --url http://127.0.0.1:8000

Positive and negative data, the coverage phase (every bound at its value and behind it, every field missing, of another
type, given twice) and random bodies, with NUL bytes.  Starts ``foretoken serve builtin`` unless a URL is given.  Prints
one JSON object; exits with 1 when an answer is a 5xx, a status is not in the document, an answer of the documented
shape is another, or the server no longer answers afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

HOOKS = Path(__file__).with_name("hostile_hooks.py")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def attack(
    url: str,
    requests: int,
    seed: int,
    model: str = "builtin",
    minutes: float = 60.0,
    phases: str = "coverage,fuzzing",
    paths: str = ".*",
) -> dict[str, Any]:
    """Send about so many requests; what came of them.

    Args:
        url: of the server.
        requests: how many at least.
        seed: of the random ones.
        model: that is served.
        minutes: after which no more are sent.
        phases: of Schemathesis.
        paths: regular expression of the routes.
    """
    statuses: Counter[int] = Counter()
    routes: Counter[str] = Counter()
    failed: list[str] = []
    start_s = time.monotonic()
    examples, runs = max(5, requests // 40), 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        while sum(statuses.values()) < requests and time.monotonic() - start_s < 60 * minutes:
            flags = ["--phases", phases, "--include-path-regex", paths, "--max-examples", str(examples)]
            process = schemathesis(url, [*flags, "--seed", str(seed + runs)], log, model, 60 * minutes)
            runs += 1
            statuses.clear()
            routes.clear()
            for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
                entry = json.loads(line)
                statuses[entry["status"]] += 1
                routes[entry["route"]] += 1
            if process.returncode:
                failed.append(process.stdout[-4000:] + process.stderr[-500:])
                break
    alive = httpx.get(f"{url}/health", timeout=60).status_code == 200
    answers = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1}, timeout=60)
    return {
        "passed": not failed and alive and answers.status_code == 200,
        "requests": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "routes": dict(sorted(routes.items())),
        "server_errors": sum(count for status, count in statuses.items() if status >= 500),
        "runs": runs,
        "seconds": round(time.monotonic() - start_s),
        "failures": failed,
    }


def schemathesis(url: str, flags: list[str], log: Path, model: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """One run of its command line."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--mode", "all", *flags]
    command += ["--checks", CHECKS, "--generation-allow-x00", "true", "--suppress-health-check", "all", "--no-shrink"]
    command += ["--no-color", "--warnings", "off", "--request-timeout", "120", "--generation-database", "none"]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(HOOKS.parent)}
    env |= {"HOSTILE_LOG": str(log), "HOSTILE_MODEL": model}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds + 600, cwd=log.parent)


def served(target: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server that is ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "foretoken", "serve", target, "--served-name", "builtin", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
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


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="send no more after so long")
    parser.add_argument("--url", default="", help="of a server that runs already")
    parser.add_argument("--target", default="builtin", help="a model")
    args = parser.parse_args()
    process, url = (None, args.url) if args.url else served(args.target)
    try:
        found = attack(url, args.requests, args.seed, minutes=args.minutes)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    print(json.dumps(found))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
