"""Bad input: the right status, OpenAI's error object, the name of the field, and nothing lost."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from running_server import Running, served

from foretoken.server import schemas
from foretoken.server.limits import deeper_than


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer with this status."""
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    content = answer.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(content["error"]["message"]) <= 1000
    return dict(content["error"])


def test_wrong_ids_are_refused_at_the_first() -> None:
    """400,000 errors took seconds, in which nobody else was served."""
    with pytest.raises(ValidationError) as refused:
        schemas.DetokenizeRequest.model_validate({"tokens": ["a"] * 1000})
    assert refused.value.error_count() == 1


GZIPPED = gzip.compress(b'{"prompt": "x"}', mtime=0)

BOUNDS: list[tuple[str, Any, Any]] = [
    ("temperature", 2, 2.01),
    ("temperature", 0, -0.01),
    ("top_p", 1, 1.01),
    ("top_p", 0.01, 0),
    ("top_k", -1, -2),
    ("min_p", 1, 1.1),
    ("presence_penalty", 2, 2.1),
    ("presence_penalty", -2, -2.1),
    ("frequency_penalty", 2, 2.1),
    ("repetition_penalty", 10, 10.1),
    ("repetition_penalty", 0.1, 0),
    ("n", 8, 9),
    ("n", 1, 0),
    ("logprobs", 20, 21),
    ("logprobs", 0, -1),
    ("max_tokens", 2, -1),
    ("seed", 2**63 - 1, 2**63),
    ("seed", -(2**63), -(2**63) - 1),
    ("stop", ["x"] * 16, ["x"] * 17),
    ("stop", ["x" * 256], ["x" * 257]),
    ("stop", "x", ""),
    ("logit_bias", {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(301)}),
    ("logit_bias", {"5": 100}, {"5": 101}),
    ("logit_bias", {"8191": 1}, {"8192": 1}),
    ("bad_words", ["x"] * 128, ["x"] * 129),
    ("allowed_token_ids", [8191], [8192]),
    ("stop_token_ids", [8191], [8192]),
    ("min_tokens", 2, 3),
    ("priority", 2**31 - 1, 2**31),
    ("cache_salt", "x" * 256, "x" * 257),
    ("request_id", "a" * 64, "a" * 65),
    ("request_id", "a.b-c_d", "a b"),
    ("prompt", ["x"] * 64, ["x"] * 65),
    ("prompt", [8191], [8192]),
    ("prompt", "x", ""),
    ("prompt", [1], []),
    ("best_of", 1, 2),
]


@pytest.mark.parametrize(("name", "good", "bad"), BOUNDS, ids=[f"{i}-{b[0]}" for i, b in enumerate(BOUNDS)])
def test_every_bound_at_its_value_and_behind_it(server: Running, name: str, good: Any, bad: Any) -> None:
    base: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "temperature": 1, "seed": 1}
    assert server.post("/v1/completions", **{**base, name: good}).status_code == 200
    error = error_of(server.post("/v1/completions", **{**base, name: bad}), 400)
    assert error["type"] == "invalid_request_error"
    assert (
        error["param"] == name or name in error["message"] or "token" in error["message"] or "empty" in error["message"]
    )


WRONG: list[Any] = [None, True, "abc", [], {}, [[]], {"a": 1}, -1, 1.5, 10**30, "\ud800", [None], ["x", 1], [1, "x"]]
FIELDS = [
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "echo",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "suffix",
    "best_of",
    "user",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "return_token_ids",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "request_id",
    "cache_salt",
    "priority",
    "speculative",
    "prediction",
    "timings",
]


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_types_in_every_field(server: Running, name: str) -> None:
    for value in WRONG:
        body = {"model": "builtin", "prompt": "x", "max_tokens": 1, "seed": 1, name: value}
        answer = server.client.post(
            "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (200, 400, 404), (name, value, answer.text[:300])
        if answer.status_code != 200:
            error_of(answer, answer.status_code)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "builtin", "prompt": "x", "temperature": NaN}',
        b'{"model": "builtin", "prompt": "x", "temperature": Infinity}',
        b'{"model": "builtin", "prompt": "x", "top_p": 1e999}',
        b"\xff\xfe\x00",
        b'{"model": "builtin", "prompt": "' + b"\\u0000" * 3 + b'", "max_tokens": "1"}',
        b"[" * 1000 + b"]" * 1000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
    ],
)
def test_bodies_that_are_no_request(server: Running, body: bytes) -> None:
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = error_of(answer, 400)
    assert body.decode(errors="ignore")[:40] not in error["message"] or len(body) < 3


def test_text_with_zeros_and_unpaired_surrogates(server: Running) -> None:
    assert server.post("/v1/completions", prompt="a\x00b", max_tokens=1).status_code == 200
    error_of(
        server.client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"}),
        400,
    )


def test_depth_is_counted_outside_of_texts() -> None:
    assert not deeper_than(json.dumps({"a": "[" * 500 + '\\"' + "{" * 500}).encode(), 64)
    assert not deeper_than(b"[" * 64 + b"]" * 64, 64)
    assert deeper_than(b"[" * 65 + b"]" * 65, 64)
    assert deeper_than(b'{"a": "\\"", "b": ' + b"[" * 64 + b"]" * 64 + b"}", 64)
    assert not deeper_than(b"[]" * 500, 64)


def test_a_body_that_is_too_large(server: Running) -> None:
    error_of(server.client.post("/v1/completions", content=b"x" * (2 * 2**20 + 1)), 413)
    error_of(server.client.request("GET", "/v1/models", content=b"x" * (2 * 2**20 + 1)), 413)  # whatever the method

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 2**20

    # The server answers and closes before all was sent: the reset may reach the client before the answer does.
    with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        error_of(server.client.post("/v1/completions", content=endless()), 413)
    assert server.complete(max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_routes_that_are_not_there(server: Running, method: str, path: str, status: int) -> None:
    error_of(server.client.request(method, path), status)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/batches"])
def test_a_route_that_is_not_served_is_named(server: Running, path: str) -> None:
    error = error_of(server.post(path, input="x"), 404)
    assert error["message"].startswith(f"POST {path} is not served") and error["code"] == "unknown_url"
    answer = server.client.get("/v1/completions")
    error = error_of(answer, 405)
    assert error["message"] == "GET /v1/completions is not served: use POST" and error["code"] == "wrong_method"
    assert answer.headers["allow"] == "POST"
    upload = {"Content-Type": "multipart/form-data; boundary=x"}
    assert server.client.post("/v1/files", content=b"--x\xe9\xff", headers=upload).status_code == 404


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        ('{"prompt": "é"}'.encode("latin-1"), {}, "byte 12 is not UTF-8 text: send it in UTF-8"),
        (GZIPPED, {}, "it is compressed (gzip)"),
        (GZIPPED, {"Content-Encoding": "gzip"}, "it is compressed (gzip)"),
        (b"\x0b\x02", {"Content-Encoding": "br"}, "it is compressed (br)"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", {}, "a whole number has more than"),
        (b'{"prompt": ', {}, ""),
    ],
    ids=["latin-1", "gzipped", "gzipped and said", "brotli", "a number too long", "cut off"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_cannot_be_read(
    server: Running, path: str, body: bytes, headers: dict[str, str], words: str
) -> None:
    answer = server.client.post(path, content=body, headers={"Content-Type": "application/json", **headers})
    error = error_of(answer, 400)
    assert error["code"] == "json_invalid" and error["message"].startswith("the body is not valid JSON")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"guided_json": {}, "guided_regex": "a+"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"speculative": {"method": "eagle9"}}, "speculative"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post("/v1/completions", **{"prompt": "x", "max_tokens": 1, **body}), 400)["param"] == param


def test_what_chat_refuses(server: Running) -> None:
    def refused(**body: Any) -> dict[str, Any]:
        messages = body.pop("messages", [{"role": "user", "content": "x"}])
        return error_of(server.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 1, **body}), 400)

    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]}]
    assert refused(messages=image)["param"] == "messages"
    assert refused(messages=[])["param"] == "messages"
    assert refused(messages=[{"role": "king", "content": "x"}])["param"] == "messages"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert refused(tools=[tool])["param"] == "tools"  # no template, no tools
    for message in (
        {"role": "user"},
        {"role": "system", "content": None},
        {"role": "user", "content": [{"type": "text", "content": "hello"}]},
    ):
        error = refused(messages=[message])
        assert error["param"] == "messages" and "needs" in error["message"]
    assert refused(tool_choice="required")["param"] == "tool_choice"
    assert refused(top_logprobs=2)["param"] == "top_logprobs"
    assert refused(chat_template_kwargs={"tokenize": True})["param"] == "chat_template_kwargs"
    assert refused(reasoning_effort="high")["param"] == "reasoning_effort"
    assert refused(messages=[{"role": "user", "content": "word " * 2000}])["code"] == "context_length_exceeded"


def test_no_top_log_probabilities_need_no_others(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "top_logprobs": 0}
    answer = server.post("/v1/chat/completions", **body, logprobs=False)
    assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None


def test_a_schema_may_be_a_boolean(server: Running) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    for schema in (True, "true"):
        assert server.complete(max_tokens=4, structured_outputs={"json": schema})
    error = error_of(server.post("/v1/completions", prompt="x", structured_outputs={"json": False}), 400)
    assert "no value fits" in error["message"]


def test_what_limits_the_context_is_said(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.serving.llm.target, "context_why", "the tables of frequencies end there")
    for body in (
        {"prompt": [5] * 1000, "max_tokens": 25},
        {"prompt": [5] * 1024, "max_tokens": 1},
        {"prompt": "x" * 2_000_000, "max_tokens": 1},
    ):
        error = error_of(server.post("/v1/completions", **body), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].endswith(" (the tables of frequencies end there)")


def test_the_context_is_a_limit(server: Running) -> None:
    ids = [5] * 1000
    assert server.complete(ids, max_tokens=24)["usage"]["completion_tokens"] == 24
    assert "context" in error_of(server.post("/v1/completions", prompt=ids, max_tokens=25), 400)["message"]
    assert "context" in error_of(server.post("/v1/completions", prompt=[5] * 1024, max_tokens=1), 400)["message"]


def test_unknown_fields_are_named_in_a_header(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, wibble=1, **{"odd name\n": 2})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "wibble"


def test_unknown_fields_inside_of_others_are_named_once(server: Running) -> None:
    """Fields that say nothing, and fields that a client sends back as it got them, are not named."""
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}", "mood": "good"}}
    body = schemas.ChatRequest.model_validate(
        {
            "model": "builtin",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi", "detail": 1}], "foo": 1},
                {"role": "user", "content": "Hi", "foo": 2},
                {"role": "assistant", "content": None, "annotations": [], "audio": None, "tool_calls": [call]},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "return": {"type": "string"}}}],
            "stream_options": {"include_usage": True, "zz": 1},
            "wibble": None,
        }
    )
    inside = ["messages.content.detail", "messages.foo", "messages.tool_calls.function.mood", "stream_options.zz"]
    assert body.ignored == ["wibble", *inside]
    options = {"include_usage": True, "zz": 1}
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, stream=True, stream_options=options)
    assert answer.headers["x-ignored-fields"] == "stream_options.zz"


def test_ids_of_requests(server: Running) -> None:
    assert server.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    replaced = server.client.get("/health", headers={"X-Request-Id": "x" * 65}).headers["x-request-id"]
    assert len(replaced) == 32
    answer = server.post("/v1/completions", prompt="x", max_tokens=1, request_id="abc")
    assert answer.json()["id"] == "cmpl-abc"


def test_keys() -> None:
    with served(api_keys=("one", "two")) as running:
        for path in (
            "/v1/models",
            "/v1/spec",
            "/metrics",
            "/version",
            "/",
            "/tokenizer_info",
            "/openapi.json",
            "/nothing",
        ):
            assert error_of(running.client.get(path), 401)["code"] == "invalid_api_key"
            wrong = running.client.get(path, headers={"Authorization": "Bearer three"})
            error_of(wrong, 401)
        error_of(running.client.post("/tokenize", json={"prompt": "x"}), 401)
        assert running.client.get("/health").status_code == running.client.get("/ready").status_code == 200
        for key in ("one", "two"):
            assert running.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert running.client.get("/", auth=("anyone", "two")).status_code == 200
        assert "Basic" in running.client.get("/").headers["www-authenticate"]


def test_overload_takes_exactly_what_fits() -> None:
    """R3: as many as run and wait are served, all others get 503 and are told when to come again."""
    with served(max_running=2, max_queued=4) as running:
        answers: list[httpx.Response] = []
        held = threading.Event()
        step = running.serving.llm.engine.step

        def waiting_step() -> Any:
            held.wait(60)
            return step()

        running.serving.llm.engine.step = waiting_step  # type: ignore[method-assign]
        body = {"model": "builtin", "prompt": "x", "max_tokens": 2, "temperature": 0}

        def ask() -> None:
            answers.append(httpx.post(f"{running.url}/v1/completions", json=body, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while len(answers) < 14 and time.monotonic() < end:
            time.sleep(0.02)
        refused = list(answers)
        held.set()
        for thread in threads:
            thread.join(60)
        assert sorted(answer.status_code for answer in answers) == [200] * 6 + [503] * 14
        assert all(answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert error_of(refused[0], 503)["code"] == "queue_full"


def raw(url: str, data: bytes, then: float = 0.0) -> bytes:
    """What a server answers to these bytes on a connection of their own."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(data)
        time.sleep(then)
        sock.settimeout(30)
        reply = b""
        try:
            while part := sock.recv(65536):
                reply += part
        except (TimeoutError, ConnectionResetError):
            pass
        return reply


def test_slow_and_endless_headers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.protocol.GuardedProtocol.headers_s", 0.3)
    with served(body_timeout=0.5) as running:
        assert raw(running.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ") == b""
        begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        for more in (b"X-A: b\r\n" * 20_000, b"X-A: " + b"b" * 200_000, b"X-A: " + b"b" * 40_000 + b"\r\n\r\n"):
            assert b" 400 " in raw(running.url, begin + more).split(b"\r\n")[0]
        large = begin + b"Connection: close\r\nX-A: " + b"b" * 30_000 + b"\r\n\r\n"
        assert b" 200 " in raw(running.url, large).split(b"\r\n")[0]
        upgrade = begin + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"  # there are none: a plain answer
        assert b" 200 " in raw(running.url, upgrade).split(b"\r\n")[0]
        again = raw(running.url, begin + b"\r\n" + begin)  # a second request of the connection, never ended
        assert again.count(b"HTTP/1.1 200") == 1
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        assert b" 408 " in raw(running.url, head).split(b"\r\n")[0]
        assert running.complete(max_tokens=1)
