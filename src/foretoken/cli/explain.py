"""Coloured tokens: which were accepted drafts, which came from the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foretoken.cli.output import has_colour

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from foretoken.llm import Output

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": ""}
MARKS = {"accepted": ("[", "]"), "recovered": ("<", ">"), "bonus": ("{", "}"), "plain": ("", "")}
MEANINGS = {
    "accepted": "accepted draft token",
    "recovered": "recovered (a draft was rejected here)",
    "bonus": "bonus (all drafts of the round stood)",
    "plain": "plain (nothing was drafted)",
}


def token_texts(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str]:
    """The part of ``text`` that each token added; a half-written character belongs to the token that completed it."""
    from foretoken.engine.stopping import Detokenizer

    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    decoder = Detokenizer(tokenizer)
    pieces = [decoder.push([token]) for token in token_ids]
    rest = decoder.flush()
    if pieces:
        pieces[-1] += rest
    room, cut = len(text), []
    for piece in pieces:  # text behind a stop string is not shown
        cut.append(piece[:room])
        room -= len(cut[-1])
    return cut


def explained(output: Output, tokenizer: Any, colour: bool) -> Text:
    """The output with its tokens coloured by origin, or marked when there is no colour."""
    from rich.text import Text

    texts = token_texts(tokenizer, output.token_ids, output.text)
    result = Text()
    pairs = [(o, t) for o, t in zip(output.origins, texts, strict=True) if t]
    for origin, group in groupby(pairs, key=lambda pair: pair[0]):
        run = [text for _, text in group]
        if colour:
            result.append("".join(run), STYLES[origin])
        else:
            left, right = MARKS[origin]
            result.append(left + "|".join(run) + right if left else "".join(run))
    return result


def legend(colour: bool) -> Text:
    """What the colours or marks mean, on one line per origin."""
    from rich.text import Text

    result = Text()
    for origin, meaning in MEANINGS.items():
        left, right = MARKS[origin]
        sample = Text("text", STYLES[origin]) if colour else Text(f"{left}text{right}")
        result.append_text(Text("  ")).append_text(sample).append(f"  {meaning}\n")
    return result


def print_explained(console: Console, output: Output, tokenizer: Any) -> None:
    """Legend, then the text."""
    colour = has_colour(console)
    console.print(legend(colour), end="", soft_wrap=True)
    console.print(explained(output, tokenizer, colour), soft_wrap=True)
