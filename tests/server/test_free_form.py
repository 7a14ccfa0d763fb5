"""Free-form JSON of requests and calls: half a surrogate pair and NaN, which nobody can tokenise or send."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from running_server import Running, served
from tool_server import SCHEMA, make_with_template, script

__all__ = ["script"]
HALF = "\ud800"
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
WRONG_TOOLS = [
    {**TOOL, "parameters": {**SCHEMA, "title": HALF}},
    {**TOOL, "parameters": {**SCHEMA, HALF: 1}},
    {**TOOL, "parameters": {**SCHEMA, "default": float("nan")}},
    {**TOOL, "note": [HALF]},
    {**TOOL, "note": float("inf")},
]
CHAT = {"messages": [USER], "max_tokens": 1}
RESPONSE = {"input": "Hi", "max_output_tokens": 1}


@pytest.fixture(scope="module")
def tools() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    """With NaN as Python writes it, and escapes of halves."""
    content = json.dumps({"model": "builtin", **body})
    return running.client.post(path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("arguments", [json.dumps({"x": f"a{HALF}b"}), {"x": f"a{HALF}b"}])
def test_a_conversation_goes_on_behind_a_call_with_half_a_character(tools: Running, arguments: Any) -> None:
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": ""}]
    answer = post(tools, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    prompt = tools.serving.llm.tokenizer.decode(answer.json()["choices"][0]["prompt_token_ids"])  # type: ignore[union-attr]
    assert '{"x": "a\ufffdb"}' in prompt


def test_a_call_with_half_a_character_is_answered_and_taken_back(tools: Running, script: Callable[[str], None]) -> None:
    script('<tool_call>{"name": "look", "arguments": {"x": "\\ud800"}}</tool_call>')
    offered = [{"name": "look", "input_schema": SCHEMA}]
    question = {"model": "builtin", "max_tokens": 99, "tools": offered, "temperature": 0}
    answer = post(tools, "/v1/messages", messages=[USER], **question)
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    assert block["input"] == {"x": "\ufffd"}
    for received in ({"x": "\ufffd"}, {"x": HALF}):  # whole, and put together from the pieces of a stream
        turn = {"role": "assistant", "content": [{**block, "input": received}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}]}
        answer = post(tools, "/v1/messages", messages=[USER, turn, result], **question)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("tool", WRONG_TOOLS, ids=range(len(WRONG_TOOLS)))
def test_tools_that_cannot_be_shown_are_refused(tools: Running, tool: dict[str, Any]) -> None:
    asked = {
        "/v1/chat/completions": {**CHAT, "tools": [{"type": "function", "function": tool}]},
        "/v1/responses": {**RESPONSE, "tools": [{"type": "function", **tool}]},
    }
    if "note" not in tool:  # only known names are shown from these
        schema = tool["parameters"]
        asked["/v1/messages"] = {"messages": [USER], "max_tokens": 1, "tools": [{"name": "a", "input_schema": schema}]}
    for path, body in asked.items():
        answer = post(tools, path, **body)
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert "tools.0" in message and ("surrogate" in message or "NaN and Infinity" in message)


@pytest.mark.parametrize("value", [HALF, float("nan"), [{"a": float("-inf")}]])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", lambda value: {"text": {"format": {"type": "text", "zz": value}}}, "text"),
        ("/v1/responses", lambda value: {"text": {"zz": value}}, "text"),
        ("/v1/responses", lambda value: {"tool_choice": {"type": "function", "zz": value}}, "tool_choice"),
        (
            "/v1/chat/completions",
            lambda value: {"chat_template_kwargs": {"documents": [value]}},
            "chat_template_kwargs",
        ),
        (
            "/v1/chat/completions",
            lambda value: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": value}}}},
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_values_that_cannot_be_sent_are_refused_before_an_answer(
    tools: Running, path: str, fields: Callable[[Any], dict[str, Any]], param: str, value: Any, stream: bool
) -> None:
    base = RESPONSE if path == "/v1/responses" else CHAT
    answer = post(tools, path, **base, **fields(value), stream=stream)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_metadata_is_text(tools: Running) -> None:
    answer = post(tools, "/v1/responses", **RESPONSE, metadata={HALF: "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
