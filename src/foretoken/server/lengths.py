"""Lower bounds on the number of tokens of a text, without tokenising it.

A token is a string of characters.  Let every character weigh 1 / n, where n is the length of the longest token that
contains it.  Then no token weighs more than 1, so a text has at least as many tokens as its weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


class Lengths:
    """Lower bounds for one tokenizer.

    For a byte-level tokenizer without a normalizer (GPT-2's and its successors) bytes are weighed; any other is assumed
    to have at most 256 characters per token (long runs of spaces).
    """

    def __init__(self, tokenizer: Any | None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._weights = None if backend is None else _weights(backend)

    def least(self, text: str) -> int:
        """Lower bound on the number of tokens; takes a millisecond per megabyte."""
        if self._weights is None:
            return len(text) // 256
        codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        return int(np.bincount(codes, minlength=256) @ self._weights - 1e-6)


def _weights(backend: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Weights [256] of the bytes; ``None`` if tokens are not bytes."""
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
            longest[list(b" \t\n\r\v\f")] = np.inf  # it absorbs any number of adjacent spaces
    return 1.0 / longest


def _is_byte_level(described: Mapping[str, Any]) -> bool:
    pre = described.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _letters() -> dict[str, int]:
    """Byte of each letter in GPT-2's vocabulary: printable bytes are themselves, the others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    return dict(zip(letters, [*printable, *others], strict=True))
