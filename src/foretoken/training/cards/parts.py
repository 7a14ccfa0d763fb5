"""What all cards are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMITS = (
    "It is a small base model for testing and measuring speculative decoding. It continues text; it follows no "
    "instructions, knows few facts, and may repeat itself.",
    "What it says reflects its training text, mistakes and biases included.",
    "Its losses above were measured on documents that were held out by a hash of their content. "
    "Near-duplicates of training documents may be among them.",
)


def front_matter(licence: str = "", model: bool = True) -> str:
    """The head that the Hugging Face hub reads."""
    lines = [f"license: {licence}"] if licence else []
    if model:
        lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- foretoken"]
    return "\n".join(["---", *lines, "---", ""])


def table(rows: Mapping[str, str]) -> str:
    """A table of two columns."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""])


def names_of(data: Sequence[str | Path]) -> str:
    """The last parts of the training paths."""
    return ", ".join(f"`{Path(path).name}`" for path in data)


def seen_text(report: Mapping[str, Any]) -> str:
    """How much text there was."""
    train = report["corpus"]["train"]
    return f"{train['documents']:,} documents, {train['tokens']:,} tokens"


def command(
    name: str,
    data: Sequence[str | Path],
    out: Path,
    options: Mapping[str, Any],
    folders: Mapping[str, str | Path | None],
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The ``foretoken train`` command of a run: the last parts of paths, options, and what ``--set`` was given."""
    words = [f"foretoken train {name}"]
    words += [f"{_flag(key)} {Path(path).name}" for key, path in folders.items() if path is not None]
    words += [f"--data {Path(path).name}" for path in data]
    words.append(f"--out {out.resolve().name}")
    words += [_flag(key) if value is True else f"{_flag(key)} {value}" for key, value in options.items()]
    words += [f"--set {key}={value}" for key, value in (settings or {}).items()]
    return " ".join(words)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
