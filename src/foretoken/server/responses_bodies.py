"""Request bodies of OpenAI's Responses API, and their conversion to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from foretoken.server.call_formats import PARAMETERS
from foretoken.server.errors import ApiError, bad
from foretoken.server.inputs import chat_of, refuse
from foretoken.server.schemas import (
    BIG,
    MOST_LOGPROBS,
    MOST_TOOLS,
    Body,
    ChatRequest,
    FunctionName,
    JsonObject,
    ModelName,
    Short,
    ShownBody,
    Speculative,
    Text,
    count,
    option,
)

MOST_ITEMS, MOST_PARTS = 2048, 256
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Values that ``include`` may name; there is no reasoning here, so nothing of it is missing."""
UNSERVED = {
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "background": "responses are not stored: leave it out, or stream",
    "prompt": "prompt templates are not stored: send the prompt itself",
    "context_management": "this server truncates no conversations",
    "moderation": "this server does not moderate",
}
"""Fields that cannot be honoured, with the reason."""
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "continue_final_message": "input",
}
"""This API's names for fields of chat completions."""


class MessagePart(Body):
    """A part of a message: text or a refusal."""

    silent = frozenset({"annotations", "logprobs", "parsed"})
    type: Annotated[StrictStr, Field(max_length=64)]
    text: Text | None = None
    refusal: Text | None = None


Content = Text | Annotated[list[MessagePart], Field(max_length=MOST_PARTS)]


class Item(Body):
    """An item of the input: a message, a function call, or its output."""

    silent = frozenset({"summary", "encrypted_content", "parsed_arguments", "phase"})
    type: Short = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    id: Short | None = None
    call_id: Short | None = None
    name: Short | None = None
    arguments: Text | None = None
    output: Content | None = None
    status: Short | None = None


class ResponsesTool(ShownBody):
    """A tool that the model may use."""

    type: Short
    name: FunctionName | None = None
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class TextFormat(ShownBody):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    description: Text | None = None
    strict: StrictBool | None = None


class TextConfig(ShownBody):
    """Text options."""

    format: TextFormat | None = None
    verbosity: Short | None = None


class Reasoning(Body):
    """Reasoning options."""

    effort: Short | None = None
    summary: Short | None = None


class ResponsesRequest(Body):
    """``POST /v1/responses``."""

    model: ModelName
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: count(1, BIG) | None = None  # type: ignore[valid-type]
    temperature: option("temperature") = None  # type: ignore[valid-type]
    top_p: option("top_p") = None  # type: ignore[valid-type]
    top_logprobs: count(0, MOST_LOGPROBS) | None = None  # type: ignore[valid-type]
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | JsonObject | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Short], Field(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] | None = None
    store: StrictBool | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    service_tier: Short | None = None
    seed: option("seed") = None  # type: ignore[valid-type]
    cache_salt: Short | None = None
    speculative: Speculative | None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The request as a chat completion.  Raises ``ApiError`` 400 for unserved fields."""
    _check(body)
    request: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "speculative": None if body.speculative is None else body.speculative.model_dump(),
        **{name: getattr(body, name) for name in ("temperature", "top_p", "seed", "cache_salt")},
    }
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        request |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort not in (None, "none"):
        request["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        request["response_format"] = _form(body.text.format)
    return chat_of(request)


def no_effect(body: ResponsesRequest) -> Iterator[str]:
    """Known fields that have no effect here."""
    if body.text is not None and body.text.verbosity is not None:
        yield "text.verbosity"
    if body.reasoning is not None and body.reasoning.summary is not None:
        yield "reasoning.summary"
    yield from (f"stream_options.{name}" for name, value in (body.stream_options or {}).items() if value)


def renamed(error: ApiError) -> ApiError:
    """The error with this API's field names."""
    name = error.param or ""
    field = FIELDS.get(name, name)
    # A message begins with the field; elsewhere in it the name may be a plain word
    message = field + error.message.removeprefix(name) if error.message.startswith(name) else error.message
    message = message.replace(f".{PARAMETERS} (", ".parameters (")
    code, headers, counted = error.code, error.headers, error.counted
    return ApiError(error.status, message, param=field or None, code=code, headers=headers, counted=counted)


def _check(body: ResponsesRequest) -> None:
    refuse(body, UNSERVED)
    for item in body.include or ():
        if item not in INCLUDES:
            raise bad(
                f"include may name {' or '.join(INCLUDES)}, not {item[:64]!r}", "include", "unsupported_parameter"
            )
    if body.truncation == "auto":
        raise bad("this server truncates no conversations: truncation must be disabled", "truncation")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Messages; a call joins the assistant's message before it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise bad("an item of type function_call_output needs call_id and output", "input")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.type == "message":
            if item.role is None or item.content is None:
                raise bad("a message needs role and content", "input")
            messages.append({"role": item.role, "content": _text(item.content)})
        elif item.type != "reasoning":  # earlier reasoning is not shown to the model again
            raise bad(f"items of type {item.type[:64]!r} are not served", "input", "unsupported_value")
    if not messages:
        raise bad("the input has no message", "input")
    return messages


def _call(item: Item) -> dict[str, Any]:
    if item.call_id is None or item.name is None:
        raise bad("an item of type function_call needs call_id and name", "input")
    return {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}


def _text(content: str | Sequence[MessagePart]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise bad(f"only text is served, not a part of type {part.type!r}", "input")
    return "".join(part.text or part.refusal or "" for part in content)


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type != "function":
        raise bad(f"tools of type {tool.type[:64]!r} are not served: only functions are", "tools", "unsupported_value")
    if tool.name is None:
        raise bad("a function needs a name", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    """``tool_choice`` for chat completions, which nests a function's name in another object."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [{"function": tool} for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    raise bad("tool_choice is auto, none, required, a function, or allowed_tools", "tool_choice", "unsupported_value")


def _form(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise bad("text.format of type json_schema needs a schema", "text")
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}
