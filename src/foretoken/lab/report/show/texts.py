"""Tokens as text: what each added to the output, and how one looks in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTROL = str.maketrans({code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"} | {127: "␡"})
"""Control characters, which neither HTML nor SVG may hold, as signs."""
SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥"})
LONGEST = 16
"""Letters of a token in a picture."""


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


def token_text(tokenizer: Any, token: int) -> str:
    """One token as text; its id where there is no tokenizer or it has no such token (a probe's own)."""
    if tokenizer is None or token >= len(tokenizer):
        return str(token)
    return str(tokenizer.decode([token]))


def printable(text: str) -> str:
    """A text without what pages and pictures may not hold."""
    return (
        text.translate(CONTROL).encode("utf-8", "replace").decode("utf-8").replace("\ufffe", "?").replace("\uffff", "?")
    )


def visible(text: str) -> str:
    """A token as a picture shows it: white space as signs, and not too long."""
    signs = printable(text).translate(SIGNS) if text else "∅"
    return signs if len(signs) <= LONGEST else signs[: LONGEST - 1] + "…"


def quoted(text: str) -> str:
    """A token inside a sentence."""
    return f"'{visible(text)}'"


def width(text: str) -> float:
    """How many letters wide a text is: Chinese signs and their like take nearly two."""
    return sum(1.75 if ord(sign) > 0x1100 and not 0x2000 <= ord(sign) < 0x2E00 else 1.0 for sign in text)
