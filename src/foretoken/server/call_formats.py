"""How models write calls of tools: the format that a chat template asks for, and a grammar that allows nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.server.errors import bad
from foretoken.server.schemas import Tool

MOST_CALLS = 16
"""Calls in one forced answer."""
LONGEST_PAST = 4000
"""Characters of earlier calls that are drafted from."""
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it, so that more of it is forced (llguidance's ``x-guidance``)."""


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    Attributes:
        name: of the format.
        begin, end: around each call.
        between: from one call to the next.
        opens, closes: around all calls.
        key: of the arguments.
        mark: special token before the calls; it is put behind the prompt where a call is forced.
    """

    name: str
    begin: str = ""
    end: str = ""
    between: str = ""
    opens: str = ""
    closes: str = ""
    key: str = "arguments"
    mark: str = ""

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """One call as the model would write it."""
        inner = json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)
        return f"{self.begin}{inner}{self.end}"


HERMES = CallFormat("hermes", begin="<tool_call>\n", end="\n</tool_call>", between="\n")
LLAMA = CallFormat("llama", between="; ", key="parameters")
MISTRAL = CallFormat("mistral", between=", ", opens="[", closes="]", mark="[TOOL_CALLS]")


def format_of(template: str) -> CallFormat:
    """The format that a chat template asks for; Hermes's for one that we do not know.

    Models that write Python calls can be read (:mod:`foretoken.server.call_reader`), but where a call is forced they
    write JSON as Llama does: a schema's types are not those of Python's values.
    """
    if MISTRAL.mark in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if "<|python_tag|>" in template or '"parameters"' in template or "pythonic" in template else HERMES


def forced(form: CallFormat, tools: Sequence[Tool], most: int) -> str:
    """A grammar (Lark's syntax, as llguidance reads it) of one to ``most`` calls of these tools and nothing else.

    Raises:
        ApiError: 400 for parameters that are no object.
    """
    again = f" ({_literal(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    parts = [_literal(form.opens), f"call{again}", _literal(form.closes)]
    lines = ["start: " + " ".join(part for part in parts if part)]
    lines.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        head = f'{form.begin}{{"name": {json.dumps(tool.function.name)}, "{form.key}": '
        lines.append(f"call_{place}: {_literal(head)} arguments_{place} {_literal('}' + form.end)}")
        lines.append(f"arguments_{place}: %json {json.dumps(_schema(tool))}")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    given = tool.function.parameters or {}
    if given.get("type", "object") != "object":
        raise bad(f"the parameters of {tool.function.name} must be a schema of type object", "tools")
    return {**given, "type": "object", "x-guidance": SPACING}
