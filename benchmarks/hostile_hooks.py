"""Hooks of ``benchmarks/hostile.py``: requests get past the model's name, answers are short, and all are counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import schemathesis

TOKENS = 6
"""Most output tokens of a request that is otherwise served: the engine's speed is not what is tested."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Nine of ten strings in ``model`` become the model's name, and answers short."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and sum(body["model"].encode(errors="replace")) % 10:
        body["model"] = os.environ["HOSTILE_MODEL"]
    limits = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body]
    for name in limits:
        if isinstance(body[name], int) and 900 > body[name] > TOKENS:
            body[name] = TOKENS
    if not limits and ("prompt" in body or "messages" in body) and "model" in body:
        body["max_tokens"] = TOKENS
    if not limits and "input" in body and "model" in body:  # ``/v1/responses``
        body["max_output_tokens"] = TOKENS


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """A line for each answer."""
    line = {"route": case.operation.label, "status": response.status_code, "s": response.elapsed}
    with Path(os.environ["HOSTILE_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line, default=str) + "\n")
