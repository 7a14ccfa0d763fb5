"""Tool call formats of chat templates, and grammars of forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.server.errors import bad
from foretoken.server.known_formats import SPACING, without_unknown_formats
from foretoken.server.schemas import ChatRequest, Tool

MOST_CALLS = 16
"""Maximum number of calls in a forced answer."""
FIELD, PARAMETERS = "tool_choice", "function.parameters"


@dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    Attributes:
        begin, end: text around each call.
        between: text between two calls.
        opens, closes: text around all calls.
        key: key of the arguments.
    """

    name: str
    begin: str = ""
    end: str = ""
    between: str = ""
    opens: str = ""
    closes: str = ""
    key: str = "arguments"

    def call_text(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the model would write it."""
        inner = json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)
        return f"{self.begin}{inner}{self.end}"


HERMES = CallFormat("hermes", begin="<tool_call>\n", end="\n</tool_call>", between="\n")
LLAMA = CallFormat("llama", between="; ", key="parameters")
MISTRAL = CallFormat("mistral", between=", ", opens="[TOOL_CALLS][", closes="]")


def format_of(template: str) -> CallFormat:
    """Call format of a chat template; Hermes's if it is unknown.

    Python calls can be read (:mod:`foretoken.server.call_reader`), but models that write them have forced calls in
    Llama's JSON format: a schema's types are not those of Python's values.
    """
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if "<|python_tag|>" in template or '"parameters"' in template or "pythonic" in template else HERMES


def forced(form: CallFormat, tools: Sequence[Tool], most: int | None, special: Mapping[str, int]) -> str:
    """Grammar (Lark's syntax, as llguidance reads it) of one to ``most`` calls of these tools and nothing else
    (:data:`MOST_CALLS` by default).

    ``special`` has the ids of the tokenizer's added tokens, which a grammar names by id.  Raises ``ApiError`` 400 for
    parameters that are no object.
    """

    def literal(text: str) -> str:
        return _literal(text, special)

    most = most or MOST_CALLS
    again = f" ({literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    parts = [literal(form.opens), f"call{again}", literal(form.closes)]
    lines = ["start: " + " ".join(part for part in parts if part)]
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        head = f'{form.begin}{{"name": {json.dumps(tool.function.name)}, "{form.key}": '
        lines.append(f"call_{number}: {literal(head)} arguments_{number} {literal('}' + form.end)}")
        lines.append(f"arguments_{number}: %json {json.dumps(_schema(tool))}")
    return "\n".join(lines)


def schemas_of(tools: Sequence[Tool], forced: Sequence[Tool]) -> dict[str, Any]:
    """Schemas of the arguments of forced calls, by path in the request.  Raises ``ApiError`` 400 for parameters that
    are no object."""
    indices = {tool.function.name: index for index, tool in enumerate(tools)}
    return {
        f"tools.{indices[tool.function.name]}.{PARAMETERS} ({tool.function.name})": _schema(tool) for tool in forced
    }


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Grammar literal of a text, with special tokens by id."""
    marks = [mark for mark in special if mark in text]
    if not marks:
        return json.dumps(text) if text else ""
    mark = max(marks, key=len)
    before, _, after = text.partition(mark)
    return f"{_literal(before, special)} <[{special[mark]}]> {_literal(after, special)}"


def special_of(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokenizer's added tokens that the formats use, by text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
    return {str(token): int(number) for number, token in added.items() if str(token) in marks}


def _schema(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments, an object; empty if no member is named.

    JSON Schema would then allow any members, and a model invents some.
    """
    parameters = tool.function.parameters or {"properties": {}}
    # With any other key a schema that names no member may mean more than an empty object
    bare = {"type", "properties", "required", "title", "description", "$schema"}
    if parameters.get("properties") == {} and not parameters.get("required") and set(parameters) <= bare:
        parameters = {**parameters, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise bad(f"the parameters of {tool.function.name} must be a schema of type object", "tools")
    return {**without_unknown_formats(parameters), "type": "object", "x-guidance": SPACING}


@dataclass(frozen=True)
class ToolChoice:
    """Tool choice of a request.

    Attributes:
        offered: tools that the model is shown and whose calls are read.
        forced: tools of which the answer calls one; if empty, the model decides.
        most: maximum number of calls in an answer; ``None``: no limit.
    """

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    most: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(tool.function.name for tool in self.offered)

    @property
    def free(self) -> bool:
        """Whether the model decides about calls and may write any arguments: ``strict`` is not enforced then."""
        return bool(self.offered) and not self.forced


def choice_of(body: ChatRequest) -> ToolChoice:
    """Tool choice of a request.  Raises ``ApiError`` 400 for an unknown tool and for contradicting fields."""
    tools, chosen = list(body.tools or ()), body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("two tools have the same name", "tools")
    most = 1 if body.parallel_tool_calls is False else None
    if isinstance(chosen, dict):
        choice = _by_object(tools, chosen, most)
    elif chosen == "required":
        choice = ToolChoice(tools, _some(tools), most)
    else:
        choice = ToolChoice() if chosen == "none" else ToolChoice(tools, (), most)
    form = body.response_format
    if choice.forced and (body.structured_outputs is not None or (form is not None and form.type != "text")):
        raise bad("a forced tool call and a response format exclude each other: leave one of them out", FIELD)
    return choice


def _by_object(tools: Sequence[Tool], chosen: dict[str, Any], most: int | None) -> ToolChoice:
    """One function by name, or several (``allowed_tools``)."""
    kind = chosen.get("type")
    if kind == "function":
        return ToolChoice(tools, _tools_of(tools, [chosen]), 1)
    if kind != "allowed_tools" or not isinstance(chosen.get("allowed_tools"), dict):
        raise bad("tool_choice is auto, none, required, a function, or allowed_tools", FIELD)
    allowed = chosen["allowed_tools"]
    listed = allowed.get("tools")
    some = _tools_of(tools, listed if isinstance(listed, list) else [])
    if allowed.get("mode", "auto") not in ("auto", "required"):
        raise bad("the mode of allowed_tools is auto or required", FIELD)
    return ToolChoice(some, some if allowed.get("mode") == "required" else (), most)


def _tools_of(tools: Sequence[Tool], chosen: Sequence[Any]) -> list[Tool]:
    allowed = []
    for choice in chosen:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad('tool_choice names a function as {"type": "function", "function": {"name": ...}}', FIELD)
        matching = [tool for tool in tools if tool.function.name == name]
        if not matching:
            raise bad(f"tool_choice names {name[:64]!r}, which is not one of the tools", FIELD)
        allowed += matching
    return _some(allowed)


def _some(tools: Sequence[Tool]) -> list[Tool]:
    if not tools:
        raise bad("tool_choice cannot force a call without tools: give tools, or leave tool_choice out", FIELD)
    return list(tools)
