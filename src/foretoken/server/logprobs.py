"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.engine.logprobs import TokenLogprobs


class TokenTexts:
    """Texts of single tokens.

    Args:
        tokenizer: a Transformers tokenizer, or ``None``.
        as_ids: write ``token_id:N`` instead.
    """

    def __init__(self, tokenizer: Any | None, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, token: int) -> str:
        """The text of a token."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return str(self._tokenizer.decode([token]))

    def top(self, found: TokenLogprobs, count: int) -> dict[str, float]:
        """The likeliest tokens, and the one that was taken; of tokens with one text the likeliest."""
        values: dict[str, float] = {}
        for token, value in (*found.top[:count], (found.token_id, found.logprob)):
            values.setdefault(self(token), value)
        return values


def completion_logprobs(
    found: Sequence[TokenLogprobs | None], ids: Sequence[int], texts: TokenTexts, count: int, offset: int = 0
) -> dict[str, Any]:
    """The old shape: four lists.  A token without a value (the first of a prompt) has ``null``."""
    tokens = [texts(token) for token in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else one.logprob for one in found],
        "top_logprobs": [None if one is None else texts.top(one, count) for one in found],
        "text_offset": offsets,
    }


def chat_logprobs(found: Sequence[TokenLogprobs], texts: TokenTexts, count: int) -> dict[str, Any]:
    """The new shape: one object per token."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = texts(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top[:count]]}
            for one in found
        ]
    }


def prompt_logprobs(
    found: Sequence[TokenLogprobs | None], texts: TokenTexts, count: int
) -> list[dict[str, Any] | None]:
    """vLLM's shape: one object by token id per token of the prompt, with so many of the likeliest ones."""
    rows: list[dict[str, Any] | None] = []
    for one in found:
        if one is None:
            rows.append(None)
            continue
        ranked = {token: rank + 1 for rank, (token, _) in enumerate(one.top)}
        pairs = dict((*one.top[:count], (one.token_id, one.logprob)))
        rows.append(
            {
                str(token): {"logprob": value, "rank": ranked.get(token), "decoded_token": texts(token)}
                for token, value in pairs.items()
            }
        )
    return rows
