"""Tools through chat completions: calls that are forced, read, streamed and drafted from earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from running_server import Running, served
from tokenizers import AddedToken
from tool_server import CALL, SCHEMA, make_with_template, script

import foretoken as ft
from foretoken.server import call_formats, turn
from foretoken.server.call_formats import HERMES, LLAMA, MISTRAL, forced, format_of, special_of
from foretoken.server.call_reader import CallReader
from foretoken.server.schemas import Tool

__all__ = ["script"]
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")


def function(name: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """A tool."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    schema["required"] = list(properties) if required is None else required
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
WEATHER = function("get_weather", {"city": WORD, "unit": {"enum": ["celsius", "fahrenheit"]}}, ["city"])
AREA = function("triangle.area", {"base": DIGIT, "height": DIGIT})
PLAY = function("spotify-play", {"artist": WORD, "minutes": DIGIT})
FLAGS = function("set_flags", {"flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}})
NESTED = function(
    "book",
    {
        "guest": {
            "type": "object",
            "properties": {"name": WORD, "age": DIGIT},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
)
MAYBE = function("note", {"text": {"anyOf": [WORD, {"type": "null"}]}})
NOTHING = {"type": "function", "function": {"name": "now"}}
REFERRED = {
    "type": "function",
    "function": {
        "name": "route",
        "parameters": {
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"id": DIGIT},
                    "required": ["id"],
                    "additionalProperties": False,
                }
            },
            "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}},
            "required": ["from", "to"],
            "additionalProperties": False,
        },
    },
}
CASES = [  # simple: one tool; multiple: the right one of several; parallel: several calls in one answer
    ("simple", "What is the weather in Oslo?", [WEATHER], 1),
    ("simple", "Area of a triangle of base 3 and height 4", [AREA], 1),
    ("simple", "All flags off", [FLAGS], 1),
    ("simple", "Book a room for Ann", [NESTED], 1),
    ("simple", "Forget it", [MAYBE], 1),
    ("simple", "From place 1 to place 2", [REFERRED], 1),
    ("multiple", "Play some music", [WEATHER, PLAY, AREA], 1),
    ("multiple", "What time is it?", [LOOK, AREA], 1),
    ("multiple", "A note on the trip", [MAYBE, REFERRED, NESTED, FLAGS], 1),
    ("parallel", "The weather in Oslo and in Rome", [WEATHER], None),
    ("parallel", "Two songs and a triangle", [PLAY, AREA], None),
    ("parallel", "Look at 1, 2 and 3", [LOOK], None),
]


@pytest.fixture(scope="module")
def tools() -> Iterator[Running]:
    with served(make_with_template) as running:
        yield running


def ask(running: Running, question: str = "Hi", **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    fields = {"messages": messages, "max_tokens": 300, "temperature": 0, **body}
    return running.post("/v1/chat/completions", **fields)


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(answer: httpx.Response) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream, put together as clients do."""
    chunks = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", ()):
            assert call["index"] == len(calls)
            calls.append(call["function"])
    return "".join(chunk["delta"].get("content") or "" for chunk in chunks), calls, chunks[-1]["finish_reason"]


def check_calls(calls: list[dict[str, Any]], offered: list[dict[str, Any]]) -> None:
    """Names that were offered, and arguments that fit."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in offered}
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])


@pytest.mark.parametrize(("kind", "question", "offered", "most"), CASES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_forced_calls_are_valid(
    tools: Running,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    question: str,
    offered: list[dict[str, Any]],
    most: int | None,
    temperature: float,
) -> None:
    """The grammar decides, whatever the model would rather say: this one was not trained for calls."""
    monkeypatch.setattr(call_formats, "MOST_CALLS", 3)
    body = {"tools": offered, "tool_choice": "required", "temperature": temperature, "seed": 1}
    body |= {} if most is None else {"parallel_tool_calls": False}
    choice = choice_of(ask(tools, question, **body))
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls", kind
    assert len(calls) == 1 if most else 1 <= len(calls) <= 3
    check_calls(calls, offered)
    content, again, reason = streamed(ask(tools, question, stream=True, **body))
    assert (content, again, reason) == ("", calls, "tool_calls")


def test_a_named_function_is_called_once(tools: Running) -> None:
    chosen = {"type": "function", "function": {"name": "triangle.area"}}
    for _ in range(2):
        choice = choice_of(ask(tools, tools=[WEATHER, AREA], tool_choice=chosen, temperature=1))
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "triangle.area"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen]}}
    choice = choice_of(ask(tools, tools=[WEATHER, AREA], tool_choice=allowed))
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"triangle.area"}


def test_a_forced_call_is_the_same_with_and_without_drafts(tools: Running) -> None:
    for temperature in (0, 1):
        body: dict[str, Any] = {
            "tools": [WEATHER, AREA],
            "tool_choice": "required",
            "seed": 3,
            "temperature": temperature,
        }
        body |= {"return_token_ids": True, "parallel_tool_calls": False}
        drafted, plain = (choice_of(ask(tools, speculative={"enabled": on}, **body)) for on in (True, False))
        assert drafted["token_ids"] == plain["token_ids"]


def test_values_of_earlier_calls_are_drafted(tools: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted where a call is forced: the last call first, no other tool's, and not as a client's prediction."""
    seen: list[Any] = []
    inner = turn.engine_requests
    monkeypatch.setattr(turn, "engine_requests", lambda *a, **k: seen.append(k["prediction"]) or inner(*a, **k))
    calls = [("look", '{"x": 1}'), ("triangle.area", "{}"), ("look", '{"x": 2}')]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look"}]
    for name, arguments in calls:
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "user", "content": "Again"})
    body = {"tools": [LOOK, AREA], "messages": messages, "parallel_tool_calls": False}
    chosen = {"type": "function", "function": {"name": "look"}}
    answer = ask(tools, tool_choice=chosen, **body).json()
    ask(tools, **body, max_tokens=1)
    prediction = {"type": "content", "content": "else"}
    ask(tools, tool_choice=chosen, prediction=prediction, **body)
    written = [HERMES.call_text("look", {"x": x}) for x in (2, 1)]
    assert seen == ["\n".join(written), None, "else"]
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    drafts = answer["metrics"]["speculative_decoding"]
    assert drafts["num_accepted_draft_tokens"] > 0


def test_text_before_and_behind_calls(tools: Running, script: Callable[[str], None]) -> None:
    script(f"So.\n{CALL}\n{CALL}\nThat is all.")
    choice = choice_of(ask(tools, tools=[LOOK]))
    assert choice["message"]["content"] == "So.That is all."
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"x": 1}'] * 2
    content, calls, reason = streamed(ask(tools, tools=[LOOK], stream=True))
    assert (content, len(calls), reason) == ("So.That is all.", 2, "tool_calls")


def test_a_call_that_is_cut_off_is_no_call(tools: Running, script: Callable[[str], None]) -> None:
    script(CALL)
    size = len(tools.serving.llm.tokenizer(CALL)["input_ids"])
    choice = choice_of(ask(tools, tools=[LOOK], max_tokens=size - 8))
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert CALL.startswith(choice["message"]["content"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "hear"}}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
        ),
        ({"tools": [LOOK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [LOOK, LOOK]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"properties": {"x": {"type": "nothing"}}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_choices_that_cannot_be_kept_are_refused(tools: Running, body: dict[str, Any], param: str) -> None:
    answer = ask(tools, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


NO_TYPE = {"type": "object", "properties": {"city": {"type": "nothing"}}}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [LOOK, {"type": "function", "function": {"name": "weather", "parameters": NO_TYPE}}],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
            "tools.1.function.parameters",
        ),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": [
                    {"type": "function", "name": "look", "parameters": SCHEMA},
                    {"type": "function", "name": "weather", "parameters": NO_TYPE},
                ],
                "tool_choice": "required",
            },
            "tools.1.parameters",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"name": "weather", "input_schema": NO_TYPE}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema",
        ),
    ],
)
def test_an_error_in_a_schema_names_its_tool(tools: Running, path: str, body: dict[str, Any], place: str) -> None:
    """The error does not name a grammar that the client has never seen."""
    answer = tools.post(path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"{place} (weather): the json_schema cannot be compiled: Invalid type: nothing"
    )


def test_schemas_that_are_too_large_together_are_told_so(tools: Running) -> None:
    many = [function(f"tool_{place}", {"x": {"enum": ["y" * 3000]}}) for place in range(24)]
    answer = ask(tools, tools=many, tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "too large together" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call></tool_call> ...", HERMES),
        ("... [TOOL_CALLS] ...", MISTRAL),
        ('... <|python_tag|> {"name": ..., "parameters": ...}', LLAMA),
        ("{{ tools }}", HERMES),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, form: Any) -> None:
    assert format_of(template) is form
    text = form.opens + form.between.join(form.call_text("look", {"x": n}) for n in range(3)) + form.closes
    parts = CallReader({"look"}).push(text, final=True)
    assert [json.loads(part.arguments)["x"] for part in parts] == [0, 1, 2]  # type: ignore[union-attr]


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    """A grammar that spells them as text allows the token and then nothing behind it: the answer ended there."""
    from foretoken.core.constraints import CannotGoOn
    from foretoken.server.grammar import compile_constraint

    tokenizer = ft.load("builtin", None).tokenizer
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    special, width = special_of(tokenizer), len(tokenizer)
    assert set(special) == {"<tool_call>", "</tool_call>"}
    offered = Tool.model_validate(AREA)
    grammar = forced(HERMES, [offered], 2, special)
    text = "\n".join(HERMES.call_text("triangle.area", {"base": n, "height": 4}) for n in range(2))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert set(special.values()) <= set(ids)
    constraint = compile_constraint("grammar", grammar, tokenizer, width)
    assert constraint.fits([], ids) == len(ids) and constraint.may_end(ids)
    spelled = compile_constraint("grammar", forced(HERMES, [offered], 1, {}), tokenizer, width)
    with pytest.raises(CannotGoOn, match="special token"):
        spelled(torch.tensor([[0]])[:, :0], torch.zeros(1, width))


@pytest.mark.parametrize(
    ("parameters", "extra"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "required": [], "title": "None"}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
        ({"properties": {}, "patternProperties": {"^a": True}}, True),
    ],
)
def test_a_function_without_parameters_takes_no_arguments(parameters: Any, extra: bool) -> None:
    """As OpenAI defines it; a schema that says more than that keeps its own meaning."""
    from foretoken.server.grammar import compile_constraint

    tokenizer = ft.load("builtin", None).tokenizer
    offered = Tool.model_validate({"type": "function", "function": {"name": "now", "parameters": parameters}})
    grammar = forced(HERMES, [offered], 1, special_of(tokenizer))
    for arguments, fits in (({}, True), ({"a": 1}, extra)):
        ids = tokenizer(HERMES.call_text("now", arguments), add_special_tokens=False)["input_ids"]
        rule = compile_constraint("grammar", grammar, tokenizer, len(tokenizer))
        assert (rule.fits([], ids) == len(ids)) is fits, arguments


def test_a_format_that_is_unknown_is_an_annotation_of_arguments_too(tools: Running) -> None:
    secret = function("log_in", {"key": {"type": "string", "format": "password", "maxLength": 4}})
    choice = choice_of(ask(tools, tools=[secret], tool_choice="required", parallel_tool_calls=False))
    (call,) = choice["message"]["tool_calls"]
    assert len(json.loads(call["function"]["arguments"])["key"]) <= 4


@pytest.mark.parametrize("mark", ["<|python_tag|>", "[TOOL_CALLS]"])
def test_other_formats_are_forced_as_well(mark: str) -> None:
    from tool_server import TEMPLATE

    from foretoken.llm import Llm
    from foretoken.server.config import ServerSettings

    def make(settings: ServerSettings) -> Llm:
        llm = make_with_template(settings)
        llm.tokenizer.chat_template = TEMPLATE.replace("<tool_call>", mark)
        return llm

    with served(make) as running:
        choice = choice_of(ask(running, tools=[AREA, WEATHER], tool_choice="required", parallel_tool_calls=False))
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert calls
        check_calls(calls, [AREA, WEATHER])
