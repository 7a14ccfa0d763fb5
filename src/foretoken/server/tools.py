"""Calls of tools in what a model wrote: the formats of Hermes and Qwen, Llama 3, and Mistral."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
MARKS = ("<tool_call>", MISTRAL, LLAMA)
"""Where a call begins; text that follows may be one."""


def parse(text: str, known: set[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text before the calls, and the calls; a call of a function that nobody offered is text.

    Args:
        text: what the model wrote.
        known: names of the functions that were offered.
    """
    before, found = _split(text)
    calls = [call for call in map(_call, found) if call is not None and call["function"]["name"] in known]
    return (before.strip(), calls) if calls and len(calls) == len(found) else (text, [])


def _split(text: str) -> tuple[str, list[Any]]:
    if "<tool_call>" in text:
        return text[: text.index("<tool_call>")], [_loaded(one) for one in HERMES.findall(text)]
    for mark in (MISTRAL, LLAMA):
        if mark in text:
            before, _, rest = text.partition(mark)
            return before, _listed(rest)
    bare = text.strip()
    return ("", _listed(bare)) if bare.startswith(("{", "[{")) else (text, [])


def _listed(text: str) -> list[Any]:
    """Objects in a list, alone, or separated by semicolons (Llama 3)."""
    whole = _loaded(text.strip())
    if whole is not None:
        return whole if isinstance(whole, list) else [whole]
    return [_loaded(part) for part in text.split(";") if part.strip()]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None


def _call(found: Any) -> dict[str, Any] | None:
    """OpenAI's shape of a call; ``None`` for something else."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict | str):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": found["name"], "arguments": text},
    }


def may_begin(text: str) -> bool:
    """Whether a text that is not finished may turn out to be a call: a stream holds it back."""
    bare = text.lstrip()
    if bare.startswith(("{", "[")) or any(mark in text for mark in MARKS):
        return True
    return any(text.endswith(mark[:size]) for mark in MARKS for size in range(1, len(mark)))
