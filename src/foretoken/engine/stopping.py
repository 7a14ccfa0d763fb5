"""The one place that truncates output: end-of-text ids, stop strings across token borders, the length limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "context", "error", "cancelled", "deadline"]


class Detokenizer:
    """Text of a growing token list; a half-written character is held back until it is whole.

    Args:
        tokenizer: a Transformers tokenizer, or ``None`` (no text).
    """

    CONTEXT = 16
    """Tokens kept as left context, at least: decoding a token may depend on the ones before it."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0
        self._before = ""  # the text of what lies between start and shown
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens; return the text that became certain."""
        if self._tokenizer is None:
            return ""
        self._ids.extend(ids)
        if self._shown - self._start > 2 * self.CONTEXT:  # not at every token: that would be another text to decode
            self._start = self._shown - self.CONTEXT
            self._before = self._decode(self._ids[self._start : self._shown])
        now = self._decode(self._ids[self._start :])
        if now.endswith("\ufffd") or not now.startswith(self._before):
            return ""
        return self._take(now)

    def flush(self) -> str:
        """What was held back, as it stands."""
        if self._tokenizer is None:
            return ""
        return self._take(self._decode(self._ids[self._start :]))

    def _take(self, now: str) -> str:
        """What the text from the start of the window on has more than before."""
        new = now[len(self._before) :] if now.startswith(self._before) else now
        self._shown, self._before = len(self._ids), now
        self.text += new
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids and self._tokenizer else ""


class Stopper:
    """Decides, token by token, where an output ends.

    Args:
        eos: ids that end the text (the id itself stays in the output, as in Transformers).
        stop: strings that end the text; the text is cut before the match, the tokens after the one that completed it.
        max_new_tokens: most output tokens.
        tokenizer: needed for stop strings.
        stop_ids: other ids that end the text, as if they were stop strings.
        named: ids of special tokens whose text is a stop string; they end the text as that string does.
        include: leave the stop string in the text.
        min_tokens: a stop string ends the text only where a later token than so many completes it, wherever the string
            began; one that is complete earlier is text like any other.  (Ids that come earlier do end the text: a
            processor lets them come only where nothing else may follow.)

    Attributes:
        cut: how much of the text is kept, where a stop string ended it.
        suffix: what the text has behind that: the stop string, where it is a special token's and was asked for.
        reason: the stop string or the id that ended it.
    """

    def __init__(
        self,
        eos: frozenset[int],
        stop: Sequence[str],
        max_new_tokens: int,
        tokenizer: Any | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        named: Mapping[int, str] | None = None,
        include: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: load the model with one, or use end-of-text ids")
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        self._eos, self._stop, self._max = eos, tuple(stop), max_new_tokens
        self._stop_ids, self._include, self._least = stop_ids, include, min_tokens
        self._named: Mapping[int, str] = named or {}
        self.reason: str | int | None = None
        self._text = Detokenizer(tokenizer) if stop else None
        self._count = 0
        self.cut: int | None = None
        self.suffix = ""

    def push(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of ``tokens`` are kept, and why the output ends there (``None``: it goes on)."""
        for i, token in enumerate(tokens):
            self._count += 1
            if token in self._named:
                self.reason = self._named[token]
                self.suffix = self.reason if self._include else ""
                return i + 1, "stop"
            if token in self._eos:
                return i + 1, "eos"
            if token in self._stop_ids:
                self.reason = token
                return i + 1, "stop"
            if self._text is not None and self._matches(token):
                return i + 1, "stop"
            if self._count >= self._max:
                return i + 1, "length"
        return len(tokens), None

    def _matches(self, token: int) -> bool:
        written = self._text
        if written is None:
            return False
        old = len(written.text)
        written.push([token])
        text = written.text
        if self._count <= self._least:
            return False
        # A match may begin in the text of earlier tokens, and ends in this one's.
        found = ((text.find(s, max(0, old - len(s) + 1)), s) for s in self._stop)
        places = [(place, s) for place, s in found if place >= 0]
        if places:
            self.cut, self.reason = min(places)
            self.cut += len(self.reason) if self._include else 0
        return bool(places)

    @property
    def held_back(self) -> int:
        """Longest stop string: that much text at the end of a stream may still turn out to be one."""
        return max(map(len, self._stop), default=0)
