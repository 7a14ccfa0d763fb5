"""An exact toy model from conditional tables, for tests, documentation and users' own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from foretoken.models.base import Capabilities, Feed, LanguageModel, Rows, SequenceState

Table = Callable[[tuple[int, ...]], Sequence[float] | Tensor]


class TableModel(LanguageModel):
    """A language model whose next-token distribution is a function of the whole prefix.

    Args:
        table: ``prefix -> V`` probabilities (they need not be normalised).
        vocab_size: V.
        context_length: maximum number of tokens.
        eos_token_ids: end-of-sequence ids.
        dtype: dtype of the logits; float64 makes enumeration exact.

    Example:
        >>> model = TableModel(lambda prefix: [0.2, 0.3, 0.5], vocab_size=3)
    """

    capabilities = Capabilities(taps=False, layer_windows=False)
    forward_name = "table"

    def __init__(
        self,
        table: Table,
        vocab_size: int,
        context_length: int = 10_000,
        eos_token_ids: Iterable[int] = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_token_ids = frozenset(eos_token_ids)
        self.dtype = dtype
        self.forward_calls = 0
        self._opened = 0

    @classmethod
    def random(
        cls, vocab_size: int, seed: int = 0, order: int = 2, sharpness: float = 1.0, **more: object
    ) -> TableModel:
        """A random Markov model: the distribution depends on the last ``order`` tokens, and is more peaked with larger
        ``sharpness``."""

        @cache
        def q_rows(key: int) -> Tensor:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + key) % 2**63)
            return torch.softmax(sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64), -1)

        def table(prefix: tuple[int, ...]) -> Tensor:
            key = 0
            for token in prefix[-order:] if order else ():
                key = key * (vocab_size + 1) + token + 1
            return q_rows(key)

        return cls(table, vocab_size, **more)  # type: ignore[arg-type]

    def distribution(self, prefix: Sequence[int]) -> Tensor:
        """[V] normalised distribution after ``prefix``, float64."""
        weights = torch.as_tensor(self.table(tuple(prefix)), dtype=torch.float64)
        return weights / weights.sum()

    def open(self) -> SequenceState:
        self._opened += 1
        return SequenceState(row=self._opened)

    def release(self, sequence: SequenceState) -> None:
        """Nothing to free."""

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        sequence.tokens.extend(sequence.scratch_tokens[node] for node in path)
        sequence.clear_scratch()

    def rewind(self, sequence: SequenceState, length: int) -> None:
        del sequence.tokens[length:]
        sequence.clear_scratch()

    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Compute logits as log-probabilities of the table for every node's prefix."""
        start_s = perf_counter()
        self.forward_calls += 1
        results = []
        for feed in feeds:
            sequence = feed.sequence
            old, count = len(sequence.scratch_tokens), len(feed.tokens)
            sequence.append(feed.tokens, feed.parents_behind(old))
            num_scored = feed.num_wanted
            distributions = [
                self.distribution(self._prefix(sequence, node)) for node in range(old + count - num_scored, old + count)
            ]
            logits = (
                torch.stack(distributions).log()
                if distributions
                else torch.empty(0, self.vocab_size, dtype=torch.float64)
            )
            results.append(Rows(logits.to(self.dtype)))
        self.run_s += perf_counter() - start_s
        return results

    @staticmethod
    def _prefix(sequence: SequenceState, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(sequence.scratch_tokens[node])
            node = sequence.scratch_parents[node]
        return sequence.tokens + path[::-1]
