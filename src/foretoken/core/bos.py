"""Tokenization of text with exactly one beginning-of-text token."""

from __future__ import annotations

from typing import Any


def ids_with_one_bos(text: str, tokenizer: Any, special: bool = True) -> list[int]:
    """Token ids of a text, without a duplicate beginning-of-text token.

    The output of a chat template already begins with the beginning-of-text token, and the tokenizer adds another one.
    Models were trained on one.

    Args:
        special: whether the tokenizer adds its special tokens.
    """
    ids: list[int] = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if not special or bos is None or ids[:2] != [bos, bos]:
        return ids
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[1:] if plain[:1] == [bos] and len(plain) < len(ids) else ids
