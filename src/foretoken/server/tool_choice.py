"""Which tools a model is told of, which it may call, and which it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.server.call_formats import MOST_CALLS
from foretoken.server.errors import bad
from foretoken.server.schemas import ChatRequest, Tool

FIELD = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """What a request says about its tools.

    Attributes:
        offered: tools that the model is told of, and whose calls are read.
        forced: the answer calls one of these; none leaves that to the model.
        most: calls in an answer; ``None``: any number.
    """

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    most: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        return frozenset(tool.function.name for tool in self.offered)

    @property
    def most_forced(self) -> int:
        """Calls in a forced answer."""
        return self.most or MOST_CALLS


def choice_of(body: ChatRequest) -> ToolChoice:
    """The choice of a request.

    Raises:
        ApiError: 400 for a choice that names no tool of the request, or that others contradict.
    """
    tools, chosen = list(body.tools or ()), body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("two tools have the same name", "tools")
    most = 1 if body.parallel_tool_calls is False else None
    if isinstance(chosen, dict):
        found = _by_object(tools, chosen, most)
    elif chosen == "required":
        found = ToolChoice(tools, _some(tools), most)
    else:
        found = ToolChoice() if chosen == "none" else ToolChoice(tools, (), most)
    if found.forced and (body.structured_outputs is not None or _is_formed(body)):
        raise bad("a call of a tool is forced, so the answer has no other form: leave the one or the other out", FIELD)
    return found


def _is_formed(body: ChatRequest) -> bool:
    return body.response_format is not None and body.response_format.type != "text"


def _by_object(tools: Sequence[Tool], chosen: dict[str, Any], most: int | None) -> ToolChoice:
    """One function by its name, or some of them (``allowed_tools``)."""
    kind = chosen.get("type")
    if kind == "function":
        return ToolChoice(tools, _named(tools, [chosen]), 1)
    if kind != "allowed_tools" or not isinstance(chosen.get("allowed_tools"), dict):
        raise bad("tool_choice is auto, none, required, a function, or allowed_tools", FIELD)
    allowed = chosen["allowed_tools"]
    listed = allowed.get("tools")
    some = _named(tools, listed if isinstance(listed, list) else [])
    if allowed.get("mode", "auto") not in ("auto", "required"):
        raise bad("the mode of allowed_tools is auto or required", FIELD)
    return ToolChoice(some, some if allowed.get("mode") == "required" else (), most)


def _named(tools: Sequence[Tool], chosen: Sequence[Any]) -> list[Tool]:
    found = []
    for one in chosen:
        function = one.get("function") if isinstance(one, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad('tool_choice names a function as {"type": "function", "function": {"name": ...}}', FIELD)
        matching = [tool for tool in tools if tool.function.name == name]
        if not matching:
            raise bad(f"tool_choice names {name[:64]!r}, which is none of the tools", FIELD)
        found += matching
    return _some(found)


def _some(tools: Sequence[Tool]) -> list[Tool]:
    if not tools:
        raise bad("a call cannot be forced without tools: give some, or leave tool_choice out", FIELD)
    return list(tools)
