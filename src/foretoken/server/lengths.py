"""How many tokens a text has at least, without tokenising it.

A token is a string of characters.  Let every character weigh 1 / n, where n is the length of the longest token that
holds it: then no token weighs more than 1, so that a text has at least as many tokens as it weighs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

LONGEST_TOKEN = 256
"""Characters of a token, at most, of tokenizers whose tokens are not known (long runs of spaces)."""
SPACES = b" \t\n\r\v\f"


class Lengths:
    """Lower bounds for one tokenizer.

    Where its tokens are bytes and it changes no text before ("byte-level", as GPT-2's and all that followed), bytes are
    weighed; for others a text has a token for every ``LONGEST_TOKEN`` characters.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._weights = None if backend is None else _weights(backend)

    def least(self, text: str) -> int:
        """So many tokens at least; takes a millisecond for a megabyte."""
        if self._weights is None:
            return len(text) // LONGEST_TOKEN
        codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        return int(np.bincount(codes, minlength=256) @ self._weights - 1e-6)


def _weights(backend: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """What each of the 256 bytes weighs; ``None`` where tokens are no bytes."""
    described = json.loads(backend.to_str())
    if described.get("normalizer") is not None or not _is_byte_level(described):
        return None
    longest = np.ones(256)
    letters = _letters()
    for token in backend.get_vocab():
        byte_values = [letters[letter] for letter in set(token) if letter in letters]
        longest[byte_values] = np.maximum(longest[byte_values], len(token))
    for added in described.get("added_tokens", ()):
        byte_values = list(set(added["content"].encode()))
        longest[byte_values] = np.maximum(longest[byte_values], len(added["content"].encode()))
        if added.get("lstrip") or added.get("rstrip"):
            longest[list(SPACES)] = np.inf  # it takes any number of spaces beside it
    return 1.0 / longest


def _is_byte_level(described: Mapping[str, Any]) -> bool:
    pre = described.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _letters() -> dict[str, int]:
    """The letter that GPT-2's vocabulary has for each byte: printable ones are themselves, others come behind 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    return dict(zip(letters, [*printable, *others], strict=True))
