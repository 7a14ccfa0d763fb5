"""What is kept of texts: copied when one ends, found again when another one begins alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.engine.prefixes import SHORTEST, Kept, Prefixes, common
from foretoken.engine.request import Running
from foretoken.models.base import LanguageModel


class Texts:
    """The prefix cache of an engine.

    Args:
        target: whose keys and values are copied.
        taps: hidden states that the drafter needs of a prompt; they are kept beside.
        capacity: most bytes; 0 keeps nothing.
    """

    def __init__(self, target: LanguageModel, taps: Sequence[str], capacity: int) -> None:
        self.target, self.taps = target, taps
        self.prefixes = Prefixes(capacity)

    @property
    def keeps(self) -> bool:
        """Whether anything can be kept at all."""
        return self.prefixes.capacity > 0

    def take_over(self, run: Running, others: Sequence[Running]) -> None:
        """Fill a request's empty text with what an earlier or a running one has of the same beginning."""
        if not self.keeps or run.request.prompt_logprobs is not None:
            return
        wanted = run.context.tokens[: run.context.prompt_length - 1]
        found, length = self.prefixes.find(_salt(run), wanted)
        beside = self._beside(run, wanted, others, length)
        if beside is not None:
            found, length = beside
        if found is None or any(name not in found.hidden for name in self.taps):
            return
        self.target.restore(run.text, found.snapshot, length)
        run.stats.num_prompt_tokens_computed -= length
        run.states = {name: [found.hidden[name][:length]] for name in self.taps}

    def _beside(
        self, run: Running, wanted: Sequence[int], others: Sequence[Running], least: int
    ) -> tuple[Kept, int] | None:
        """The running text with a longer common beginning than that, copied."""
        tokens = np.asarray(wanted, dtype=np.int64)
        best, longest = None, max(least, SHORTEST - 1)
        for other in others:
            if other is not run and other.sequence is not None and _salt(other) == _salt(run):
                length = common(np.asarray(other.text.tokens, dtype=np.int64), tokens)
                if length > longest:
                    best, longest = other, length
        kept = None if best is None else self._kept(best, longest)
        return None if kept is None else (kept, longest)

    def keep(self, run: Running) -> None:
        """Keep the text of a request that leaves."""
        if self.keeps and run.request.prompt_logprobs is None and not run.text.scratch_tokens:
            kept = self._kept(run, len(run.text.tokens))
            if kept is not None:
                self.prefixes.keep(kept)

    def _kept(self, run: Running, length: int) -> Kept | None:
        if length < SHORTEST:
            return None
        hidden = self._hidden(run.states, length)
        snapshot = None if hidden is None else self.target.snapshot(run.text, length)
        if snapshot is None or hidden is None:
            return None
        tokens = np.asarray(run.text.tokens[:length], dtype=np.int64)
        return Kept(_salt(run), tokens, snapshot, hidden)

    def _hidden(self, states: Mapping[str, Sequence[Tensor]], length: int) -> dict[str, Tensor] | None:
        """[length, D] by tap; ``None`` where some are missing."""
        found = {name: torch.cat(list(states[name]))[:length] for name in self.taps if states.get(name)}
        complete = all(name in found and len(found[name]) == length for name in self.taps)
        return found if complete else None


def _salt(run: Running) -> str:
    """Whose a text is, and how it was read: texts that differ in either share nothing."""
    regime = run.text.regime
    return f"{run.context.salt}\0{regime}" if regime else run.context.salt
