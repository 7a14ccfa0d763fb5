"""Rendering of a conversation to a prompt, by the model's chat template or a plain one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.conversation import has_template, template_fault
from foretoken.server.errors import ApiError, bad
from foretoken.server.schemas import Message, Tool, ToolCall
from foretoken.server.workers import TEMPLATES, NotBegun, in_thread

RENDER_S = 2.0
"""Time limit of a template in seconds, and of the wait for a thread."""
KWARGS = ("enable_thinking", "thinking", "reasoning", "date_string", "documents")
"""Values that a request may pass to a template; none changes how it is run."""
PLAIN_STOP = "\nUser:"
"""Stop string for a model without a template."""


def takes_effort(tokenizer: Any) -> bool:
    """Whether the model's template has a reasoning effort."""
    return has_template(tokenizer) and "reasoning_effort" in str(tokenizer.chat_template)


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template.

    Attributes:
        tools: functions that the model is shown.
        kwargs: the client's values for the template.
        generate: whether to add the generation prompt.
        continues: whether to end inside the last message, the assistant's, which the answer continues.
        effort: reasoning effort.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    generate: bool = True
    continues: bool = False
    effort: str | None = None


async def prompt_of(tokenizer: Any, conversation: Conversation) -> str:
    """Prompt of a conversation.  Raises ``ApiError``: 400 if the template refuses it, takes too long, or omits the
    tools, 503 while others are being rendered."""
    if tokenizer is None:
        raise bad("this model has no tokenizer: use /v1/completions with token ids", "messages")
    _check(conversation)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    messages = [_plain(message, template) for message in conversation.messages]
    if not has_template(tokenizer):
        if conversation.tools:
            raise bad("this model has no chat template, which tools need", "tools")
        return _without_template(messages, conversation.generate and not conversation.continues)
    try:
        return await in_thread(TEMPLATES, lambda: _rendered(tokenizer, messages, conversation), RENDER_S)
    except NotBegun:
        raise ApiError(
            503, "other messages are being rendered: try again", code="templates_queued", headers={"Retry-After": "2"}
        ) from None
    except TimeoutError:
        raise bad("the chat template takes too long for these messages", "messages") from None
    except ApiError:
        raise
    except Exception as error:  # raised by the template, for roles, orders or missing fields
        raise bad(template_fault(error, tokenizer, 200), "messages") from None


def _check(conversation: Conversation) -> None:
    """Raise ``ApiError`` 400 for options that no template supports."""
    unknown = [name for name in conversation.kwargs if name not in KWARGS]
    if unknown:
        raise bad(f"chat_template_kwargs may hold {', '.join(KWARGS)}, not {unknown[0][:64]!r}", "chat_template_kwargs")
    last = conversation.messages[-1]
    if conversation.continues and (last.role != "assistant" or last.tool_calls or not _text_of(last).strip()):
        raise bad(
            "continue_final_message needs a last message of the assistant with text to continue",
            "continue_final_message",
        )


def _rendered(tokenizer: Any, plain_messages: Sequence[Mapping[str, Any]], conversation: Conversation) -> str:
    """The prompt.  Raises ``ApiError`` 400 if it omits the tools or an earlier call."""
    options = dict(conversation.kwargs)
    if conversation.effort is not None:
        options["reasoning_effort"] = conversation.effort
    if conversation.continues:
        options["continue_final_message"] = True
    generate = conversation.generate and not conversation.continues
    functions = [tool.model_dump(exclude_none=True) for tool in conversation.tools]

    def text(messages: Any, tools: Any) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generate, **options
            )
        )

    prompt = text(plain_messages, functions or None)
    if functions and prompt == text(plain_messages, None):
        raise bad("this model's chat template does not support tools: leave them out", "tools")
    marked, names = _marked(plain_messages)
    try:
        marked_prompt = text(marked, functions or None) if names else ""
    except Exception:  # the template checks the names of calls, so it reads them
        return prompt
    if any(name not in marked_prompt for name in names):
        raise bad(
            "this model's chat template does not support earlier tool calls: leave them out",
            "messages",
        )
    return prompt


def _marked(plain_messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The messages with another name for each earlier call, and these names.

    A template that omits a call would have the model answer another conversation.  The call's own name proves nothing:
    it may occur in the user's text or in another call.
    """
    names: list[str] = []

    def renamed(call: Mapping[str, Any]) -> dict[str, Any]:
        names.append(f"earlier_{len(names)}_call")
        return {**call, "function": {**call["function"], "name": names[-1]}}

    messages = [
        {**message, "tool_calls": [renamed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in plain_messages
    ]
    return messages, names


def _text_of(message: Message) -> str:
    """Text of a message in one piece.  Raises ``ApiError`` 400 for a part that is no text."""
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "refusal"):
            raise bad(f"only text is served, not {part.type[:32]!r}", "messages")
    return "".join((part.refusal or "") if part.type == "refusal" else part.text for part in message.content)


def _plain(message: Message, template: str) -> dict[str, Any]:
    """A message as templates expect it."""
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"  # many templates omit messages of an unknown role
    plain: dict[str, Any] = {"role": role, "content": _text_of(message)}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, template) for call in message.tool_calls]
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = _id(message.tool_call_id, template)
    return plain


def _call(call: ToolCall, template: str) -> dict[str, Any]:
    """An earlier call; its arguments are an object, as templates expect, which clients send as JSON text.

    Invalid arguments stay in the conversation: refusing them would end it for ever.
    """
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    return {"id": _id(call.id or "", template), "type": "function", "function": function}


def arguments_of(raw: str | dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a call as an object; other text becomes its only member, ``unparsed``.

    Half a surrogate pair, which a model may write as an escape and no tokenizer takes, becomes U+FFFD.
    """
    if isinstance(raw, dict):
        return _whole_characters(raw)
    if raw is None or not raw.strip():
        return {}
    try:
        arguments = json.loads(raw)
    except (ValueError, RecursionError):  # also for a number of too many digits
        arguments = None
    return _whole_characters(arguments) if isinstance(arguments, dict) else {"unparsed": raw}


def _whole_characters(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with U+FFFD for each half of a surrogate pair."""
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        mended: dict[str, Any] = json.loads(whole)
        return mended
    except RecursionError:
        pass
    return arguments


def _id(call_id: str, template: str) -> str:
    """Id of a call as the template takes it; the same for the call and its result."""
    # Mistral's templates, which have this mark, refuse ids other than nine letters and digits
    if "[TOOL_CALLS]" not in template or (len(call_id) == 9 and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _without_template(messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
    """The dialogue as plain text.  Raises ``ApiError`` 400 for tool calls, which it cannot show."""
    if any(message.get("tool_calls") for message in messages):
        raise bad("this model has no chat template, which earlier tool calls need", "messages")
    names = {"user": "User", "assistant": "Assistant", "tool": "Tool"}
    lines = [
        f"{names[message['role']]}: {message['content']}" if message["role"] in names else str(message["content"])
        for message in messages
    ]
    return "\n".join([*lines, "Assistant:"] if generate else lines)
