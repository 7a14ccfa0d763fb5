"""Limits on requests where a server has little memory for keys and values."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import Running, make_llm, served
from test_contract import make_templated

from foretoken.engine.admission import SCRATCH
from foretoken.llm import Llm
from foretoken.server.config import ServerSettings
from foretoken.server.serving import Serving, tell_memory

MESSAGES = [{"role": "user", "content": "Hello."}]
LONG = [{"role": "user", "content": "word " * 300}]
SLOTS = 256
"""Slots of the memory; the model's context has 1,024."""


def memory(slots: int) -> str:
    """A setting that holds so many slots."""
    return str(make_llm(ServerSettings()).target.kv_bytes_per_token * slots)


def endless(settings: ServerSettings) -> Llm:
    """A model that never ends an answer by itself."""
    llm = make_templated(settings)
    llm.target.eos_token_ids = frozenset()
    return llm


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with served(endless, kv_memory=memory(SLOTS)) as running:
        yield running


def test_the_length_that_is_told_is_the_one_that_fits(small: Running) -> None:
    assert small.client.get("/v1/models").json()["data"][0]["max_model_len"] == SLOTS - SCRATCH


ROUTES = {
    "/v1/completions": {"prompt": "x = 1\n" * 40},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 32_000},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_limit_that_nobody_named_is_cut_to_what_fits(small: Running, path: str) -> None:
    """A limit that is cut to the context is cut to the memory, too."""
    most = SLOTS - SCRATCH
    body = ROUTES[path] if path != "/v1/completions" else {"prompt": [5] * (most - 4)}
    answer = small.post(path, **body)
    assert answer.status_code == 200, answer.text
    usage = {name: value for name, value in answer.json()["usage"].items() if isinstance(value, int)}
    usage.pop("total_tokens", None)
    assert sum(usage.values()) == most
    text = answer.text.replace(" ", "")
    assert any(f'"{word}"' in text for word in ("length", "max_output_tokens", "model_context_window_exceeded"))


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "x", "max_tokens": 500}),
        ("/v1/chat/completions", "max_tokens", {"messages": MESSAGES, "max_tokens": 500}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": MESSAGES, "max_completion_tokens": 500}),
        ("/v1/completions", "prompt", {"prompt": [5] * SLOTS}),
        ("/v1/chat/completions", "messages", {"messages": LONG}),
        ("/v1/responses", "input", {"input": "word " * 300}),
    ],
)
def test_what_cannot_fit_is_refused_by_its_own_name(
    small: Running, path: str, param: str, body: dict[str, Any]
) -> None:
    answer = small.post(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"--kv-memory {small.serving.settings.kv_memory}" in error["message"]
    assert ("the prompt has" if param in ("prompt", "messages", "input") else f"{param} is 500") in error["message"]


def test_a_default_fits_behind_a_prompt_that_almost_fills_the_context(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=[5] * 1020, ignore_eos=True)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("slots", "starts"), [(1, False), (SCRATCH + 1, False), (SCRATCH + 2, True)])
def test_a_memory_too_small_for_any_request_is_no_start(slots: int, starts: bool) -> None:
    async def failure() -> Exception | None:
        serving = Serving(ServerSettings(kv_memory=memory(slots)), make_llm)
        await serving.start()
        await serving.stop(0.0)
        return serving.failed

    failed = asyncio.run(failure())
    assert (failed is None) is starts
    if failed is not None:
        assert f"--kv-memory {memory(slots)} " in str(failed) and memory(SCRATCH + 2) in str(failed)


def memory_warnings(start: Callable[[], None], caplog: pytest.LogCaptureFixture) -> str:
    """The warnings about memory that a start logs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foretoken.server"):
        start()
    return "\n".join(record.getMessage() for record in caplog.records if "--kv-memory" in record.getMessage())


@pytest.mark.parametrize(
    ("contexts", "more", "count", "each"),
    [
        (0.5, {}, 1, (1024 + SCRATCH) // 2 - SCRATCH),
        (1.5, {}, 1, 1024),
        (3.5, {}, 3, 1024),
        (3.5, {"max_running": 3}, None, 0),
        (1.5, {"default_max_tokens": 128}, 8, 128),
        (1.5, {"default_max_tokens": 32}, None, 0),
        (0.0, {}, None, 0),
    ],
)
def test_the_start_says_how_many_run_at_once(
    caplog: pytest.LogCaptureFixture, contexts: float, more: dict[str, Any], count: int | None, each: int
) -> None:
    limit = memory(int(contexts * (1024 + SCRATCH))) if contexts else ""
    settings = ServerSettings(kv_memory=limit, **more)
    llm = make_llm(settings)
    llm.engine.requests.limit_memory(settings.kv_bytes, 0)
    warnings = memory_warnings(lambda: tell_memory(settings, llm), caplog)
    if count is None:
        assert not warnings
    else:
        assert f"only {count} of --max-running 16 requests" in warnings and f"reserves up to {each} tokens" in warnings
        assert "--default-max-tokens" in warnings


def test_a_cap_on_requests_that_name_no_limit() -> None:
    with served(endless, kv_memory=memory(1500), default_max_tokens=12) as running:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):  # messages must name a limit
            usage = running.post(path, **ROUTES[path]).json()["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) == 12
        chat = running.post("/v1/chat/completions", messages=MESSAGES).json()
        assert chat["choices"][0]["finish_reason"] == "length"
        chat = running.post("/v1/chat/completions", messages=MESSAGES, max_tokens=20).json()
        assert chat["usage"]["completion_tokens"] == 20
