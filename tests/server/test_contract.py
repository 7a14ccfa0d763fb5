"""Lines of the contract that no other file tests: tools, prompts' probabilities, tenants, times, refusals, the log."""

from __future__ import annotations

import base64
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import Running, served

import foretoken as ft
from foretoken.llm import Llm
from foretoken.server import config, templates
from foretoken.server.config import ServerSettings
from foretoken.server.logs import JsonLines

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}{% endfor %}"
    "{% if tools %}tools:{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}<assistant>"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def make_templated(settings: ServerSettings) -> Llm:
    llm = ft.load("builtin", "ngram", dtype="float32", controller="constant", known=True)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


@pytest.fixture(scope="module")
def templated() -> Iterator[Running]:
    with served(make_templated) as running:
        yield running


def chat(running: Running, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello."}]
    return running.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 4, "temperature": 0, **body})


def prompt_of(running: Running, **body: Any) -> str:
    """The prompt that a chat request was turned into."""
    answer = chat(running, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["choices"][0]["prompt_token_ids"]
    return str(running.serving.llm.tokenizer.decode(ids))


# -- chat ------------------------------------------------------------------------------------------------------------


def test_the_template_is_told_of_tools_calls_and_effort(templated: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 5}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    text = prompt_of(templated, messages=messages, tools=[TOOL], reasoning_effort="low")
    assert text == "<user>Hi<assistant>look(5)<tool>seentools:look effort low<assistant>"
    assert "tools:" not in prompt_of(templated, tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_parsed(templated: Running, stream: bool, parallel: bool) -> None:
    """The model is made to write two calls, by a grammar."""
    calls = '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'
    body: dict[str, Any] = {
        "tools": [TOOL],
        "parallel_tool_calls": parallel,
        "structured_outputs": {"choice": [calls * 2]},
        "max_tokens": 120,
    }
    if stream:
        text = chat(templated, stream=True, **body).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        parsed = [call for delta in deltas for call in delta.get("tool_calls", [])]
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        answer = chat(templated, **body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        parsed, reason = choice["message"]["tool_calls"], choice["finish_reason"]
        assert choice["message"]["content"] is None
    assert reason == "tool_calls" and len(parsed) == (2 if parallel else 1)
    assert [json.loads(call["function"]["arguments"]) for call in parsed] == [{"x": 1}] * len(parsed)
    assert {call["type"] for call in parsed} == {"function"} and all(call["id"].startswith("call_") for call in parsed)


def test_what_chat_cannot_do_is_refused(server: Running, templated: Running) -> None:
    for running, body, param in (
        (server, {"tools": [TOOL]}, "tools"),
        (server, {"reasoning_effort": "low"}, "reasoning_effort"),
        (templated, {"tool_choice": "required"}, "tool_choice"),
        (templated, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        (templated, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (templated, {"stream": True, "prompt_logprobs": 1}, "stream"),
        (templated, {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, "messages"),
    ):
        answer = chat(running, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_template_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_S", 0.2)

    def make(settings: ServerSettings) -> Llm:
        llm = make_templated(settings)
        llm.tokenizer.apply_chat_template = lambda *a, **k: time.sleep(1.0)
        return llm

    with served(make) as running:
        answer = chat(running)
        assert answer.status_code == 400 and "takes too long" in answer.json()["error"]["message"]
        assert running.complete(max_tokens=1)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_probabilities_of_a_prompt(server: Running, templated: Running) -> None:
    """vLLM's field, beside the old ``echo``: the same numbers."""
    ids = server.serving.llm.tokenizer("def fib(n):")["input_ids"]
    choice = server.complete(ids, prompt_logprobs=2, echo=True, logprobs=4, max_tokens=2)["choices"][0]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(ids)
    for place in range(1, len(ids)):
        assert rows[place][str(ids[place])]["logprob"] == choice["logprobs"]["token_logprobs"][place]
        assert 2 <= len(rows[place]) <= 3
        assert len(choice["logprobs"]["top_logprobs"][place]) >= 4
    all_rows = server.complete(ids, prompt_logprobs=20, max_tokens=1)["choices"][0]["prompt_logprobs"]
    ranks = [row[str(token)]["rank"] for token, row in zip(ids[1:], all_rows[1:], strict=True)]
    assert [row[str(token)]["rank"] for token, row in zip(ids[1:], rows[1:], strict=True)] == ranks
    assert max(ranks) > 2, "a token outside of the two that were asked for"
    answer = chat(templated, prompt_logprobs=1, return_token_ids=True).json()
    assert len(answer["prompt_logprobs"]) == len(answer["choices"][0]["prompt_token_ids"])
    for body in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        assert server.post("/v1/completions", prompt="x", stream=True, **body).json()["error"]["param"] == "stream"


@pytest.mark.parametrize("extra", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_only_the_prompt(server: Running, extra: dict[str, Any]) -> None:
    ends = sorted(server.serving.llm.target.eos_token_ids)  # the token that is not told may be one of these
    body = {"max_tokens": 0, "echo": True, "temperature": 0, "allowed_token_ids": ends}
    answer = server.post("/v1/completions", prompt="def f(x):", **body, **extra)
    if not extra:
        completion = answer.json()
        assert completion["choices"][0]["finish_reason"] == "length"
        assert completion["choices"][0]["text"] == "def f(x):" and completion["usage"]["completion_tokens"] == 0
        return
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == "def f(x):"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons.count("length") == 1 and reasons.count(None) == len(reasons) - 1
    assert chunks[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"8192": 1}}, "logit_bias"),
        ({"stop_token_ids": [8192]}, "stop_token_ids"),
        ({"allowed_token_ids": [8192]}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"max_tokens": 1024}, "max_tokens"),
        ({"prompt": [1] * 1024}, "prompt"),
        ({"prompt": "a" * 300_000}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_refusals_name_the_field(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", **{"prompt": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", [{"text": "a"}]),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 8),
        ("logits_processors", ["a.B"]),
        ("custom_logit_processor", "a"),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {"type": "object"}),
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("stop_regex", "a+"),
        ("min_new_tokens", 2),
        ("n_predict", 2),
        ("typical_p", 0.5),
        ("length_penalty", 0.5),
        ("mirostat", 2),
        ("xtc_probability", 0.1),
        ("dry_multiplier", 0.8),
        ("lora_path", "a"),
    ],
)
def test_fields_of_other_servers_are_refused_unless_they_are_off(server: Running, field: str, value: Any) -> None:
    """An answer that ignores them is another answer than the one that was asked for."""
    for answer in (server.post("/v1/completions", prompt="a", **{field: value}), chat(server, **{field: value})):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
        assert error["message"].startswith(f"{field} is not served: ")
    off = 1.0 if field in ("typical_p", "length_penalty") else type(value)()
    for nothing in (None, off):
        assert server.post("/v1/completions", prompt="a", max_tokens=1, **{field: nothing}).status_code == 200


def test_a_chat_has_no_echo_and_a_grammar_no_second_form(server: Running) -> None:
    assert chat(server, echo=True).json()["error"]["param"] == "echo"
    assert chat(server, echo=False).status_code == 200
    for name, value in (("structural_tag", "{}"), ("whitespace_pattern", " "), ("disable_any_whitespace", True)):
        answer = server.post("/v1/completions", prompt="a", structured_outputs={"regex": "a", name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "structured_outputs")
        assert error["message"].startswith(f"structured_outputs.{name} is not served: ")


@pytest.mark.parametrize("element", ["a", True, [1, "a"], None, 1.5])
def test_a_million_wrong_elements_cost_no_time(server: Running, element: Any) -> None:
    """Each wrong element had its own report once: ten seconds and 900 MB."""
    body = json.dumps({"model": "builtin", "prompt": [1, *[element] * 150_000]})
    began = time.process_time()
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert time.process_time() - began < 5


# -- tenants ---------------------------------------------------------------------------------------------------------


def cached(running: Running, key: str, **body: Any) -> int:
    answer = running.client.post(
        "/v1/completions",
        json={"model": "builtin", "prompt": "def fib(n):\n" * 12, "max_tokens": 2, **body},
        headers={"Authorization": f"Bearer {key}"},
    )
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_do_not_see_each_others_texts() -> None:
    """Timing shows whether a prompt is cached, so no cache is shared across keys or salts."""
    with served(api_keys=("one", "two")) as running:
        assert cached(running, "one") == 0
        assert cached(running, "one") > 0
        assert cached(running, "two") == 0
        assert cached(running, "two") > 0
        assert cached(running, "one", cache_salt="s") == 0


# -- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_a_504(stream: bool) -> None:
    with served(request_timeout=0.3) as running:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "temperature": 1, "stream": stream}
        answer = running.post("/v1/completions", **body)
        if stream:
            assert "[DONE]" not in answer.text
            error = json.loads(answer.text.strip().splitlines()[-1][6:])["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert error["code"] == "deadline_exceeded" and error["type"] == "timeout_error"
        assert (
            'foretoken:request_failure_total{model_name="builtin",reason="deadline_exceeded"} 1.0'
            in running.client.get("/metrics").text
        )


def test_smaller_priorities_first() -> None:
    """One runs, two wait; the one that came last is the more urgent."""
    with served(max_running=1) as running:
        done: list[str] = []

        def ask(name: str, priority: int, tokens: int) -> None:
            body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "priority": priority}
            assert running.post("/v1/completions", **body).status_code == 200
            done.append(name)

        threads = []
        for name, priority, tokens in (("first", 0, 300), ("patient", 5, 4), ("urgent", -5, 4)):
            threads.append(threading.Thread(target=ask, args=(name, priority, tokens)))
            threads[-1].start()
            end = time.monotonic() + 20
            while running.serving.num_open < len(threads) and time.monotonic() < end:
                time.sleep(0.002)
        for thread in threads:
            thread.join(60)
        assert done == ["first", "urgent", "patient"]


def test_hostile_grammars_leave_the_others_alone(server: Running) -> None:
    """Each is answered within its two seconds, and requests with known grammars, or none, do not stand behind them."""
    server.complete(structured_outputs={"regex": "[ab]{3}"}, max_tokens=8)
    answers: list[httpx.Response] = []

    def hostile(index: int) -> None:
        pattern = ".*" * (20_000 + index)
        body = {"model": "builtin", "prompt": "x", "structured_outputs": {"regex": pattern}}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=hostile, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    texts = [server.complete(max_tokens=2)["choices"][0]["text"] for _ in range(3)]
    known = server.complete(structured_outputs={"regex": "[ab]{3}"}, max_tokens=8)["choices"][0]["text"]
    for thread in threads:
        thread.join(60)
    assert len(set(texts)) == 1 and len(known) == 3
    for (
        answer
    ) in answers:  # those that were accepted behind another one are told to come again, not that they are wrong
        code = answer.json()["error"]["code"]
        assert (answer.status_code, code) in {
            (400, "invalid_grammar"),
            (400, "grammar_too_complex"),
            (503, "grammars_queued"),
        }
    assert any(answer.status_code == 400 for answer in answers)


def test_the_server_answers_others_while_it_tokenises() -> None:
    """R9: long work is done in threads; the event loop only waits."""
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, text: str, **options: Any) -> Any:
            if text == "slow":
                inside.set()
                leave.wait(30)
            return self.inner(text, **options)

    def make(settings: ServerSettings) -> Llm:
        llm = make_templated(settings)
        llm.tokenizer = Slow(llm.tokenizer)
        return llm

    with served(make) as running:
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(running.post("/tokenize", prompt="slow").status_code))
        asking.start()
        try:
            assert inside.wait(30)
            assert running.client.get("/health").status_code == 200
            assert running.complete(max_tokens=2)
            assert not answers
        finally:
            leave.set()
        asking.join(30)
        assert answers == [200]


# -- the log and the wire --------------------------------------------------------------------------------------------


def test_every_request_has_one_line() -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("foretoken.requests")
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        with served(log_prompts=10) as running:
            running.complete("secret\nlines and more", max_tokens=3)
            running.post("/v1/completions", prompt="x", temperature=-1)
            running.post("/v1/completions", prompt="x", stream=True, max_tokens=2)
            running.client.get("/nothing", headers={"X-Request-Id": "abc"})
            running.client.get("/health")
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 200, 404]
    assert lines[0]["completion_tokens"] == 3 and lines[0]["prompt"] == "secret\nlin" and lines[0]["route"]
    assert lines[3]["request_id"] == "abc" and all(line["seconds"] >= 0 for line in lines)


def test_bytes_that_are_no_http_are_refused_in_the_same_shape(server: Running) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"\x00\x01 nonsense\r\n\r\n")
        answer = b""
        while part := sock.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "bad_http"


def test_blocks_are_timed_one_by_one(server: Running) -> None:
    def seen() -> float:
        for line in server.client.get("/metrics").text.splitlines():
            if line.startswith("foretoken:inter_token_latency_seconds_count{"):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    before = seen()
    rounds = server.complete(max_tokens=20)["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert seen() - before == rounds - 1


def test_a_browser_may_show_its_key_as_a_password() -> None:
    with served(api_keys=("one",)) as running:
        for key, status in (("one", 200), ("two", 401), ("", 401)):
            header = {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}
            assert running.client.get("/", headers=header).status_code == status
        assert running.client.get("/openapi.json").status_code == 401


def test_flags_settings_and_documentation_agree() -> None:
    """Every setting is a flag and stands in the documentation, and its environment variable follows the page's rule."""
    import dataclasses
    import inspect

    from foretoken.cli.serve import serve_command

    flags = set(inspect.signature(serve_command).parameters)
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    assert "an environment variable (`FORETOKEN_MAX_RUNNING` for `--max-running`)" in text
    needed = {"key_running": {"api_keys": "k"}, "key_queued": {"api_keys": "k", "key_running": "1"}}
    needed |= {"key_tokens_per_minute": {"api_keys": "k"}, "online_save": {"online": "yes"}}
    values = {"exact": "bitwise", "metrics_compat": "vllm", "allowed_origin": "null", "kv_memory": "1GiB"}
    values |= {"prefix_memory": "1GiB", "prefix_cache": "no", "host": "localhost"}
    for field in dataclasses.fields(config.ServerSettings):
        flag = "api_key" if field.name == "api_keys" else field.name
        assert flag in flags, field.name
        shown = flag.replace("_", "-")
        assert f"`--{shown}`" in text or flag == "model", shown
        other = values.get(field.name, {bool: "yes", int: "7", float: "7"}.get(type(field.default), "other"))
        given = {**needed.get(field.name, {}), field.name: other}
        read = config.settings_from({}, None, {f"FORETOKEN_{name.upper()}": value for name, value in given.items()})
        assert getattr(read, field.name) != field.default, flag
    for named in ("`FORETOKEN_MODEL`", "`FORETOKEN_API_KEY`", "`--config`", "`--api-key-file`", "`--replicas`"):
        assert named in text
