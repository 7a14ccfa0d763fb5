"""``python -O`` removes asserts, also those of tests, so a server of its own is asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import httpx


def test_no_refusal_is_lost_without_asserts() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-O", "-m", "foretoken", "serve", "builtin", "--port", str(port), "--api-key", "k"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FORETOKEN_DTYPE": "float32", "FORETOKEN_DRAFTER": "ngram"}
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=60) as client:
            for body, status in (
                ({}, 200),
                ({"prompt": [8192]}, 400),
                ({"prompt": []}, 400),
                ({"n": 9}, 400),
                ({"temperature": -1}, 400),
                ({"temperature": 1e400}, 400),
                ({"max_tokens": -1}, 400),
                ({"max_tokens": 5000}, 400),
                ({"min_tokens": 99}, 400),
                ({"logit_bias": {"9999": 1}}, 400),
                ({"allowed_token_ids": [9999]}, 400),
                ({"structured_outputs": {"regex": "("}}, 400),
                ({"speculative": {"method": "x"}}, 400),
                ({"guided_json": {}, "guided_regex": "a"}, 400),
                ({"model": "x"}, 404),
            ):
                text = json.dumps({"model": "builtin", "prompt": "x", "max_tokens": 2, **body})
                answer = client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
                assert answer.status_code == status, (body, answer.text)
            deep = b'{"model":"builtin","prompt":' + b"[" * 1000 + b"]" * 1000 + b"}"
            assert client.post("/v1/completions", content=deep).status_code == 400
            assert client.post("/v1/completions", content=b"x" * (2**21 + 1)).status_code == 413
        assert httpx.post(f"{url}/v1/completions", json={"model": "builtin", "prompt": "x"}).status_code == 401
    finally:
        running.kill()
        running.wait(30)
