"""What strangers do to a server: texts that cannot fit, answers that they do not read, names that are not its own."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import pytest
from running_server import Running, make_llm, served
from test_limits import error_of, raw

from foretoken.server import completions, inputs, workers
from foretoken.server.config import ServerSettings
from foretoken.server.errors import ApiError
from foretoken.server.lengths import Lengths
from foretoken.server.limits import Hosts, checked, deeper_than
from foretoken.server.workers import FairQueue

JSON = {"Content-Type": "application/json"}


def wait_until(done: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_requests_are_checked_by_a_worker(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop nor the engine waits for that: it takes milliseconds for a long prompt."""
    engine, workers_of = server.serving.llm.engine, []
    check = engine.check

    def checked_in(request: Any) -> None:
        workers_of.append((asyncio._get_running_loop() is None, threading.current_thread()))
        check(request)

    monkeypatch.setattr(engine, "check", checked_in)
    messages = [{"role": "user", "content": "Hi"}]
    server.complete(bad_words=["x"])
    assert server.post("/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200
    assert len(workers_of) == 2
    for is_outside, thread in workers_of:
        assert is_outside and thread is not server.serving.engine._thread


# -- texts that cannot fit ---------------------------------------------------------------------------------------------


def texts() -> list[str]:
    """Ordinary and odd texts, among them those that one token holds most of."""
    rng = random.Random(7)
    words = [
        "the ",
        "def f(x):\n",
        "    return x\n",
        "zz",
        "   " * 9,
        "é",
        "日本",
        "\U0001f600",
        "0",
        '"',
        "\t",
        "\x00",
    ]
    mixed = ["".join(rng.choice(words) for _ in range(rng.randrange(1, 200))) for _ in range(60)]
    return [*mixed, "", " " * 1000, "\n" + " " * 999, "=" * 500, "a" * 500, "\u00ad\u0100" * 50]


def test_the_bound_is_never_above_the_tokens() -> None:
    tokenizer = make_llm(ServerSettings()).tokenizer
    lengths = Lengths(tokenizer)
    for text in texts():
        assert lengths.least(text) <= len(tokenizer(text, add_special_tokens=False)["input_ids"]), text[:40]
    longest = max(tokenizer.get_vocab(), key=len)
    most = tokenizer.decode([tokenizer.get_vocab()[longest]]) * 40
    assert lengths.least(most) <= len(tokenizer(most, add_special_tokens=False)["input_ids"])
    assert lengths.least("the quick brown fox " * 5000) > 2000, "a bound that says nothing is none"


def test_without_a_known_vocabulary_only_very_long_texts_are_refused() -> None:
    assert Lengths(None).least("x" * 2560) == 10 and Lengths(object()).least("x" * 255) == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "word " * 40_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "word " * 40_000]}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "x", "prediction": {"type": "content", "content": "a b " * 90_000}},
            "prediction",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_000}]}, "messages"),
    ],
)
def test_what_cannot_fit_is_not_tokenised(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    tokenizer, lengths = server.serving.llm.tokenizer, []
    encode = type(tokenizer).__call__

    def noting(self: Any, text: Any, *more: Any, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, *more, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", noting)
    error = error_of(server.post(path, max_tokens=1, **body), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == param
    assert max(lengths, default=0) < 100


# -- the queue of texts ------------------------------------------------------------------------------------------------


def test_cheap_work_comes_first_and_costly_work_comes_too() -> None:
    queue, go, order = FairQueue(2, "test"), threading.Event(), []
    queue.submit(go.wait, cost=1)
    queue.submit(go.wait, cost=1)
    wait_until(lambda: not queue._due[False])
    costs = [30_000, 10, 20_000, 20, 30, 40_000]
    futures = [queue.submit(partial(order.append, cost), cost=cost) for cost in costs]
    go.set()
    for future in futures:
        future.result(60)
    assert [cost for cost in order if cost < 100] == [10, 20, 30]
    assert order.index(30) < order.index(20_000) < order.index(40_000), order


def test_costly_work_is_not_passed_over_for_ever() -> None:
    """Later work is due later: no work is overtaken by more than it costs itself."""
    queue = FairQueue(2, "test")
    first = queue._served_cost + 1000
    queue.submit(lambda: None, cost=900).result(60)
    queue.submit(lambda: None, cost=900).result(60)
    wait_until(lambda: queue._served_cost >= 1800)
    assert first < queue._served_cost + 10


def test_a_thread_takes_no_large_work() -> None:
    """All threads that may take large texts are busy: a small text is done nevertheless, a large one waits."""
    queue, go = FairQueue(3, "test", large=100), threading.Event()
    large = [queue.submit(go.wait, cost=100) for _ in range(3)]
    assert queue.submit(lambda: "small", cost=99).result(60) == "small"
    assert not large[2].running()
    large[2].cancel()
    go.set()
    assert large[0].result(60) and large[1].result(60) and large[2].cancelled()


def test_work_that_fails_tells_who_asked() -> None:
    queue = FairQueue(2, "test")
    with pytest.raises(ZeroDivisionError):
        queue.submit(lambda: 1 / 0).result(60)
    assert queue.submit(lambda: 2).result(60) == 2
    with pytest.raises(ValueError, match="at least 2"):
        FairQueue(1, "test")


def test_large_texts_hold_up_nobody(server: Running) -> None:
    """While every thread that takes large texts has one, a small request and a probe are answered."""
    go = threading.Event()
    futures = [workers.TEXTS.submit(go.wait, cost=10**6) for _ in range(6)]
    try:
        assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert server.client.get("/health").status_code == 200
        assert not any(future.done() for future in futures)
    finally:
        go.set()


# -- how much is asked for ---------------------------------------------------------------------------------------------


def test_more_choices_than_there_are_places(server: Running) -> None:
    """An idle server would refuse this for ever: the request is wrong, the server is not busy."""
    error = error_of(server.post("/v1/completions", prompt=["x"] * 64, n=8, max_tokens=1), 400)
    assert error["param"] == "n" and error["code"] == "too_many_choices" and "512" in error["message"]
    with served(max_running=2, max_queued=1) as running:
        assert running.post("/v1/completions", prompt=["x"] * 3, max_tokens=1).status_code == 200
        error_of(running.post("/v1/completions", prompt=["x"] * 4, max_tokens=1), 400)
        wait_until(lambda: not running.serving.slots.open)


def test_building_a_large_answer_holds_up_nobody(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave, real = threading.Event(), threading.Event(), completions.completion_logprobs

    def slow(*args: Any) -> dict[str, Any]:
        inside.set()
        leave.wait(30)
        return real(*args)

    monkeypatch.setattr(completions, "completion_logprobs", slow)
    answers: list[Any] = []
    body = {"prompt": [5] * 900, "max_tokens": 0, "echo": True, "logprobs": 20}
    asking = threading.Thread(target=lambda: answers.append(server.complete(**body)))
    asking.start()
    try:
        assert inside.wait(30)
        assert server.client.get("/health", timeout=10).status_code == 200 and not answers
    finally:
        leave.set()
    asking.join(30)
    assert len(answers[0]["choices"][0]["logprobs"]["tokens"]) == 900


def test_log_probabilities_of_prompts_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MOST_VALUES", 60)
    for more, param in (({"prompt_logprobs": 2}, "prompt_logprobs"), ({"logprobs": 2, "echo": True}, "logprobs")):
        assert server.complete([5] * 10, n=2, temperature=1, max_tokens=1, **more)
        answer = server.post("/v1/completions", prompt=[[5] * 11] * 2, max_tokens=1, **more)
        error = error_of(answer, 400)
        assert error["param"] == param and "66" in error["message"] and "60" in error["message"]
    assert server.complete([5] * 300, logprobs=2, max_tokens=30)  # those of an answer are not bounded


def test_json_in_pieces_is_the_same_json() -> None:
    value = {"a": [{"b": 'ä "x"', "c": [1, -0.5, None, True, {}, []]}] * 5000}
    assert workers.json_bytes(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# -- encodings of JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_depth_in_every_encoding(server: Running, encoding: str) -> None:
    body = {"model": "builtin", "prompt": "\u5b5b\u7b7b \u2222 x", "max_tokens": 1}
    good = json.dumps(body, ensure_ascii=False).encode(encoding)
    assert server.client.post("/v1/completions", content=good, headers=JSON).status_code == 200
    deep = json.dumps({**body, "x": "DEEP"}, ensure_ascii=False).replace('"DEEP"', "[" * 64 + "]" * 64)
    answer = server.client.post("/v1/completions", content=deep.encode(encoding), headers=JSON)
    assert error_of(answer, 400)["code"] == "json_too_deep"
    answer = server.client.post(
        "/v1/completions", content=deep.replace("[[", "[", 1).replace("]]", "]", 1).encode(encoding), headers=JSON
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "deep"),
    [
        (b'{"a": "' + b'\\"[' * 500 + b'"}', False),
        (b'{"a": "\\\\", "b": ' + b"[" * 64 + b"]" * 64 + b"}", True),
        (b'{"a": "\\\\\\"", "b": ' + b"[" * 64 + b"]" * 64 + b"}", True),
        (b'["' + b"[" * 100 + b'", "' + b"]" * 100 + b'"]', False),
        (b"[[" + b"[]," * 5000 + b"1]]", False),
    ],
)
def test_depth_with_escapes(body: bytes, deep: bool) -> None:
    assert deeper_than(body, 64) is deep


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        checked(b"\xff\xfe\x00")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "allowed", "keyed", "good", "bad"),
    [
        (
            "127.0.0.1",
            (),
            False,
            ["127.0.0.1:80", "localhost", "LOCALHOST:9", "[::1]:8000", ""],
            ["evil.example", "10.0.0.1", "x"],
        ),
        ("0.0.0.0", (), False, ["10.0.0.1:80", "[2001:db8::1]"], ["evil.example:80"]),
        (
            "10.0.0.1",
            ("Api.Example",),
            False,
            ["10.0.0.1", "api.example:80", "api.example."],
            ["evil.example", "10.0.0.2"],
        ),
        ("127.0.0.1", ("*",), False, ["evil.example"], []),
        ("127.0.0.1", (), True, ["api.example"], []),
        ("127.0.0.1", ("api.example",), True, ["api.example"], ["evil.example"]),
    ],
)
def test_names(bound: str, allowed: tuple[str, ...], keyed: bool, good: list[str], bad: list[str]) -> None:
    hosts = Hosts(bound, allowed, keyed)
    for name in good:
        hosts.check(name)
    for name in bad:
        with pytest.raises(ApiError) as refused:
            hosts.check(name)
        assert refused.value.status == 421


def test_a_strangers_name_is_refused(server: Running) -> None:
    body = {"model": "builtin", "prompt": "x", "max_tokens": 1}
    for path in ("/", "/v1/models", "/metrics", "/nothing"):
        error = error_of(server.client.get(path, headers={"Host": "evil.example:80"}), 421)
        assert error["code"] == "unknown_host" and "--allowed-host evil.example" in error["message"]
    error_of(server.client.post("/v1/completions", json=body, headers={"Host": "evil.example"}), 421)
    assert server.client.get("/health", headers={"Host": "10.1.2.3:80"}).status_code == 200, "probes have any name"
    assert server.client.post("/v1/completions", json=body, headers={"Host": "localhost"}).status_code == 200
    with served(allowed_host=("models.example",)) as running:
        assert running.client.get("/v1/models", headers={"Host": "models.example"}).status_code == 200
        error_of(running.client.get("/v1/models", headers={"Host": "evil.example"}), 421)


# -- answers that nobody reads -----------------------------------------------------------------------------------------

LARGE = {"model": "builtin", "prompt": "x", "max_tokens": 48, "n": 4, "seed": 1, "ignore_eos": True, "logprobs": 20}


def head_of(version: str, size: int) -> bytes:
    lines = (
        f"POST /v1/completions HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {size}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def ask_without_reading(running: Running, **more: Any) -> socket.socket:
    """A connection that has asked for some 300 KB and does not read; a system takes a few of them by itself."""
    host, port = running.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    body = json.dumps({**LARGE, **more}).encode()
    sock.sendall(head_of("1.1", len(body)) + body)
    return sock


def written(running: Running) -> float:
    """Choices that the engine has finished."""
    labels = {"model_name": "builtin", "finished_reason": "length"}
    return running.serving.metrics.registry.get_sample_value("foretoken:request_success_total", labels) or 0


def whole(sock: socket.socket, pause_s: float = 0.0) -> dict[str, Any]:
    """The answer, read slowly."""
    sock.settimeout(60)
    data, size = b"", None
    while size is None or len(data) < size:
        part = sock.recv(8192)
        assert part, "the answer broke off"
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        if body and size is None:
            size = len(head) + 4 + int(head.lower().partition(b"content-length: ")[2].split()[0])
        time.sleep(pause_s)
    answer: dict[str, Any] = json.loads(data.partition(b"\r\n\r\n")[2])
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_an_unread_answer_keeps_its_place(stream: bool) -> None:
    """The engine has finished the answer, and it counts until it is read."""
    with served(send_buffer=4096, write_timeout=600, max_running=4, max_queued=0) as running:
        places = running.serving.slots
        with closing(ask_without_reading(running, stream=stream)) as sock:
            wait_until(lambda: written(running) == 4 and running.serving.num_open == 0)
            assert places.open == 4
            error_of(running.post("/v1/completions", prompt="x", max_tokens=1), 503)
            if not stream:
                assert len(whole(sock)["choices"]) == 4
        wait_until(lambda: places.open == 0)
        assert running.complete("x", max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_read_is_cut_off(stream: bool) -> None:
    with (
        served(send_buffer=4096, write_timeout=0.5) as running,
        closing(ask_without_reading(running, stream=stream)) as sock,
    ):
        wait_until(lambda: running.serving.slots.open == 4)
        wait_until(lambda: running.serving.slots.open == 0)
        wait_until(lambda: running.serving.num_open == 0)
        sock.settimeout(30)
        with pytest.raises(ConnectionError):
            while sock.recv(65536):
                pass
            raise AssertionError("the answer ended as if it were whole")


def test_of_many_unread_answers_the_oldest_is_cut() -> None:
    with served(send_buffer=4096, write_timeout=600, max_unread=1, max_running=16) as running:
        places = running.serving.slots
        with closing(ask_without_reading(running)), closing(ask_without_reading(running)) as second:
            wait_until(lambda: written(running) == 8 and places.open == 4)
            with closing(ask_without_reading(running)) as third:
                wait_until(lambda: written(running) == 12 and places.open == 4)
                assert len(whole(third)["choices"]) == 4, "the youngest is read to its end"
            second.settimeout(60)
            with pytest.raises(ConnectionError):
                whole(second)
            wait_until(lambda: places.open == 0)


def test_a_slow_reader_gets_its_answer() -> None:
    with served(send_buffer=4096, write_timeout=20.0) as running, closing(ask_without_reading(running)) as sock:
        assert len(whole(sock, 0.005)["choices"]) == 4


# -- clients that stop sending -----------------------------------------------------------------------------------------


def half_closed(running: Running, body: dict[str, Any], version: str = "1.1") -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    data = json.dumps({"model": "builtin", **body}).encode()
    sock.sendall(head_of(version, len(data)) + data)
    sock.shutdown(socket.SHUT_WR)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_stops_sending_still_gets_the_answer(server: Running, version: str, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream}
    with closing(half_closed(server, body, version)) as sock:
        data = rest_of(sock)
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    assert data.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in data if stream else b'"completion_tokens":60' in data


def test_who_is_gone_frees_its_place(server: Running) -> None:
    """A connection that is closed altogether looks half-closed at first."""
    places = server.serving.slots
    for stream in (False, True):
        sock = half_closed(server, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream})
        wait_until(lambda: places.open == 1)
        sock.close()
        wait_until(lambda: places.open == 0)
        wait_until(lambda: server.serving.num_open == 0)


def test_a_request_that_is_cut_off_in_its_body_is_dropped(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=60)) as sock:
        sock.sendall(head_of("1.1", 50) + b"{")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    assert raw(server.url, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


# -- heads and errors --------------------------------------------------------------------------------------------------


def test_heads(server: Running) -> None:
    for path in ("/", "/health", "/ready", "/v1/models", "/metrics", "/version", "/nothing"):
        head, whole = server.client.head(path), server.client.get(path)
        assert head.status_code == whole.status_code and head.content == b""
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.client.head("/v1/completions").status_code == 405
    answer = raw(server.url, b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"content-length" in answer


GOOD = {"model": "builtin", "prompt": "x", "max_tokens": 1}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
OURS = r"\b(str|dict|dictionary|union|instance)\b|list\[|constrained|Input should|Value error|object to extract"


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"stop": ["x"] * 17}, "stop", "16 items"),
        ({"stop": 5}, "stop", "a text or a list"),
        ({"stop": ["a", 5]}, "stop", "stop.1: must be a text"),
        ({"stop": ["x" * 257]}, "stop", "256 characters"),
        ({"speculative": 5}, "speculative", "an object"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "an object or a text"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction", "a text or a list"),
        ({"response_format": {"type": "x"}}, "response_format", "'text', 'json_object' or 'json_schema'"),
        ({"seed": 1.5}, "seed", "a whole number"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"model": None}, "model", "a text"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "'abc' does not match ^[0-9]{1,10}$"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' does not match ^[0-9]{1,10}$"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias", "'1.5' does not match ^[0-9]{1,10}$"),
        ({"request_id": "a b"}, "request_id", "'a b' does not match ^[A-Za-z0-9._-]{1,64}$"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"stream": False, "stream_options": {}}, "stream_options", "needs stream: true"),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format", "has no schema"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            "response_format",
            "has no schema",
        ),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format", "of type text has no schema"),
    ],
)
def test_errors_name_the_field_and_no_class(server: Running, wrong: dict[str, Any], param: str, words: str) -> None:
    error = error_of(server.client.post("/v1/completions", json={**GOOD, **wrong}), 400)
    assert error["param"] == param and words in error["message"]
    assert re.search(OURS, error["message"]) is None


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_without_its_header(server: Running, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = server.client.post("/v1/completions", content=json.dumps(GOOD), headers=headers)
    error = error_of(answer, 400)
    assert "Content-Type: application/json" in error["message"]
    assert httpx.post(f"{server.url}/v1/completions", content=json.dumps(GOOD), headers=JSON).status_code == 200
