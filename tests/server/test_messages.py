"""``/v1/messages`` by Anthropic's own client: answers, streams, tools, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import Running, served
from tool_server import CALL, SCHEMA, make_with_template, script

anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

__all__ = ["script"]
GREEDY = {"temperature": 0}
TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {"model": "builtin", "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def tools() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


@pytest.fixture
def client(tools: Running) -> Any:
    return anthropic.Anthropic(base_url=tools.url, api_key="anything", max_retries=0)


def prompt_of(running: Running, monkeypatch: pytest.MonkeyPatch, **body: Any) -> str:
    """The prompt that a request was turned into."""
    from foretoken.server.turn import ChatTurn

    seen: list[str] = []
    encoded = ChatTurn._encoded
    monkeypatch.setattr(ChatTurn, "_encoded", lambda self, prompt: seen.append(prompt) or encoded(self, prompt))
    answer = running.client.post("/v1/messages/count_tokens", json={"model": "builtin", **body})
    assert answer.status_code == 200, answer.text
    return seen[0]


def test_an_answer_is_what_chat_completions_say(tools: Running, client: Any) -> None:
    expected = tools.post(
        "/v1/chat/completions",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_tokens=20,
        temperature=0,
    ).json()
    message = client.messages.create(**{**ASKED, "max_tokens": 20}, system="Be brief.", extra_body=GREEDY)
    assert [block.text for block in message.content] == [expected["choices"][0]["message"]["content"]]
    assert message.role == "assistant" and message.type == "message" and message.id.startswith("msg_")
    assert (message.stop_reason, message.model) == ("max_tokens", "builtin")
    whole = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert (whole, message.usage.output_tokens) == (expected["usage"]["prompt_tokens"], 20)


def test_a_stream_has_the_events_of_one_piece(client: Any) -> None:
    whole = client.messages.create(**ASKED, extra_body=GREEDY)
    kinds = []
    with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
        for event in stream:
            kinds.append(event.type)
        message = stream.get_final_message()
    assert [block.text for block in message.content] == [block.text for block in whole.content]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    raw = [kind for kind in kinds if kind not in ("text", "input_json")]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_blocks_in_order(client: Any, script: Callable[[str], None], stream: bool) -> None:
    script(f"So.\n{CALL}\n{CALL}")
    options = {**ASKED, "tools": [TOOL], "max_tokens": 200}
    if stream:
        with client.messages.stream(**options) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**options)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].text == "So."
    assert [(block.name, block.input) for block in message.content[1:]] == [("look", {"x": 1})] * 2
    assert len({block.id for block in message.content[1:]}) == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_call_is_forced(client: Any, choice: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    choice = {**choice, "disable_parallel_tool_use": True}
    message = client.messages.create(**{**ASKED, "max_tokens": 200}, tools=[TOOL], tool_choice=choice)
    (block,) = message.content
    assert message.stop_reason == "tool_use" and block.name == "look" and 0 <= block.input["x"] <= 9


def test_a_conversation_reaches_the_template(tools: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "So. "},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": True},
                {"type": "text", "text": "Go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    text = prompt_of(tools, monkeypatch, messages=messages, system=system, tools=[TOOL])
    assert text == (
        f"<tool look><system>Be\nbrief.<user>Look<assistant>So. {CALL}<tool>seen<tool>Error: gone<user>Go on<assistant>"
    )
    messages.append({"role": "assistant", "content": "It says"})
    assert prompt_of(tools, monkeypatch, messages=messages).endswith("<user>Go on<assistant>It says")


def test_tokens_are_counted(tools: Running, client: Any) -> None:
    options = {name: ASKED[name] for name in ("model", "messages")}
    bare = client.messages.count_tokens(**options).input_tokens
    assert bare == client.messages.create(**ASKED).usage.input_tokens
    assert client.messages.count_tokens(**options, tools=[TOOL], system="Be brief.").input_tokens > bare


def test_what_does_not_fit_is_counted(client: Any) -> None:
    """Agents ask this way whether they must shorten a text, and by how much."""
    body = {"model": "builtin", "messages": [{"role": "user", "content": "word " * 5000}]}
    twice = {"model": "builtin", "messages": [{"role": "user", "content": "word " * 10_000}]}
    with pytest.raises(anthropic.BadRequestError, match="the model's context is 1024"):
        client.messages.create(**body, max_tokens=1)
    once = client.messages.count_tokens(**body).input_tokens
    assert 5000 <= once < client.messages.count_tokens(**twice).input_tokens <= 2 * once


def test_why_an_answer_ended(client: Any, script: Callable[[str], None]) -> None:
    script("one two three")
    message = client.messages.create(**ASKED, stop_sequences=["two"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    message = client.messages.create(**ASKED)
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "one two three")


def test_more_tokens_than_the_context_has_left_are_an_upper_limit(client: Any, script: Callable[[str], None]) -> None:
    """Agents ask for as many as the largest models may write."""
    long = {**ASKED, "max_tokens": 64_000, "messages": [{"role": "user", "content": "a b" * 400}]}
    assert 800 < client.messages.count_tokens(model="builtin", messages=long["messages"]).input_tokens < 1000
    for text, reason in (("one two three", "end_turn"), ("one two three " * 80, "model_context_window_exceeded")):
        script(text)
        with client.messages.stream(**long) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == reason and text.startswith(message.content[0].text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
        ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, "type"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "role"),
        ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search_20250305' is run by Anthropic's servers",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "describe it as a custom tool"),
        ({"tools": [{"type": "text_editor_20250728", "name": "edit"}]}, "'text_editor_20250728' has no schema here"),
        ({"tool_choice": {"type": "any"}}, "without tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "hear"}}, "hear"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
        (
            {"messages": ASKED["messages"] * 2048, "system": "Be brief."},
            "messages: as a chat completion, messages may have 2048 items at most",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look"}] * 129}]},
            "messages: as a chat completion, messages.0.tool_calls may have 128 items at most",
        ),
    ],
)
def test_what_is_not_served_is_an_error_in_anthropics_shape(tools: Running, body: dict[str, Any], words: str) -> None:
    answer = tools.client.post("/v1/messages", json={**ASKED, **body})
    content = answer.json()
    assert answer.status_code == 400, answer.text
    assert (content["type"], content["error"]["type"]) == ("error", "invalid_request_error")
    assert words in content["error"]["message"]


def test_errors_reach_the_client_as_its_own(tools: Running, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        client.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
    body = tools.client.post("/v1/messages", content="{").json()
    assert body["type"] == "error"
    assert tools.client.get("/v1/messages").json()["type"] == "error"


def test_ids_of_requests(tools: Running, client: Any) -> None:
    """Anthropic's client reads another header than OpenAI's."""
    options = {"extra_headers": {"X-Request-Id": "mine-1"}}
    assert client.messages.create(**ASKED, **options)._request_id == "mine-1"
    counted = {name: ASKED[name] for name in ("model", "messages")}
    assert len(client.messages.count_tokens(**counted)._request_id) == 32
    with client.messages.stream(**ASKED, **options) as stream:
        assert stream.request_id == "mine-1"
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASKED, "model": "claude"}, **options)
    assert caught.value.request_id == "mine-1"
    # What is refused before it reaches a route
    refused = tools.client.post("/v1/messages", content="[" * 100)
    assert refused.status_code == 400 and refused.headers["request-id"] == refused.headers["x-request-id"]
    assert "request-id" not in tools.post("/v1/completions", prompt="x", max_tokens=1).headers


def test_a_key_in_anthropics_header() -> None:
    with served(api_keys=("one",)) as running:
        for key, status in (("one", 200), ("two", 401)):
            answer = running.client.post("/v1/messages/count_tokens", json=ASKED, headers={"x-api-key": key})
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        assert running.client.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200


def test_an_error_in_a_stream_is_an_event_that_raises(client: Any) -> None:
    """A deadline that passes in mid-stream."""
    with served(make_with_template, request_timeout=0.3) as running:
        other = anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="exceeded its time limit"):
            for _ in other.messages.create(**{**ASKED, "max_tokens": 900}, stream=True):
                pass


def test_ignored_fields_are_named(tools: Running) -> None:
    body = {
        **ASKED,
        "max_tokens": 1,
        "context_management": {},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "a"},
    }
    answer = tools.client.post("/v1/messages", json=body)
    assert answer.headers["X-Ignored-Fields"] == "context_management, output_config.effort"


def test_a_form_of_the_answer(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(**ASKED, output_config=form)
    assert 0 <= json.loads(message.content[0].text)["x"] <= 9


def test_models_are_listed_for_both_vendors(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("builtin", "model", "builtin")
