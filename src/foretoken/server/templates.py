"""From a conversation to a prompt, by the model's own template or a plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.conversation import has_template as has_template
from foretoken.conversation import template_fault
from foretoken.server.errors import bad
from foretoken.server.schemas import Message, Tool, ToolCall
from foretoken.server.workers import TEMPLATES, in_thread

RENDER_S = 2.0
"""Seconds in which a template must be done."""
KWARGS = ("enable_thinking", "thinking", "reasoning", "date_string", "documents")
"""What a request may hand to a template: nothing that changes how it is run."""
PLAIN_STOP = "\nUser:"
"""Where an answer ends for a model without a template."""


def takes_effort(tokenizer: Any) -> bool:
    """Whether the model's template asks how hard it should think."""
    return has_template(tokenizer) and "reasoning_effort" in str(tokenizer.chat_template)


async def prompt_of(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    generate: bool = True,
    effort: str | None = None,
) -> str:
    """The prompt of a conversation.

    Raises:
        ApiError: 400, where the template refuses it or takes too long.
    """
    if tokenizer is None:
        raise bad("this model has no tokenizer: use /v1/completions with token ids", "messages")
    written = [_plain(message) for message in messages]
    unknown = [name for name in kwargs or {} if name not in KWARGS]
    if unknown:
        raise bad(f"chat_template_kwargs may hold {', '.join(KWARGS)}, not {unknown[0][:64]!r}", "chat_template_kwargs")
    if not has_template(tokenizer):
        if tools:
            raise bad("this model has no chat template, so it cannot be told of tools", "tools")
        return _without_template(written, generate)
    extra = dict(kwargs or {}) | ({} if effort is None else {"reasoning_effort": effort})
    functions = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None

    def render() -> str:
        return str(
            tokenizer.apply_chat_template(
                written, tools=functions, tokenize=False, add_generation_prompt=generate, **extra
            )
        )

    try:
        return await in_thread(TEMPLATES, render, RENDER_S)
    except TimeoutError:
        raise bad("the chat template takes too long for these messages", "messages") from None
    except Exception as error:  # the template's own: it refuses roles, orders, missing fields
        raise bad(template_fault(error, tokenizer, 200), "messages") from None


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it, with its text in one piece."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text":
                raise bad(f"only text is served, not {part.type[:32]!r}", "messages")
        content = "".join(part.text for part in content)
    found: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if getattr(message, name):
            found[name] = getattr(message, name)
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    """An earlier call, with its arguments as templates want them: an object, which clients send as JSON text."""
    found = call.model_dump()
    arguments = call.function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            raise bad("the arguments of an earlier tool call are no JSON", "messages") from None
        found["function"] = {**call.function, "arguments": parsed}
    return found


def _without_template(messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
    """A dialogue as plain text."""
    names = {"user": "User", "assistant": "Assistant", "tool": "Tool"}
    lines = [
        f"{names[message['role']]}: {message['content']}" if message["role"] in names else str(message["content"])
        for message in messages
    ]
    return "\n".join([*lines, "Assistant:"] if generate else lines)
