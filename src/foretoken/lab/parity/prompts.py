"""Prompts of a parity run: a file's, or our own."""

from __future__ import annotations

from pathlib import Path

from foretoken.lab.prompts import BenchPrompt, load_prompts

PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\n\nfor name in os.listdir('.'):\n    if name.endswith('.py'):\n        print(name)\n\nfor name in os.",
    "It was a dark night, and the rain had not stopped since the morning. ",
    "one two three four one two three four one two three",
)


def read_prompts(file: Path | None) -> list[BenchPrompt]:
    """Prompts of a file (:func:`foretoken.lab.prompts.load_prompts`); else our own.

    Raises:
        OSError: no such file.
        ValueError: no prompt in it, or a broken row, with file and line.
    """
    return [BenchPrompt("parity", text) for text in PROMPTS] if file is None else load_prompts(file)
