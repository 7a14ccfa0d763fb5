"""Prompts: text, token ids or a conversation, single or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from foretoken.core.bos import ids_with_one_bos
from foretoken.core.conversation import Message, is_messages, render
from foretoken.core.values import check_text, is_whole, plain

Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""Text, token ids (a list, tensor or array), messages, or a tokenizer's output for one text."""
KINDS = "a prompt is text, token ids (a list, or a 1-D tensor or array of integers), or a list of messages"


def encode(prompt: Any, tokenizer: Any | None) -> list[int]:
    """Token ids of one prompt. Raises ``ValueError`` for anything else, including several prompts."""
    prompts, single = prompts_of(prompt, tokenizer)
    if not single:
        if not prompts:
            raise ValueError("the prompt is empty: give at least one token")
        raise ValueError(f"expected one prompt, not a list of {len(prompts)}: {KINDS}")
    (item,) = prompts
    if isinstance(item, str):
        return _of_text(item, tokenizer)
    if is_messages(item):
        return render(item, tokenizer)
    return _checked_ids(item)


def prompts_of(prompts: Any, tokenizer: Any | None = None) -> tuple[list[Any], bool]:
    """Prompts for :func:`encode`, and whether the argument is a single one.

    A list of numbers, a list of messages, a 1-row tensor, and a tokenizer's 1-row output are one prompt. Raises
    ``ValueError`` for anything else that is no list of prompts.

    Args:
        tokenizer: names the padding id.
    """
    if isinstance(prompts, str) or is_messages(prompts):
        return [prompts], True
    if isinstance(prompts, Mapping):
        return _of_mapping(prompts)
    if hasattr(prompts, "tolist"):
        return _of_array(prompts.tolist(), tokenizer)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise ValueError(f"{KINDS}, not {_shown(prompts)}")
    if any(isinstance(item, Number) for item in prompts):
        return [prompts], True
    return list(prompts), False


def _of_mapping(mapping: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The rows of a tokenizer's output, without left padding."""
    if "input_ids" not in mapping:
        hint = "put the message into a list" if "role" in mapping else "a mapping needs input_ids"
        raise ValueError(f"{KINDS}, not {_shown(mapping)}: {hint}")
    rows, single = _rows(plain(mapping["input_ids"]))
    if mapping.get("attention_mask") is None:
        return rows, single
    masks, _ = _rows(plain(mapping["attention_mask"]))
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise ValueError("input_ids and attention_mask have different shapes")
    return [_unpadded(row, list(map(int, mask))) for row, mask in zip(rows, masks, strict=True)], single


def _unpadded(row: list[Any], mask: list[int]) -> list[Any]:
    filled = len(row) - sum(mask)
    if mask != [0] * filled + [1] * (len(row) - filled):
        raise ValueError(
            "the attention_mask leaves out tokens that are not at the left: pad at the left "
            "(tokenizer.padding_side = 'left'), or give lists without padding"
        )
    return row[filled:]


def _of_array(values: Any, tokenizer: Any | None) -> tuple[list[Any], bool]:
    if not isinstance(values, list):
        raise ValueError(f"{KINDS}, not a single number")
    if values and all(isinstance(item, str) for item in values):
        return values, False
    rows, single = _rows(values)
    pad = getattr(tokenizer, "pad_token_id", None)
    for end in (0, -1):
        filled = [row[end] == pad for row in rows if row]
        if pad is not None and any(filled) and not all(filled):
            raise ValueError(
                f"some rows of token ids {'end' if end else 'begin'} with the padding token {pad}: give the "
                "tokenizer's whole output (with attention_mask), or lists without padding"
            )
    return rows, single


def _rows(values: Any) -> tuple[list[list[Any]], bool]:
    """Rows of ids, and whether there is a single one."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"{KINDS}: input_ids cannot be {_shown(values)}")
    listed = [plain(item) for item in values]
    if not any(isinstance(item, list | tuple) for item in listed):
        return [listed], True
    if not all(isinstance(item, list | tuple) for item in listed):
        raise ValueError(f"{KINDS}: input_ids mixes numbers and lists")
    if any(isinstance(plain(token), list | tuple) for row in listed for token in row[:1]):
        raise ValueError(f"{KINDS}: token ids have at most two dimensions")
    return [list(row) for row in listed], len(listed) == 1


def _of_text(text: str, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer: pass tokenizer=... to load, or give token ids")
    check_text("prompt", text)
    ids = ids_with_one_bos(text, tokenizer)
    if not ids:
        raise ValueError("the prompt is empty: give at least one character")
    return ids


def _checked_ids(ids: Sequence[Any]) -> list[int]:
    for token in ids:
        if not is_whole(token):
            raise ValueError(f"the prompt must hold token ids (whole numbers), not {_shown(token)}: {KINDS}")
    if not len(ids):
        raise ValueError("the prompt is empty: give at least one token")
    return [int(token) for token in ids]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return ascii(value)[:60]
    return f"an object of type {type(value).__name__}"
