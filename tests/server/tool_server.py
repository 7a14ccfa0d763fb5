"""A server whose model has a chat template for tools, and answers that are scripted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import foretoken as ft
from foretoken.llm import Llm
from foretoken.server import turn
from foretoken.server.config import ServerSettings

TEMPLATE = (
    "{% for t in tools or [] %}<tool {{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}


def make_with_template(settings: ServerSettings) -> Llm:
    """The built-in target with a chat template."""
    llm = ft.load("builtin", "ngram", dtype="float32", controller="constant", known=True)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model say a text, by a grammar."""
    pytest.importorskip("llguidance", reason="the extra 'grammar' is not installed")
    from foretoken.server.grammar import compile_constraint

    def say(text: str) -> None:
        async def scripted(body: Any, count: int, serving: Any, *calls: Any) -> list[Any]:
            llm = serving.llm
            return [
                compile_constraint("regex", re.escape(text), llm.tokenizer, llm.target.vocab_size) for _ in range(count)
            ]

        monkeypatch.setattr(turn, "constraints_of", scripted)

    return say
