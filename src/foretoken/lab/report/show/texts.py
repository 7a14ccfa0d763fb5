"""Text of tokens: the part that each added to the output, and a short form for pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CONTROL = str.maketrans({code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"} | {127: "␡"})
"""Visible symbols for control characters, which HTML and SVG must not contain."""
SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥"})


def token_texts(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str]:
    """The part of ``text`` that each token added; a partial character belongs to the token that completes it."""
    from foretoken.engine.stopping import Detokenizer

    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    decoder = Detokenizer(tokenizer)
    pieces = [decoder.push([token]) for token in token_ids]
    rest = decoder.flush()
    if pieces:
        pieces[-1] += rest
    room, cut = len(text), []
    for piece in pieces:  # text after a stop string is not shown
        cut.append(piece[:room])
        room -= len(cut[-1])
    return cut


def token_namer(tokenizer: Any) -> Callable[[int], str]:
    """A function from a token to the text that it adds, as servers show it: its ``decode`` alone would drop a leading
    space (SentencePiece). The id if there is no tokenizer or the tokenizer lacks it (a probe's own)."""
    if tokenizer is None:
        return str
    from foretoken.methods.drafters.vocabulary import speller

    spell, size = speller(tokenizer), len(tokenizer)
    return lambda token: str(token) if token >= size else spell(token).decode(errors="replace")


def printable(text: str) -> str:
    """The text without characters that are invalid in pages and pictures."""
    return (
        text.translate(CONTROL).encode("utf-8", "replace").decode("utf-8").replace("\ufffe", "?").replace("\uffff", "?")
    )


def visible(text: str, longest: int = 16) -> str:
    """Short form of a token in a picture: visible white space, at most ``longest`` characters."""
    signs = printable(text).translate(SIGNS) if text else "∅"
    return signs if len(signs) <= longest else signs[: longest - 1] + "…"


def quoted(text: str) -> str:
    """A token in quotes, for a sentence."""
    return f"'{visible(text)}'"


def width(text: str) -> float:
    """Width of a text in letters; CJK characters and the like count nearly two."""
    return sum(1.75 if ord(sign) > 0x1100 and not 0x2000 <= ord(sign) < 0x2E00 else 1.0 for sign in text)
