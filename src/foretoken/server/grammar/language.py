"""Enumeration of all strings that match a schema, a regular expression or a grammar, if they are few.

llguidance's automaton is walked byte by byte, so whatever it reads can be a finite language.  A choice is such a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import thread_time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from foretoken.core.constraints import FiniteLanguage
from foretoken.core.values import one_line
from foretoken.server.grammar.compiling import (
    LIMITS,
    LONGEST,
    TOKEN,
    checked_grammar,
    checked_texts,
    known_ends,
    tokenizer_view,
)
from foretoken.server.grammar.constraint import reason_of

MOST_STRINGS = 2048
"""Maximum number of strings of a language."""
MOST_BYTES = 4096
"""Maximum length of a string in bytes."""
MOST_STEPS = 65_536
"""Maximum number of bytes of all strings, common beginnings counted once."""
WALK_S = 1.0
"""Seconds of processor time for listing the strings."""


def compile_language(
    kind: str,
    spec: Any,
    tokenizer: Any,
    vocab_size: int,
    patience_s: float | None = None,
    ends: Iterable[int] = (),
) -> FiniteLanguage:
    """All matching strings, each in the tokenizer's spelling.

    A text has many spellings in tokens, and the model was trained on the tokenizer's.  The language holds that spelling
    of every string by itself, not together with the end of the prompt.

    Arguments and errors are those of :func:`foretoken.server.grammar.compile_constraint`.  A ``ValueError`` also means
    that no string matches, that the strings are too many or too long (or endless), or that the tokenizer cannot spell
    one.
    """
    strings = _listed(spec) if kind == "choice" else _walked(kind, checked_grammar(kind, spec, patience_s))
    every_end = known_ends(tokenizer, vocab_size, ends)
    view = tokenizer_view(tokenizer, vocab_size, every_end)
    return FiniteLanguage.of([_spelled(text, view) for text in strings], every_end)


def _spelled(text: bytes, view: LLTokenizer) -> list[int]:
    tokens = [int(token) for token in view.tokenize_bytes(text)]
    special = [token for token in tokens if view.is_special_token(token)]
    if special or view.decode_bytes(tokens) != text:
        excerpt = text.decode("utf-8", "replace")[:60]
        reason = f"it is the special token {special[0]}" if special else "its tokens spell another text"
        raise ValueError(f"the tokenizer cannot spell the string {excerpt!r} of the language: {reason}")
    return tokens


def _listed(spec: Any) -> list[bytes]:
    """The texts of a choice."""
    texts = set(checked_texts(spec))
    try:
        strings = sorted(text.encode() for text in texts)
    except UnicodeError as error:
        raise ValueError(f"the choice is not text: {one_line(error, 200)}") from None
    for count, most, unit in (
        (len(strings), MOST_STRINGS, "strings"),
        (max(map(len, strings)), MOST_BYTES, "bytes in one string"),
        (sum(map(len, texts)), LONGEST, "characters"),
    ):
        if count > most:
            raise ValueError(
                f"the choice has {count} {unit}, and conditional sampling takes {most}; leave conditional sampling out "
                "to mask by the choice token by token"
            )
    return strings


def _walked(kind: str, grammar: str) -> list[bytes]:
    """All strings that the grammar matches."""
    if TOKEN.search(grammar):
        raise ValueError(f"the {kind} names tokens by their ids, and conditional sampling supports strings only")
    tokenizer = LLTokenizer("byte")
    ends = sum(1 << int(end) for end in tokenizer.eos_tokens)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    strings: list[bytes] = []
    text = bytearray()
    until, steps = thread_time() + WALK_S, 0  # CPU time of this thread: a busy machine accepts what an idle one does

    def following() -> Iterator[int]:
        """Bytes that may come next; records a complete string."""
        _check(kind, matcher)
        if matcher.is_stopped() or matcher.is_accepting():
            strings.append(bytes(text))
        if matcher.is_stopped():
            return iter(())
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        _check(kind, matcher)
        if (bits & ~ends) >> 256:
            raise ValueError(f"the {kind} names special tokens, and conditional sampling supports strings only")
        return (byte for byte in range(256) if bits >> byte & 1)

    open_bytes = [following()]
    while open_bytes:
        byte = next(open_bytes[-1], None)
        if byte is None:
            open_bytes.pop()
            if text:
                text.pop()
                matcher.rollback(1)
            continue
        steps += 1
        if steps > MOST_STEPS:
            raise _too_large(
                kind, f"it has more than {MOST_STEPS} bytes in all strings, common beginnings counted once"
            )
        if len(text) >= MOST_BYTES:
            raise _too_large(kind, f"it has a string of more than {MOST_BYTES} bytes")
        if thread_time() > until:
            raise _too_large(kind, f"listing its strings takes more than {WALK_S:g} s")
        matcher.consume_token(byte)
        text.append(byte)
        open_bytes.append(following())
        if len(strings) > MOST_STRINGS:
            raise _too_large(kind, f"it has more than {MOST_STRINGS} strings")
    if not strings:
        raise ValueError(f"no string matches the {kind}: the language is empty")
    return strings


def _check(kind: str, matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(f"the strings of the {kind} cannot be listed: {reason_of(matcher)}")


def _too_large(kind: str, what: str) -> ValueError:
    return ValueError(
        f"the {kind} is not finite, or too large for conditional sampling: {what}; leave conditional sampling "
        f"out to mask by the {kind} token by token"
    )
