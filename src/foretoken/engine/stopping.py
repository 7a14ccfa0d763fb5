"""The only place that truncates output: end-of-text ids, stop strings across token borders, the length limit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "error", "deadline"]

UNKNOWN = "\ufffd"
"""What bytes that are no character are decoded to."""


class Detokenizer:
    """Text of a growing token list; an incomplete character is held back.

    Args:
        tokenizer: a Transformers tokenizer, or ``None`` (no text).
        special: include the text of special tokens.
        dropped: ids of tokens without text, in place of all special tokens; ``None`` for these.
    """

    CONTEXT = 16
    """Least left context in tokens, because the decoding of a token may depend on earlier ones."""
    HELD = 8
    """Tokens that are held back at most if their bytes form no character: one has four bytes."""

    def __init__(self, tokenizer: Any | None, special: bool = False, dropped: frozenset[int] | None = None) -> None:
        self._tokenizer, self._skip, self._dropped = tokenizer, not special and dropped is None, dropped
        self._ids: list[int] = []
        self._start = self._end = 0
        self._before = ""  # text of the tokens from _start to _end
        self._is_open = False  # whether the last character of that text is held back
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens; return the text that became certain."""
        if self._tokenizer is None:
            return ""
        self._ids.extend(ids)
        if self._end - self._start > 2 * self.CONTEXT:  # not at every token, which would decode the context twice
            self._slide()
        decoded = self._decode(self._ids[self._start :])
        if self._is_certain(decoded):
            return self._take(decoded)
        if len(self._ids) - self._end <= self.HELD or self._is_inside_character():
            return ""
        return self._take(decoded, is_open=decoded.endswith(UNKNOWN))  # more bytes may change only the last character

    def flush(self) -> str:
        """The text that was held back, even if incomplete."""
        return self._take(self._decode(self._ids[self._start :]))

    def _slide(self) -> None:
        """Move the window forward, to a token where a character begins: some tokenizers replace a whole run of bytes
        that begins inside one."""
        latest = self._end - self.CONTEXT
        starts = range(latest, latest - 4, -1)
        self._start = next((start for start in starts if self._before.endswith(self._text_from(start))), latest)
        self._before = self._text_from(self._start)

    def _text_from(self, start: int) -> str:
        decoded = self._decode(self._ids[start : self._end])
        return decoded[:-1] if self._is_open else decoded

    def _is_certain(self, decoded: str) -> bool:
        return decoded.startswith(self._before) and not decoded.endswith(UNKNOWN)

    def _is_inside_character(self) -> bool:
        """Whether the text was certain up to a few tokens ago.  Otherwise its bytes are no text, and only an incomplete
        character at the end may still change: some tokenizers replace a whole run where one byte is wrong."""
        ends = range(len(self._ids) - 3, len(self._ids))
        return any(self._is_certain(self._decode(self._ids[self._start : end])) for end in ends)

    def _take(self, decoded: str, is_open: bool = False) -> str:
        """Append the new part of the window's text, without its last character if that is open."""
        decoded = decoded[:-1] if is_open else decoded
        same = len(self._before)
        while not decoded.startswith(self._before[:same]):  # a tokenizer may replace earlier characters
            same -= 1
        new = decoded[same:]
        self._end, self._before, self._is_open = len(self._ids), decoded, is_open
        self.text += new
        return new

    def _decode(self, ids: list[int]) -> str:
        if self._dropped:
            ids = [token for token in ids if token not in self._dropped]
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip)) if ids and self._tokenizer else ""


class Strings:
    """Incremental search for strings in the text of a growing token list.

    Args:
        special: ids of special tokens, whose text is then part of the searched text; without any, special tokens have
            no text.
        dropped: see :class:`Detokenizer`; of the text that a match is an offset in.
    """

    def __init__(
        self,
        tokenizer: Any,
        strings: Sequence[str],
        special: frozenset[int] = frozenset(),
        dropped: frozenset[int] | None = None,
    ) -> None:
        self._tokenizer, self._strings, self._special, self._dropped = tokenizer, strings, special, dropped
        self._text = Detokenizer(tokenizer, special=True) if special else Detokenizer(tokenizer, dropped=dropped)
        self._ids: list[int] = []
        self._begins: list[int] = []  # start of each token's text
        self._old = 0

    def push(self, token: int) -> None:
        """Append a token."""
        self._old = len(self._text.text)
        self._ids.append(token)
        self._begins.append(self._old)
        self._text.push([token])

    def match(self) -> tuple[int, str] | None:
        """The first string that the last token completed, and its start in the text without special tokens."""
        text = self._text.text
        # A match may start in the text of earlier tokens; it ends in this token's.
        matches = ((text.find(s, max(0, self._old - len(s) + 1)), s) for s in self._strings)
        first = min(((index, s) for index, s in matches if index >= 0), default=None)
        if first is None or not self._special:
            return first
        return self._offset_of(first[0]), first[1]

    def _offset_of(self, index: int) -> int:
        """Position in the text without special tokens, from one in the text with them."""
        token = bisect_right(self._begins, index) - 1
        before = Detokenizer(self._tokenizer, dropped=self._dropped)
        for number in self._ids[:token]:  # one by one: an incomplete character at the end holds back only its own text
            before.push([number])
        if self._ids[token] not in (self._special if self._dropped is None else self._dropped):
            return len(before.text) + index - self._begins[token]
        before.flush()
        return len(before.text)


class Stopper:
    """Decides, token by token, where an output ends.

    Args:
        eos: ids that end the text (the id itself stays in the output, as in Transformers).
        stop: strings that end the text; the text is cut before the match, the tokens after the one that completed it.
        max_new_tokens: most output tokens.
        tokenizer: needed for stop strings.
        stop_ids: other ids that end the text, as if they were stop strings.
        special_stops: ids of special tokens whose text is a stop string; they end the text as that string does.
        special: ids of special tokens by their text. Stop strings that contain a special token and more are searched in
            the text with special tokens, as in Transformers.
        include: keep the stop string in the text, or that of the id that ended it.
        dropped: see :class:`Detokenizer`.
        min_tokens: a stop string ends the text only if it is completed after this many tokens, wherever it began; one
            completed earlier is ordinary text. (Earlier ids do end the text: a processor allows them only where nothing
            else may follow.)

    Attributes:
        cut: length of the text (without special tokens) before the stop string that ended it.
        suffix: text after the cut: the stop string, if ``include`` is set.
        drops_last: whether the last token, which ended the output, has no part in the text: it is then that of the
            tokens before.
        reason: the stop string or id that ended it.
    """

    def __init__(
        self,
        eos: frozenset[int],
        stop: Sequence[str],
        max_new_tokens: int,
        tokenizer: Any | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        special_stops: Mapping[int, str] | None = None,
        special: Mapping[str, int] | None = None,
        include: bool = False,
        dropped: frozenset[int] | None = None,
        min_tokens: int = 0,
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: load the model with one, or use end-of-text ids")
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        self._eos, self._stop, self._max = eos, tuple(stop), max_new_tokens
        self._stop_ids, self._include, self._least = stop_ids, include, min_tokens
        self._special_stops: Mapping[int, str] = special_stops or {}
        self.reason: str | int | None = None
        mixed = [s for s in stop if any(text in s for text in special or ()) and s not in self._special_stops.values()]
        plain = [s for s in stop if s not in mixed and s not in self._special_stops.values()]
        ids = frozenset((special or {}).values())
        self._watched = [Strings(tokenizer, plain, dropped=dropped)] if plain else []
        self._watched += [Strings(tokenizer, mixed, ids, dropped)] if mixed else []
        self._count = 0
        self.cut: int | None = None
        self.suffix = ""
        self.drops_last = False

    def push(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Number of ``tokens`` that are kept, and why the output ends there (``None``: it continues)."""
        for i, token in enumerate(tokens):
            self._count += 1
            if token in self._special_stops:
                self.reason = self._special_stops[token]
                self.suffix = self.reason if self._include else ""
                self.drops_last = True  # the suffix has its text, if any
                return i + 1, "stop"
            if token in self._eos:
                self.drops_last = not self._include
                return i + 1, "eos"
            if token in self._stop_ids:
                self.reason, self.drops_last = token, not self._include
                return i + 1, "stop"
            if self._matches(token):
                return i + 1, "stop"
            if self._count >= self._max:
                return i + 1, "length"
        return len(tokens), None

    def _matches(self, token: int) -> bool:
        for watched in self._watched:
            watched.push(token)
        if self._count <= self._least:
            return False
        matches = [match for watched in self._watched if (match := watched.match()) is not None]
        if matches:
            self.cut, self.reason = min(matches)
            self.suffix = self.reason if self._include else ""
        return bool(matches)

    @property
    def held_back(self) -> int:
        """Length of the longest stop string: this much text at the end of a stream may become part of one."""
        return max(map(len, self._stop), default=0)
