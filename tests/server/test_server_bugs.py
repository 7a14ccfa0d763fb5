"""A bug in the server is an error 500 that the counters name, whatever Python calls it; a client's stays a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import Running, served
from tool_server import make_with_template

from foretoken.core import OptionError
from foretoken.server.completions import _Completions
from foretoken.server.errors import api_error
from foretoken.server.sse import event
from foretoken.server.templates import arguments_of


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


def bugs(running: Running) -> float:
    """Errors that the counters name the server's own."""
    lines = running.client.get("/metrics").text.splitlines()
    counts = [line for line in lines if "request_failure_total" in line and 'reason="internal_error"' in line]
    return float(counts[0].rpartition(" ")[2]) if counts else 0.0


@pytest.mark.parametrize("error", [ValueError("no such luck"), TypeError("no such luck"), KeyError("no such luck")])
def test_a_bug_is_the_servers_error(server: Running, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*_: Any) -> Any:
        raise error

    before = bugs(server)
    monkeypatch.setattr(_Completions, "choice", broken)
    monkeypatch.setattr(_Completions, "delta", broken)
    whole = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    streamed = server.post("/v1/completions", prompt="a", max_tokens=1, stream=True)
    (line,) = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert json.loads(line[6:]) == whole.json()
    assert "luck" not in whole.text + streamed.text
    assert bugs(server) == before + 2
    monkeypatch.undo()
    assert server.complete(max_tokens=1)


@pytest.mark.parametrize(
    "body",
    [
        {"bad_words": [""]},
        {"allowed_token_ids": [0], "min_tokens": 2, "max_tokens": 4, "bad_words": ["a"] * 129},
        {"prompt": []},
        {"structured_outputs": {"regex": "b"}, "allowed_token_ids": [5]},
        {"stop": ["a"], "min_tokens": 9, "max_tokens": 4},
    ],
)
def test_what_the_library_refuses_is_the_clients_error(server: Running, body: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", **{"prompt": "a", **body})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_an_option_names_its_field() -> None:
    error = api_error(OptionError("max_new_tokens", "too many"))
    assert (error.status, error.param, error.message) == (400, "max_tokens", "too many")


def test_an_event_is_json() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        event({"value": float("nan")})


def test_arguments_with_a_number_of_too_many_digits_stay_text(server: Running) -> None:
    raw = '{"x": ' + "1" * 5000 + "}"
    assert arguments_of(raw) == {"unparsed": raw}
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": '{"x": ' + "1" * 4301 + "}"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert "context" in answer.json()["error"]["message"] if answer.status_code == 400 else answer.status_code == 200
