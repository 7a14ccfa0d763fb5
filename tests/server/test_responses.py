"""``/v1/responses`` by OpenAI's own client: answers, event streams, tools and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import Running, served
from tool_server import CALL, SCHEMA, make_with_template, script

from foretoken.server.errors import bad
from foretoken.server.responses_bodies import renamed

openai = pytest.importorskip("openai", reason="the openai client is not installed")

__all__ = ["script"]
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def tools() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


@pytest.fixture
def client(tools: Running) -> Any:
    return openai.OpenAI(base_url=f"{tools.url}/v1", api_key="anything", max_retries=0)


def test_an_answer_is_what_chat_completions_say(tools: Running, client: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = tools.post("/v1/chat/completions", messages=messages, max_tokens=20, temperature=0).json()
    response = client.responses.create(
        model="builtin", input="Hi", instructions="Be brief.", max_output_tokens=20, temperature=0, metadata={"a": "b"}
    )
    assert response.output_text == expected["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.id.startswith("resp_") and response.instructions == "Be brief." and response.metadata == {"a": "b"}
    assert response.usage.input_tokens == expected["usage"]["prompt_tokens"] and response.usage.output_tokens == 20


def test_ignored_fields_are_named(tools: Running) -> None:
    body = {"model": "builtin", "input": "Hi", "max_output_tokens": 1, "store": False, "unheard": 1}
    answer = tools.post("/v1/responses", **body, text={"verbosity": "low"}, reasoning={"summary": "auto"})
    assert answer.headers["X-Ignored-Fields"] == "unheard, text.verbosity, reasoning.summary"
    answer = tools.post("/v1/responses", model="builtin", input="Hi", max_output_tokens=1)
    assert "X-Ignored-Fields" not in answer.headers


def test_a_stream_has_the_events_of_one_piece(client: Any) -> None:
    body: dict[str, Any] = {"model": "builtin", "input": "Hi", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert {event.item_id for event in events[3:-2]} == {events[-2].item.id}
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    for item in (whole.output[0], events[-2].item, events[-1].response.output[0]):
        assert item.status == "incomplete"


@pytest.mark.parametrize(
    ("text", "whole", "statuses"),
    [
        (f"So.\n{CALL}\nThat is it.", "completed", ["completed", "completed", "completed"]),
        (f"So.\n{CALL}\nThat is {'very ' * 100}", "incomplete", ["completed", "completed", "incomplete"]),
        (f"So.\n{CALL}" + " \n\t" * 100, "incomplete", ["completed", "completed"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_only_the_message_that_was_cut_is_incomplete(
    client: Any, script: Callable[[str], None], stream: bool, text: str, whole: str, statuses: list[str]
) -> None:
    """Calls are whole, and so are messages before others; the space behind a call is no message."""
    script(text)
    body: dict[str, Any] = {"model": "builtin", "input": "Hi", "tools": [TOOL], "max_output_tokens": 100}
    if stream:
        events = list(client.responses.create(**body, stream=True))
        assert [event.item.status for event in events if event.type == "response.output_item.done"] == statuses
        response = events[-1].response
    else:
        response = client.responses.create(**body)
    assert (response.status, [item.status for item in response.output]) == (whole, statuses)


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_items_in_order(client: Any, script: Callable[[str], None], stream: bool) -> None:
    script(f"So.\n{CALL}\n{CALL}")
    body: dict[str, Any] = {"model": "builtin", "input": "Hi", "tools": [TOOL], "max_output_tokens": 200}
    if stream:
        with client.responses.stream(**body) as events:
            kinds = [event.type for event in events]
            response = events.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 2
        assert kinds[-1] == "response.completed"
    else:
        response = client.responses.create(**body)
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "So."
    assert [(item.name, json.loads(item.arguments)) for item in response.output[1:]] == [("look", {"x": 1})] * 2
    assert len({item.call_id for item in response.output[1:]}) == 2


@pytest.mark.parametrize("said", [f"So. It is.\n{CALL}\n{CALL}", f"{CALL}\nSo. It is.", "So. It is."])
def test_probabilities_are_those_of_the_text(client: Any, script: Callable[[str], None], said: str) -> None:
    """A stream and a whole answer attribute the same tokens to the text, and none of a call."""
    script(said)
    include = ["message.output_text.logprobs"]
    body: dict[str, Any] = {"model": "builtin", "input": "Hi", "tools": [TOOL], "include": include}
    with client.responses.stream(**body) as events:
        streamed = events.get_final_response()
    found = []
    for response in (streamed, client.responses.create(**body)):
        (message,) = [item for item in response.output if item.type == "message"]
        found.append([value.token for value in message.content[0].logprobs])
        assert message.content[0].text in "".join(found[-1])
        assert "arguments" not in "".join(found[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
    ],
)
def test_a_call_is_forced(client: Any, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    response = client.responses.create(
        model="builtin", input="Hi", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    (item,) = response.output
    assert item.type == "function_call" and 0 <= json.loads(item.arguments)["x"] <= 9


def test_a_conversation_reaches_the_template(tools: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.server.turn import ChatTurn

    seen: list[str] = []
    encoded = ChatTurn._encoded
    monkeypatch.setattr(ChatTurn, "_encoded", lambda self, prompt: seen.append(prompt) or encoded(self, prompt))
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So. "}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
        {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "gone"}]},
        {"role": "user", "content": "Go on"},
    ]
    answer = tools.post("/v1/responses", input=items, tools=[TOOL], max_output_tokens=1)
    assert answer.status_code == 200, answer.text
    empty = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert seen[0] == (
        f"<tool look><system>Be brief.<user>Look<assistant>So. {CALL}<tool>seen<assistant>{empty}<tool>gone"
        "<user>Go on<assistant>"
    )


def test_probabilities_and_a_form(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    body: dict[str, Any] = {
        "model": "builtin",
        "input": "Hi",
        "text": form,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    response = client.responses.create(**body)
    assert 0 <= json.loads(response.output_text)["x"] <= 9
    values = response.output[0].content[0].logprobs
    assert len(values) == response.usage.output_tokens and all(len(value.top_logprobs) == 2 for value in values)
    events = list(client.responses.create(**body, stream=True))
    parts = [part for event in events if event.type == "response.output_text.delta" for part in event.logprobs]
    assert len("".join(part.token for part in parts)) >= len(response.output_text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "hologram", "id": "h_1"}]}, "input"),
        ({"input": [{"type": 7}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_smell", "smell": "x"}]}]}, "input"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "input"),
        ({"tools": [{"type": "hologram"}]}, "tools"),
        ({"input": "a" * 300_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_served_names_the_field(tools: Running, body: dict[str, Any], param: str) -> None:
    answer = tools.post("/v1/responses", **{"input": "Hi", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_only_the_field_is_renamed() -> None:
    slow = bad("the chat template takes too long for these messages", "messages")
    assert (renamed(slow).message, renamed(slow).param) == (slow.message, "input")
    wrong = renamed(bad("messages: as a chat completion, messages may have 2048 items at most", "messages"))
    assert wrong.message == "input: as a chat completion, messages may have 2048 items at most"
    assert renamed(bad("max_completion_tokens is 9", "max_completion_tokens")).message == "max_output_tokens is 9"


def test_an_error_in_a_stream_is_its_last_event() -> None:
    with served(make_with_template, request_timeout=0.3) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        events = list(client.responses.create(model="builtin", input="Hi", temperature=1.5, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed" and "exceeded its time limit" in events[-1].response.error.message
