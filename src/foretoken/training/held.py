"""Held-out text: blocks on which a drafter is measured, and prompts that it is run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.training.chat import ChatBlocks
from foretoken.training.corpus import part_file, read_chat, read_tokens

BLOCKS = 8
"""Held-out blocks that accuracies are measured on."""

Held = tuple[Tensor, Tensor | None]
"""Tokens int64 [1, n + 1], and which of them are to be guessed, bool [1, n + 1]; ``None``: all."""


def held_blocks(folder: Path, corpus: Mapping[str, Any], tokenizer: Any, context: int) -> list[Held]:
    """A few blocks, spread over what was held out; none where nothing was.

    Args:
        folder: where the corpus is.
        corpus: its description.
        tokenizer: for the token that fills up conversations.
        context: n.
    """
    if corpus.get("chat"):
        return _chat_rows(folder, corpus, tokenizer, context)
    tokens = read_tokens(part_file(folder, "held", "tokens"), corpus["dtype"])
    length = min(context, max(len(tokens) - 1, 0))
    if length < 2:
        return []
    starts = np.unique(np.linspace(0, len(tokens) - length - 1, BLOCKS).astype(int))
    return [(torch.from_numpy(tokens[s : s + length + 1].astype(np.int64))[None], None) for s in starts]


def _chat_rows(folder: Path, corpus: Mapping[str, Any], tokenizer: Any, context: int) -> list[Held]:
    """Each row begins with a conversation."""
    parts = read_chat(folder, "held", corpus["dtype"])
    if not parts[1].any():
        return []
    blocks = ChatBlocks(*parts, context, 1, 0, tokenizer.eos_token_id)
    rows = range(min(BLOCKS, blocks.num_blocks))
    return [(torch.from_numpy(blocks.rows[i])[None], torch.from_numpy(blocks.learned[i])[None]) for i in rows]


def held_prompts(
    blocks: Sequence[Tensor], learned: Sequence[Tensor | None], count: int, length: int
) -> list[list[int]]:
    """At most ``count`` prompts: the first ``length`` tokens of blocks; of a conversation what its first answer
    follows, without its beginning where that is long."""
    found = []
    for tokens, guessed in zip(blocks, learned, strict=True):
        if guessed is None:
            found.append(tokens[0, :length].tolist())
            continue
        first = int(guessed[0].int().argmax())
        if first:
            longest = max(length, tokens.shape[1] // 2)
            found.append(tokens[0, max(0, first - longest) : first].tolist())
    return found[:count]
