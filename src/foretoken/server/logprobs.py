"""Log-probabilities in the formats of completions, chat completions and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretoken.engine.logprobs import TokenLogprobs
from foretoken.engine.stopping import Detokenizer
from foretoken.methods.drafters.vocabulary import speller

LEAST = -9999.0
"""Value of an impossible token, as in vLLM: JSON has no infinity."""


class TokenTexts:
    """Texts of single tokens, from the bytes that each adds to a text.

    The tokenizer's ``decode`` of one token would drop a leading space (SentencePiece), and turn every part of a
    character into the same replacement character.  A token that is no whole character is written as in OpenAI's API:
    ``bytes:`` and its bytes.  With ``as_ids`` every token is written as ``token_id:N`` instead.
    """

    def __init__(self, tokenizer: Any | None, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._spell: Callable[[int], bytes] | None = None

    def __call__(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        spelled = self.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def shown(self, token: int) -> str:
        """Text for people, with a sign for each part of a character; the id without a tokenizer."""
        return str(token) if self._tokenizer is None else self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty without a tokenizer."""
        if self._tokenizer is None:
            return b""
        if self._spell is None:
            self._spell = speller(self._tokenizer)
        return self._spell(token)

    def top(self, logprobs: TokenLogprobs, count: int) -> dict[str, float]:
        """The likeliest tokens and the sampled one; a token whose text is already used is named by its id."""
        values: dict[str, float] = {}
        for token, value in dict((*logprobs.top[:count], (logprobs.token_id, logprobs.logprob))).items():
            text = self(token)
            values[f"token_id:{token}" if text in values else text] = max(value, LEAST)
        return values


class Offsets:
    """Offsets of tokens in a growing text, the first of which begins at ``start``; ``dropped`` is that of the text's
    :class:`~foretoken.engine.stopping.Detokenizer`."""

    def __init__(self, tokenizer: Any | None, start: int = 0, dropped: frozenset[int] | None = None) -> None:
        self._text, self._start = Detokenizer(tokenizer, dropped=dropped), start

    def push(self, ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens in characters; special tokens have no text.

        They may exceed the length of a text that a stop string cuts; callers clamp them to that length.
        """
        offsets = []
        for token in ids:
            offsets.append(self._start + len(self._text.text))
            self._text.push([token])
        return offsets


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | None], ids: Sequence[int], texts: TokenTexts, count: int, offsets: Sequence[int]
) -> dict[str, Any]:
    """Format of completions: four lists.  A token without a value (the first of a prompt) has ``null``."""
    return {
        "tokens": [texts(token) for token in ids],
        "token_logprobs": [None if row is None else max(row.logprob, LEAST) for row in logprobs],
        "top_logprobs": [None if row is None else texts.top(row, count) for row in logprobs],
        "text_offset": list(offsets),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprobs], texts: TokenTexts, count: int) -> dict[str, Any]:
    """Format of chat completions: one object per token."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": texts(token), "logprob": max(value, LEAST), "bytes": list(texts.bytes_of(token))}

    return {
        "content": [
            {**entry(row.token_id, row.logprob), "top_logprobs": [entry(*pair) for pair in row.top[:count]]}
            for row in logprobs
        ]
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs | None], texts: TokenTexts, count: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: one object per prompt token, by token id, with the ``count`` likeliest tokens."""
    rows: list[dict[str, Any] | None] = []
    for row in logprobs:
        if row is None:
            rows.append(None)
            continue
        ranked = {row.token_id: row.rank, **{token: rank for rank, (token, _) in enumerate(row.top, 1)}}
        pairs = dict((*row.top[:count], (row.token_id, row.logprob)))
        rows.append(
            {
                str(token): {"logprob": max(value, LEAST), "rank": ranked[token], "decoded_token": texts(token)}
                for token, value in pairs.items()
            }
        )
    return rows
