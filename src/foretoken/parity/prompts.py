"""Prompts of a parity run: a file's, or our own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\n\nfor name in os.listdir('.'):\n    if name.endswith('.py'):\n        print(name)\n\nfor name in os.",
    "It was a dark night, and the rain had not stopped since the morning. ",
    "one two three four one two three four one two three",
)


def read_prompts(file: Path | None) -> list[str]:
    """Prompts of a text file (one a line) or of JSONL rows with ``prompt``, ``text`` or ``turns``; else our own.

    Raises:
        OSError: no such file.
        ValueError: no prompt in it, or a broken row.
    """
    if file is None:
        return list(PROMPTS)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        lines = [line for line in raw.decode("utf-8").splitlines() if line.strip()]
        as_rows = ".jsonl" in file.suffixes
        found = [_prompt_of(json.loads(line)) if as_rows else line for line in lines]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no text or JSONL file: {error}") from None
    prompts = [prompt for prompt in found if prompt]
    if not prompts:
        raise ValueError(f"{file} holds no prompts: one a line, or JSONL rows with prompt, text or turns")
    return prompts


def _prompt_of(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    turns = row.get("turns")
    value = row.get("prompt") or row.get("text") or (turns[0] if turns else "")
    return value if isinstance(value, str) else ""
