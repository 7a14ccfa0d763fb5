"""Starts of a server's process: its messages, whoever reads them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from test_lifecycle import QUIET, free_port, process


def test_the_log_names_how_it_runs() -> None:
    with process("--drafter", "ngram") as (running, _):
        running.send_signal(signal.SIGTERM)
        lines = (running.stderr or []) if running.stderr is None else running.stderr.read().splitlines()
        loaded = next(json.loads(line) for line in lines if line.startswith("{") and "loaded builtin" in line)
        assert loaded["drafter"] == "ngram" and "drafter ngram" in loaded["message"]
        for name in ("forward", "exactness", "threads"):
            assert loaded[name]
        assert any("loading builtin" in line for line in lines) and any("serving builtin at" in line for line in lines)


@pytest.mark.parametrize("stderr", ["closed", "full", "gone"])
def test_nobody_need_read_stderr(stderr: str) -> None:
    """Closed before the start, a pipe that is full already, one whose reader has gone: the server serves and ends."""
    port = free_port()
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--dtype", "float32", "--drafter", "none"]
    read_end, write_end = os.pipe()
    if stderr == "full":
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(write_end, True)
    shell = 'exec "$@" 2>&-' if stderr == "closed" else 'exec "$@"'
    running = subprocess.Popen(
        ["sh", "-c", shell, "sh", *command, "--port", str(port)], stderr=write_end, env=QUIET, close_fds=True
    )
    os.close(write_end)
    if stderr == "gone":
        os.close(read_end)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                if httpx.get(f"{url}/ready", timeout=10).status_code == 200:
                    break
            except httpx.TransportError:
                assert running.poll() is None
            time.sleep(0.1)
        body = {"model": "builtin", "prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{url}/nothing", timeout=60).status_code == 404
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait(30)
        if stderr != "gone":
            os.close(read_end)


def test_an_empty_key_is_no_key() -> None:
    """A user who sets the variable means to have a key: an open server would be the opposite."""
    command = [sys.executable, "-m", "foretoken", "serve", "builtin", "--port", str(free_port())]
    for more, words in (({"FORETOKEN_API_KEY": ""}, "set and empty"), ({"FORETOKEN_API_KEYS": ","}, "set and empty")):
        ended = subprocess.run(command, capture_output=True, text=True, env={**QUIET, **more}, timeout=120)
        assert ended.returncode == 2 and words in ended.stderr and ended.stderr.count("\n") == 1
    ended = subprocess.run(
        [*command, "--api-key", "same", "--api-key", "same"], capture_output=True, text=True, env=QUIET, timeout=120
    )
    assert ended.returncode == 2 and "given twice" in ended.stderr and "same" not in ended.stderr
