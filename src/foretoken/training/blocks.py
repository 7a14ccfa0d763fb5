"""Training blocks that the target wrote itself: sequence-level distillation.

Stern et al. 2018 (arXiv 1811.03115) train blockwise heads on text decoded by the model; Medusa, EAGLE-3 and
SpecForge regenerate their corpora in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.base import LanguageModel
from foretoken.training.chat import ChatBlocks
from foretoken.training.corpus import BlockSampler
from foretoken.training.text_sources import TeacherText
from foretoken.training.written import stored_continuations

TEXTS = ("fixed", "target")
PROMPT_SHARE = 8
"""One in so many tokens of a written block is its prompt, from the corpus."""


class WrittenBlocks:
    """Blocks [batch, n + 1] in an order that is a function of (seed, step), as :class:`BlockSampler` gives them."""

    def __init__(self, rows: Tensor, batch: int, seed: int) -> None:
        self.block, self.batch, self.seed = rows.shape[1] - 1, batch, seed
        self.tokens: np.ndarray[Any, np.dtype[Any]] = rows.flatten().numpy()
        self._source = TeacherText(rows, torch.ones(len(rows), self.block), batch, seed)

    def __call__(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The blocks of one step, int64 [batch, block + 1]."""
        found: np.ndarray[Any, np.dtype[np.int64]] = self._source(step).tokens.numpy()
        return found

    @property
    def guessed(self) -> np.ndarray[Any, np.dtype[Any]]:
        """All tokens, which are all to be guessed."""
        return self.tokens


def write_blocks(
    folder: Path,
    target: LanguageModel,
    fingerprint: dict[str, Any],
    corpus: BlockSampler | ChatBlocks,
    count: int,
    temperature: float,
    on_rows: Callable[[int, int], None] | None = None,
) -> WrittenBlocks:
    """``count`` blocks: the beginnings of corpus blocks, which ``target`` continues; kept below ``folder``.

    Raises:
        ValueError: blocks that the target's context does not hold, fewer than a batch, or conversations.
    """
    if isinstance(corpus, ChatBlocks):
        raise ValueError("--text target goes on with texts; for conversations use --answers target")
    if count < corpus.batch:
        raise ValueError(f"{count} written blocks do not fill a batch of {corpus.batch}: ask for more")
    prompt = max(1, corpus.block // PROMPT_SHARE)
    steps = range(-(-count // corpus.batch))
    prompts = torch.from_numpy(np.concatenate([corpus(step)[:, :prompt] for step in steps])[:count])
    rows = stored_continuations(
        folder,
        target,
        prompts,
        corpus.block + 1 - prompt,
        temperature,
        corpus.seed,
        writer=fingerprint,
        on_rows=on_rows,
    )
    return WrittenBlocks(rows, corpus.batch, corpus.seed)
