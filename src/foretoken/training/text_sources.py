"""Text for the alignment of a draft model: the corpus, text of the target, its own text, or a mix.

Every source is a pure function of (seed, step) and, for text of the student, of the student's weights when it was
written.

Drafters can also be trained on blocks that the target wrote, which is sequence-level distillation: Stern et al. 2018
(arXiv 1811.03115) train blockwise heads on text decoded by the model; Medusa, EAGLE-3 and SpecForge regenerate their
corpora in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.base import LanguageModel
from foretoken.training.chat import ChatBlocks, RowBlocks, rows_of_step
from foretoken.training.corpus import BlockSampler
from foretoken.training.written import stored_continuations

Writer = Callable[[Tensor, Sequence[int]], Tensor]
"""``(prompts [n, m], their numbers) -> int64 [n, context + 1]``: continues prompts."""


@dataclass(frozen=True)
class Text:
    """Training text of one step.

    Attributes:
        tokens: int64 [batch, context + 1]: inputs are ``[:, :-1]``.
        weights: float32 [batch, context]: weight of each position's distribution.
    """

    tokens: Tensor
    weights: Tensor


class TextSource(ABC):
    """Training text by step."""

    @abstractmethod
    def __call__(self, step: int) -> Text:
        """The text of one step."""

    def state(self, step: int) -> dict[str, Any]:
        """State that a checkpoint before ``step`` must store, as JSON data."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state`."""
        return


class FixedText(TextSource):
    """Blocks of the corpus.  Every position counts; in conversations only those before an assistant's tokens."""

    def __init__(self, blocks: BlockSampler | ChatBlocks) -> None:
        self.blocks = blocks

    def __call__(self, step: int) -> Text:
        tokens, learned = torch.from_numpy(self.blocks(step)), self.blocks.learned_of(step)
        if learned is None:
            return Text(tokens, torch.ones(tokens.shape[0], tokens.shape[1] - 1))
        return Text(tokens, torch.from_numpy(learned)[:, 1:].float())


class TeacherText(TextSource):
    """Rows written by the target, int64 [n, context + 1], in a new order every epoch.  Rows without positive
    ``weights``, float32 [n, context], are dropped; at least one must remain."""

    def __init__(self, rows: Tensor, weights: Tensor, batch: int, seed: int) -> None:
        keep = weights.sum(1) > 0
        if not bool(keep.any()):
            raise ValueError("no generated text is left to learn from")
        self.rows, self.weights = rows[keep], weights[keep]
        self.batch, self.seed = batch, seed

    def __call__(self, step: int) -> Text:
        chosen = rows_of_step(step, self.batch, len(self.rows), self.seed)
        return Text(self.rows[chosen], self.weights[chosen])


class PolicyText(TextSource):
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
        blocks: BlockSampler | ChatBlocks,
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

    def __call__(self, step: int) -> Text:
        """Corpus blocks, some of them continued by the student."""
        if step // self.refresh != self._window:
            self._renew(step // self.refresh)
        tokens = torch.from_numpy(self.blocks(step))
        weights = torch.ones(len(tokens), tokens.shape[1] - 1)
        for i, number in enumerate(self._numbers(step)):
            if number in self._rows:
                tokens[i] = self._rows[number]
                weights[i, : self.prompt - 1] = 0
        return Text(tokens, weights)

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
    return RowBlocks(rows.numpy(), corpus.batch, corpus.seed)
