"""Text that models write: for the alignment of a draft model that of the target, its own, or a mix with the corpus.

All training text has one form: ``blocks(step)`` are the step's rows, int64 [batch, context + 1], a pure function of
(seed, step) and, for text of the student, of the student's weights when it was written; ``blocks.learned_of(step)``
masks their tokens to predict (``None``: all).

Drafters can also be trained on blocks that the target wrote, which is sequence-level distillation: Stern et al. 2018
(arXiv 1811.03115) train blockwise heads on text decoded by the model; Medusa, EAGLE-3 and SpecForge regenerate their
corpora in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.base import LanguageModel
from foretoken.training.chat import ChatBlocks, RowBlocks
from foretoken.training.corpus import BlockSampler
from foretoken.training.written import stored_continuations

Writer = Callable[[Tensor, Sequence[int]], Tensor]
"""``(prompts [n, m], their numbers) -> int64 [n, context + 1]``: continues prompts."""


class PolicyText:
    """Continuations of the beginnings of corpus blocks by the current student.

    Text for ``refresh`` steps is generated at once, because a large batch costs hardly more than a small one.  Only the
    generated part of a row counts.

    Args:
        prompt: number of prompt tokens from each block.
        refresh: steps per generation.
        mix: probability that a row is the student's; the others are corpus blocks.
    """

    def __init__(
        self,
        blocks: BlockSampler | RowBlocks,
        write: Writer,
        prompt: int,
        refresh: int,
        mix: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.blocks, self.write, self.prompt = blocks, write, prompt
        self.refresh, self.mix, self.seed = refresh, mix, seed
        self._window = -1
        self._rows: dict[int, Tensor] = {}

    def __call__(self, step: int) -> NDArray[np.int64]:
        """Corpus blocks, some of them continued by the student."""
        tokens = self.blocks(step)
        for i, row in self._continued(step).items():
            tokens[i] = row
        return tokens

    def learned_of(self, step: int) -> NDArray[np.bool_]:
        """Mask of the tokens to predict: all but the prompts of continued blocks."""
        learned = np.ones((self.blocks.batch, self.blocks.block + 1), bool)
        learned[list(self._continued(step)), : self.prompt] = False
        return learned

    def _continued(self, step: int) -> dict[int, Tensor]:
        """The student's rows of a step by their index in the batch."""
        if step // self.refresh != self._window:
            self._renew(step // self.refresh)
        return {i: self._rows[number] for i, number in enumerate(self._numbers(step)) if number in self._rows}

    def _numbers(self, step: int) -> range:
        return range(step * self.blocks.batch, (step + 1) * self.blocks.batch)

    def _renew(self, window: int) -> None:
        """Generate the continuations for the steps of a window."""
        prompts: dict[int, Tensor] = {}
        for step in range(window * self.refresh, (window + 1) * self.refresh):
            blocks = torch.from_numpy(self.blocks(step)[:, : self.prompt])
            for number, block in zip(self._numbers(step), blocks, strict=True):
                if np.random.default_rng((self.seed, 1, number)).random() < self.mix:
                    prompts[number] = block
        numbers = list(prompts)
        rows = self.write(torch.stack(list(prompts.values())), numbers) if numbers else ()
        self._window, self._rows = window, dict(zip(numbers, rows, strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """The rows written with earlier weights that are still needed."""
        if step // self.refresh != self._window:
            return {}
        return {"window": self._window, "rows": {str(n): row.tolist() for n, row in self._rows.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self._window = int(state.get("window", -1))
        self._rows = {int(n): torch.tensor(row) for n, row in state.get("rows", {}).items()}


TrainingText = BlockSampler | RowBlocks | PolicyText
"""All forms of training text."""


def written_text(rows: Tensor, weights: Tensor, batch: int, seed: int) -> RowBlocks:
    """Rows that the target wrote, int64 [n, context + 1], of which tokens with ``weights`` [n, context] are learned, in
    a new order every epoch.  Rows without any are dropped.  Raises ``ValueError`` if none remains."""
    kept = weights.sum(1) > 0
    if not bool(kept.any()):
        raise ValueError("no generated text is left to learn from")
    learned = F.pad(weights[kept] > 0, (1, 0))
    return RowBlocks(rows[kept].numpy(), batch, seed, learned.numpy())


def written_rows(
    folder: Path,
    target: LanguageModel,
    fingerprint: dict[str, Any],
    corpus: BlockSampler | RowBlocks,
    count: int,
    prompt: int,
    temperature: float,
    vocab_size: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> Tensor:
    """``count`` rows, int64 [count, block + 1]: the first ``prompt`` tokens of corpus blocks, continued by ``target``
    and stored below ``folder``."""
    steps = range(-(-count // corpus.batch))
    prompts = torch.from_numpy(np.concatenate([corpus(step)[:, :prompt] for step in steps])[:count])
    return stored_continuations(
        folder, target, prompts, corpus.block + 1 - prompt, temperature, corpus.seed, writer=fingerprint,
        vocab_size=vocab_size, on_rows=on_rows,
    )  # fmt: skip


def write_blocks(
    folder: Path,
    target: LanguageModel,
    fingerprint: dict[str, Any],
    corpus: BlockSampler | ChatBlocks,
    count: int,
    temperature: float,
    on_rows: Callable[[int, int], None] | None = None,
) -> RowBlocks:
    """``count`` blocks, beginnings of corpus blocks continued by ``target`` and stored below ``folder``.  Raises
    ``ValueError`` for blocks longer than the target's context, for less than a batch, and for conversations."""
    if isinstance(corpus, ChatBlocks):
        raise ValueError("--text target continues texts; for conversations use --answers target")
    if count < corpus.batch:
        raise ValueError(
            f"{count} generated blocks do not fill a batch of {corpus.batch}: give a larger --written-blocks"
        )
    # One token in eight of a written block is its prompt, from the corpus
    prompt = max(1, corpus.block // 8)
    rows = written_rows(folder, target, fingerprint, corpus, count, prompt, temperature, on_rows=on_rows)
    return RowBlocks(rows.numpy(), corpus.batch, corpus.seed)
