"""Options and target loading shared by the ``foretoken train`` commands."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from foretoken.models.base import LanguageModel

Data = Annotated[
    list[Path],
    typer.Option(
        help="Text folder or JSONL file (may be given several times). Rows have text, or are chats: messages "
        "(role, content) or ShareGPT's conversations (from, value). The target's template writes chats; only the "
        "assistant's text is learned."
    ),
]
Answers = Annotated[
    str,
    typer.Option(
        help="data (the chats as they are) or target (the target first answers their questions, kept in "
        "OUT/answers.jsonl; rows may then have turns, prompt or question instead)."
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of the network or its loss; `foretoken methods METHOD` explains them."),
]
Corpus = Annotated[Path | None, typer.Option(help="Folder of the encoded text; runs can share it.")]
Features = Annotated[
    Path | None, typer.Option(help="Folder of the target's hidden states; runs of one target can share it.")
]
WeightBits = Annotated[int, typer.Option(help="Store the drafter's weights in 16 bits, or in 8 for half the size.")]
Device = Annotated[str | None, typer.Option(help="auto (the default), cpu, cuda, cuda:1 or mps.")]
Report = Annotated[bool, typer.Option("--json", help="Print the report as the last line.")]
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""``mallopt`` parameter numbers of glibc."""


def key_values(items: list[str] | None) -> dict[str, str]:
    """Options of ``--set NAME=VALUE``.  Raises ``ValueError`` for anything else."""
    settings = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {item!r} is not key=value")
        settings[key] = value
    return settings


def load_target(target: str, device: str | None = None, dtype: str | None = None) -> tuple[LanguageModel, Any]:
    """The target and its tokenizer.  Raises ``ValueError`` for a bad checkpoint or device, or a missing tokenizer."""
    from foretoken.loading import load_model, load_tokenizer

    model, tokenizer = load_model(target, device=device, dtype=dtype, pack=False), load_tokenizer(target)
    if tokenizer is None:
        raise ValueError(f"{target} has no tokenizer beside it: training text must be encoded with the target's own")
    return model, tokenizer


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory; returns whether it does.

    By default every block above 32 MB is mapped anew.  The logits of a training step on CPU are larger, and touching
    their fresh pages takes half of the time (docs/log.md).  For commands only, as it affects the whole process.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings]
    return all(accepted)
