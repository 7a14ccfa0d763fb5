"""A small server for the page's tests: it streams rounds that the real engine has written down.

What a prompt says decides how it behaves: REFUSE, QUOTA and BUSY are answered with an error (400, 429, 503), BREAK ends
in the middle of a stream, FAIL sends an error within it, and DIFFER makes plain decoding write another last token.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import foretoken.server

PAGE = Path(foretoken.server.__file__).with_name("page")
RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("page_recorded.json").read_text(encoding="utf-8"))
POLICY = "default-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
REFUSALS = {
    "REFUSE": (400, "max_new_tokens=9000 exceeds the model's context"),
    "QUOTA": (429, "the key's tokens of this minute are used up"),
    "BUSY": (503, "the server is busy: all 256 places are taken;\ntry again"),
}
REASON = "plain decoding is faster here: a round of 4 drafts costs 3.1 plain rounds"


class Mock(ThreadingHTTPServer):
    """Where it listens, and what it was asked.

    Attributes:
        requests: paths and bodies of all requests that write text.
        key: the only key that is let in; empty for none.
        pause_s: between two chunks.
        delay_s: seconds before the first chunk, by the request's body.
        is_chat: whether the model has a chat template.
        sampling: options that it comes with.
        drafts: whether speculative requests have drafts.
        replicas: how many a gateway has; the state is that of one of them, in turn, the counters are those of all.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.key = ""
        self.pause_s = 0.01
        self.delay_s: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.is_chat = False
        self.sampling: dict[str, float] = {}
        self.drafts = True
        self.rounds = 0
        self.replicas, self.num_reports = 1, 0

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a stream is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Mock

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _send(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def _json(self, status: int, value: Any, **headers: str) -> None:
        self._send(status, "application/json", json.dumps(value).encode(), **headers)

    def _is_allowed(self) -> bool:
        authorization = self.headers.get("Authorization", "")
        if not self.server.key or authorization == f"Bearer {self.server.key}":
            return True
        self._json(401, {"error": {"message": "give a valid key", "type": "authentication_error"}})
        return False

    def do_GET(self) -> None:
        """The page, and what it asks for every second."""
        name = self.path.strip("/") or "index.html"
        file = PAGE / name
        if file.parent == PAGE and file.is_file():
            self._send(200, KINDS[file.suffix], file.read_bytes())
        elif name in ("v1/spec", "metrics") and self._is_allowed():
            content = json.dumps(_spec(self.server)) if name == "v1/spec" else _metrics(self.server)
            self._send(200, "application/json", content.encode())
        elif name not in ("v1/spec", "metrics"):
            self._json(404, {"error": {"message": "there is no such page", "type": "not_found_error"}})

    def do_POST(self) -> None:
        """A stream."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        self.server.requests.append((self.path, body))
        text = json.dumps(body)
        for word, (status, message) in REFUSALS.items():
            if word in text:
                wait = {} if status == 400 else {"Retry_After": "7"}
                self._json(status, {"error": {"message": message, "type": "error"}}, **wait)
                return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(self.server.delay_s(body))
        for index, chunk in enumerate(answer(self.path, body, text, self.server.drafts)):
            if index == 3 and "BREAK" in text:
                return
            if index == 3 and "FAIL" in text:
                chunk = {"error": {"message": "out of memory: try again", "type": "overloaded_error"}}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()
            if "error" in chunk:
                return
            self.server.rounds += 1
            time.sleep(self.server.pause_s)
        self.wfile.write(b"data: [DONE]\n\n")


def answer(path: str, body: dict[str, Any], text: str = "", drafts: bool = True) -> Iterator[dict[str, Any]]:
    """Chunks as the server sends them."""
    speculates = drafts and body["speculative"]["enabled"]
    chunks = copy.deepcopy(RECORDED) if speculates else list(_plain("DIFFER" in text))
    if "chat" in path:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if not body["speculative"].get("explain"):
                choice.pop("speculative", None)
            elif choice["finish_reason"]:
                choice["speculative"]["why"] = REASON
            if "chat" in path:
                choice["delta"] = {"content": choice.pop("text")}
        yield chunk


def _plain(differs: bool) -> Iterator[dict[str, Any]]:
    """The recorded tokens one by one."""
    tokens = [
        (token, text)
        for chunk in RECORDED
        for choice in chunk["choices"]
        for entry in choice["speculative"]["rounds"]
        for token, text in zip(  # noqa: B905 (a limit cuts the last round)
            choice["token_ids"], [entry["texts"][n] for n in entry["accepted"]] + [entry["next_text"]]
        )
    ]
    if differs:
        tokens[-1] = (tokens[-1][0] + 1, "?")
    root = 199
    for index, (token, text) in enumerate(tokens):
        round_ = {"index": index, "tokens": [root], "parents": [-1], "p": [None], "q": [None], "accepted": []}
        round_ |= {"next_token": token, "next_is_bonus": True, "drafter": "none", "texts": ["?"], "next_text": text}
        round_ |= {"draft_s": 0.0, "target_s": 0.004, "verify_s": 0.0002, "overhead_s": 0.0003}
        reason = "length" if index == len(tokens) - 1 else None
        choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [token], "origins": ["plain"]}
        yield {"choices": [choice | {"speculative": {"rounds": [round_], "why": ""}}]}
        root = token


def _spec(server: Mock) -> dict[str, Any]:
    server.num_reports += 1
    rounds = server.rounds + 1_000_000 * (server.num_reports % server.replicas)
    state = {"running": 1, "waiting": 2, "kv_bytes": 5_242_880, "kv_budget_bytes": None, "dead": None}
    return {
        "model": "builtin",
        "drafter": "model,tree=3x2x1x1",
        "verifier": "auto",
        "controller": "auto",
        "lossless": True,
        "chat_template": server.is_chat,
        "sampling_defaults": {"values": server.sampling, "source": ""},
        "state": state | {"draining": False, "rounds": rounds, "controller": {"costs": {"plain_ms": 4.25}}},
        "limits": {"max_running": 16, "max_queued": 256, "context_length": 1024},
    }


def _metrics(server: Mock) -> str:
    values = {"generation_tokens_total": server.rounds, "rounds_total": server.rounds}
    values |= {"num_requests_running": 1, "num_requests_waiting": 2, "kv_cache_bytes": 5_242_880}
    lines = [] if server.replicas == 1 else [f'foretoken:replicas_ready{{model_name="b"}} {server.replicas}']
    for name, value in values.items():
        lines.append(f"# TYPE foretoken:{name} {'counter' if name.endswith('total') else 'gauge'}")
        lines += [f'foretoken:{name}{{replica="{i}",model_name="b"}} {value}.0' for i in range(server.replicas)]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def mock() -> Iterator[Mock]:
    """A mock server that stops with the block."""
    with Mock() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=10)
