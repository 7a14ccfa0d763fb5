"""Conversations as token ids, by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.values import check_text, numbered, one_line

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` as in OpenAI's API; other keys are passed to the template unchanged."""
SHAPE = 'a conversation is a list of messages such as {"role": "user", "content": "Hello"}'
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bing", "bard"), "assistant"),
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by ShareGPT's speaker names."""

SET_HERE = ("tokenize", "messages", "tokenizer", "conversation")
"""Arguments of a template's call that are no variables of a caller's."""


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is one conversation: a list that contains mappings, none of them a tokenizer's output.

    :func:`render` validates the messages.
    """
    if not isinstance(prompt, list | tuple):
        return False
    # Prompts of 100,000 ids pass here, and asking an abstract class is slow
    mappings = [message for message in prompt if type(message) is not int and isinstance(message, Mapping)]
    return bool(mappings) and not any("input_ids" in message for message in mappings)


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def control_tokens(text: str, tokenizer: Any) -> list[str]:
    """Control tokens of the tokenizer that occur in a text, such as a fill-in-the-middle prompt or a rendered template.

    Some tokenizers do not mark fill-in-the-middle tokens as special, hence the test of the form. Other added tokens may
    be plain words or markup.
    """
    added = [name for name in tokenizer.get_added_vocab() if name.startswith(("<|", "<\uff5c"))]
    return sorted({name for name in (*tokenizer.all_special_tokens, *added) if name in text}, key=text.index)


def conversations_of(messages: Any) -> tuple[list[Sequence[Message]], bool]:
    """Conversations, and whether the argument is a single one rather than a list. Raises ``ValueError`` for anything
    else."""
    if is_messages(messages):
        return [messages], True
    several = isinstance(messages, list | tuple) and any(is_messages(conversation) for conversation in messages)
    if not several:
        kind = "an empty list" if isinstance(messages, list | tuple) and not messages else _kind(messages)
        raise ValueError(f"{SHAPE}; give one or a list of them, not {kind}")
    for number, conversation in enumerate(messages, 1):
        if not is_messages(conversation):
            kind = (
                "an empty list" if isinstance(conversation, list | tuple) and not conversation else _kind(conversation)
            )
            raise ValueError(f"conversation {number}: {SHAPE}, not {kind}")
    return list(messages), False


def checked(messages: Any) -> list[dict[str, Any]]:
    """Validated messages, each with its content as one string. Raises ``ValueError`` with the number of the invalid
    message, from 1."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"{SHAPE}, not {_kind(messages)}")
    if not messages:
        raise ValueError("the conversation is empty: give at least one message")
    return [_checked(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _checked(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is {_kind(message)}: {SHAPE}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name} needs a 'role', such as 'user'")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{name} needs a 'content': text, or a list of text parts")
    return {**message, "content": "" if content is None else _text_of(content, name)}


def _with_calls(message: dict[str, Any], name: str) -> dict[str, Any]:
    """A message whose tool call arguments are objects; OpenAI's clients send them as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{name}: 'tool_calls' must be a list, not {_kind(calls)}")
    return {**message, "tool_calls": [_call(call, name) for call in calls]}


def _call(call: Any, name: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{name}: the arguments of its tool call are not valid JSON") from None


def _text_of(content: Any, name: str) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"{name}: 'content' must be text or a list of text parts, not {_kind(content)}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = f"of type {str(part.get('type'))[:32]!r}" if isinstance(part, Mapping) else f"that is {_kind(part)}"
            raise ValueError(f'{name}: only text parts ({{"type": "text", "text": ...}}) are supported, not one {kind}')
        texts.append(part["text"])
    return "".join(texts)


def from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """Messages of ShareGPT's ``{"from", "value"}`` turns. Messages with ``role`` and ``content`` stay unchanged, and a
    ``weight`` is kept. Raises ``ValueError`` for other shapes and unknown speakers."""
    if not isinstance(turns, list):
        raise ValueError(f"'conversations' must be a list of messages, not {_kind(turns)}")
    return [_from_turn(turn, f"message {number}") for number, turn in enumerate(turns, 1)]


def to_answer(messages: Any) -> list[dict[str, Any]]:
    """A transcript without its trailing assistant messages. Raises ``ValueError`` if nothing remains."""
    transcript = checked(messages)
    while transcript and transcript[-1]["role"] == "assistant":
        transcript.pop()
    if not transcript:
        raise ValueError("the conversation has no message to answer")
    return transcript


def _from_turn(turn: Any, name: str) -> dict[str, Any]:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
        raise ValueError(f"{name} needs strings 'from' and 'value', or 'role' and 'content'")
    if turn["from"] not in SPEAKERS:
        raise ValueError(f"{name} is from {turn['from'][:32]!r}, which is unknown: use one of {', '.join(SPEAKERS)}")
    weight = {"weight": turn["weight"]} if "weight" in turn else {}
    return {"role": SPEAKERS[turn["from"]], "content": turn["value"], **weight}


def render(
    messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool = True, **template_kwargs: Any
) -> list[int]:
    """Token ids of a conversation, by the tokenizer's chat template.

    The template writes the beginning-of-text token itself, so the tokenizer adds none. If the last message is the
    assistant's and ``add_generation_prompt`` is set, the answer continues it. Raises ``ValueError`` without a template,
    for invalid messages, and for messages that the template refuses.

    Args:
        messages: in order; a ``content`` is text or a list of OpenAI's text parts.
        add_generation_prompt: end at the start of the assistant's answer.
        template_kwargs: for the template: ``tools``, ``enable_thinking``, ...
    """
    if tokenizer is None:
        raise ValueError("a conversation needs a tokenizer: pass tokenizer=... to load, or give token ids")
    checked_messages = checked(messages)
    if not has_template(tokenizer):
        raise ValueError("this model has no chat template: give its prompt as text, or set tokenizer.chat_template")
    checked_messages = [_with_calls(message, f"message {number}") for number, message in enumerate(checked_messages, 1)]
    arguments: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **template_kwargs}
    if add_generation_prompt and checked_messages[-1]["role"] == "assistant":
        if checked_messages[-1].get("tool_calls") or not checked_messages[-1]["content"].strip():
            raise ValueError("the assistant's last message has no text to continue: leave it out, or add an answer")
        arguments |= {"add_generation_prompt": False, "continue_final_message": True}
    try:
        text = tokenizer.apply_chat_template(checked_messages, tokenize=False, **arguments)
    except Exception as error:  # templates are programs and may raise anything
        raise ValueError(template_fault(error, tokenizer)) from None
    check_text("messages", text)
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the chat template renders nothing for these messages")
    return ids


def render_with(
    conversations: Sequence[Sequence[Message]], tokenizer: Any, template_kwargs: Mapping[str, Any] | None
) -> list[list[int]]:
    """:func:`render` each conversation with a caller's template arguments. Raises ``ValueError`` for tools that the
    template ignores."""
    more = {} if template_kwargs is None else template_kwargs
    fault = _mapping_fault(more)
    if fault:
        raise ValueError(f"template_kwargs must be a mapping of the chat template's variables, {fault}")
    rendered = []
    for number, messages in enumerate(conversations):
        with numbered(number, len(conversations)):
            rendered.append(render(messages, tokenizer, **more))
            if more.get("tools") and rendered[-1] == render(messages, tokenizer, **{**more, "tools": None}):
                raise ValueError("this model's chat template does not support tools: leave them out")
    return rendered


def _mapping_fault(mapping: Any) -> str:
    """Why :func:`render` cannot take these template arguments; empty if it can."""
    if not isinstance(mapping, Mapping):
        return f"not {_kind(mapping)}"
    unnamed = [name for name in mapping if not isinstance(name, str)]
    if unnamed:
        return f"by name, and {unnamed[0]!r} is not a name"
    taken = next((name for name in SET_HERE if name in mapping), None)
    return "" if taken is None else f"without {taken!r}, which is set here"


def template_fault(error: Exception, tokenizer: Any, longest: int = 300) -> str:
    """A template's error in one line: a syntax error with its location, or a refusal of the messages."""
    words = one_line(error, longest)
    if type(error).__name__ != "TemplateSyntaxError":
        return f"the chat template rejects these messages: {words}"
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    files = [name for name in ("chat_template.jinja", "tokenizer_config.json") if (folder / name).is_file()]
    location = f" in {folder / files[0]}" if files else ""
    number = getattr(error, "lineno", None)
    line = f"line {number}: " if number else ""
    return f"the chat template{location} has a syntax error ({line}{words}): copy it again, or give the prompt as text"


def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The special tokens that end an answer: the tokenizer's end of text, and the token that its template writes
    directly after an answer (``<|im_end|>``, ``<end_of_turn>``, ``<|eot_id|>``). Empty without a template.

    A checkpoint's ``generation_config.json`` should list them; that of many fine-tuned models does not.
    """
    if tokenizer is None or not has_template(tokenizer):
        return frozenset()
    ends = {tokenizer.eos_token_id} - {None}
    answer = "answer"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}], tokenize=False
        )
        following = tokenizer(text[text.rindex(answer) + len(answer) :].lstrip(), add_special_tokens=False)["input_ids"]
    except Exception:  # rendering a conversation reports what the template refuses
        following = []
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # Models whose turns end with another token have one of these as well.
    ends |= {token for token, about in added.items() if str(about) in ("<|endoftext|>", "<|end_of_text|>")}
    special = {*tokenizer.all_special_ids, *added}
    return frozenset(ends | ({following[0]} & special if following else set()))


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a single message" if "role" in value else "a mapping"
    return f"a {type(value).__name__}" if isinstance(value, list | tuple) else f"of type {type(value).__name__}"
