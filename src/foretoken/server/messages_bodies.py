"""Request bodies of Anthropic's API, and their conversion to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from foretoken.server.errors import bad
from foretoken.server.inputs import chat_of, refuse
from foretoken.server.schemas import (
    BIG,
    MOST_STOPS,
    MOST_TOOLS,
    Body,
    ChatRequest,
    FunctionName,
    JsonObject,
    ModelName,
    Short,
    Speculative,
    Stop,
    Text,
    count,
    option,
)

MOST_MESSAGES, MOST_BLOCKS = 2048, 256
UNSERVED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no MCP servers: offer their tools",
    "inference_geo": "this server has one region",
}
"""Fields that cannot be honoured, with the reason."""


class Block(Body):
    """A part of a message: text, a tool call, or its result."""

    silent = frozenset({"cache_control", "citations", "thinking", "signature", "data", "caller"})
    type: Annotated[StrictStr, Field(max_length=64)]
    text: Text | None = None
    id: Short | None = None
    name: Short | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Short | None = None
    content: Text | Annotated[list[Block], Field(max_length=MOST_BLOCKS)] | None = None
    is_error: StrictBool | None = None


Content = Text | Annotated[list[Block], Field(max_length=MOST_BLOCKS)]


class AnthropicMessage(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Body):
    """A tool that the model may use."""

    silent = frozenset({"cache_control"})
    type: Short | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: StrictBool | None = None


class AnthropicToolChoice(Body):
    """Whether the model must use a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    silent = frozenset({"display"})
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: count(0, BIG) | None = None  # type: ignore[valid-type]


class OutputFormat(Body):
    """Format of the answer."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """Output options."""

    format: OutputFormat | None = None
    effort: Short | None = None


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    model: ModelName
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: count(1, BIG)  # type: ignore[valid-type]
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: StrictBool | None = None
    temperature: option("temperature") = None  # type: ignore[valid-type]
    top_p: option("top_p") = None  # type: ignore[valid-type]
    top_k: option("top_k") = None  # type: ignore[valid-type]
    metadata: dict[str, Any] | None = None
    service_tier: Short | None = None
    seed: option("seed") = None  # type: ignore[valid-type]
    cache_salt: Short | None = None
    speculative: Speculative | None = None


Block.model_rebuild()


def chat_request(body: CountRequest) -> ChatRequest:
    """The request as a chat completion.  Raises ``ApiError`` 400 for unserved fields."""
    refuse(body, UNSERVED)
    if body.thinking is not None and body.thinking.type == "enabled":
        raise bad(
            "this server returns no thinking blocks: leave thinking out (Claude Code: MAX_THINKING_TOKENS=0)",
            "thinking",
        )
    request: dict[str, Any] = {"model": body.model, "messages": list(_messages(body))}
    if request["messages"][-1]["role"] == "assistant":  # a prefill that the answer continues
        request["continue_final_message"] = True
    if body.tools:
        request["tools"] = [_tool(tool) for tool in body.tools]
    request |= _choice(body.tool_choice)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        request |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        for name in ("temperature", "top_p", "top_k", "seed", "cache_salt"):
            request[name] = getattr(body, name)
        request["speculative"] = None if body.speculative is None else body.speculative.model_dump()
    return chat_of(request)


def _messages(body: CountRequest) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system", "\n")}
    for message in body.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content)
        else:
            yield from _user(message.role, message.content)


def _user(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Tool results, each as a separate message, and the text between them, in their order."""
    texts: list[Block] = []
    for block in blocks:
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise bad("a tool_result block needs a tool_use_id", "messages")
            if texts:
                yield {"role": role, "content": _text(texts, "messages")}
                texts = []
            result = _text(block.content or "", "messages")
            result = f"Error: {result}" if block.is_error else result
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        else:
            texts.append(block)
    if texts or not blocks:
        yield {"role": role, "content": _text(texts, "messages")}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    """Message with text and calls; earlier thinking is not shown to the model again."""
    calls = [block for block in blocks if block.type == "tool_use"]
    text_blocks = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    message: dict[str, Any] = {"role": "assistant", "content": _text(text_blocks, "messages")}
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    return message


def _call(block: Block) -> dict[str, Any]:
    if not block.name:
        raise bad("a tool_use block needs a name", "messages")
    return {"id": block.id, "function": {"name": block.name, "arguments": block.input or {}}}


def _text(content: str | Sequence[Block], field: str, between: str = "") -> str:
    """The text in one piece.  Raises ``ApiError`` 400 for a block of another type."""
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise bad(f"only text is served, not a block of type {block.type!r}", field)
    return between.join(block.text or "" for block in content)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        reason = (
            "has no schema here, only in Anthropic's models: describe it as a custom tool with an input_schema"
            if tool.type.startswith(("bash_", "text_editor_", "computer_", "memory_"))  # run by the client
            else "is run by Anthropic's servers, not here: leave it out"
        )
        raise bad(f"the tool of type {tool.type!r} {reason}", "tools", "unsupported_value")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}


def _choice(tool_choice: AnthropicToolChoice | None) -> dict[str, Any]:
    """``tool_choice`` and ``parallel_tool_calls``."""
    if tool_choice is None:
        return {}
    choice: dict[str, Any] = {"tool_choice": {"any": "required"}.get(tool_choice.type, tool_choice.type)}
    if tool_choice.type == "tool":
        if not tool_choice.name:
            raise bad("tool_choice of type tool needs a name", "tool_choice")
        choice["tool_choice"] = {"type": "function", "function": {"name": tool_choice.name}}
    if tool_choice.disable_parallel_tool_use:
        choice["parallel_tool_calls"] = False
    return choice
