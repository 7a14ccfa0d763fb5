"""Text becomes token ids with one beginning-of-text token, however many would be put before it."""

from __future__ import annotations

from typing import Any


def ids_with_one_bos(text: str, tokenizer: Any, special: bool = True) -> list[int]:
    """Token ids of a text.

    The output of a chat template, given as a plain prompt, begins with the text of the beginning-of-text token, and the
    tokenizer puts another before it.  Models were trained on one.

    Args:
        special: whether the tokenizer puts its special tokens around the text.
    """
    ids: list[int] = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    bos = getattr(tokenizer, "bos_token_id", None)
    if not special or bos is None or ids[:2] != [bos, bos]:
        return ids
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[1:] if plain[:1] == [bos] and len(plain) < len(ids) else ids
