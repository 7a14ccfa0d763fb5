"""The prefix cache: sequences are copied when they end and reused by requests with the same prefix."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from foretoken.core import HiddenText
from foretoken.engine.prefixes import SHORTEST, CachedDraft, CachedPrefix, Prefixes, longest_common
from foretoken.engine.request import Running
from foretoken.methods.drafters.texts import DraftText, DraftTexts
from foretoken.models.base import LanguageModel, Snapshot


class PrefixCache:
    """The prefix cache of an engine.

    Args:
        target: the model whose keys and values are copied.
        taps: hidden states of a prompt that the drafter needs; they are cached with it.
        capacity: largest size in bytes; 0 disables the cache.
    """

    def __init__(self, target: LanguageModel, taps: Sequence[str], capacity: int) -> None:
        self.target, self.taps = target, taps
        self.prefixes = Prefixes(capacity)
        self._can_copy = True  # until the target returns no copy: recurrent states have no prefix

    @property
    def keeps(self) -> bool:
        """Whether the cache is enabled."""
        return self.prefixes.capacity > 0

    def take_over(self, run: Running, others: Sequence[Running]) -> None:
        """Fill a request's empty sequence with the longest common prefix of a cached or running one."""
        if not self.keeps or run.request.prompt_logprobs is not None:
            return
        tokens = _prompt_of(run)
        prefix, length = self.prefixes.find(_salt(run), tokens)
        running = ((other, other.open_sequence.tokens, True) for other in _alike(run, others))
        other, longer = longest_common(running, np.asarray(tokens, dtype=np.int64), length)
        copied = None if other is None else self._copy_of(other, longer)
        if copied is not None:
            prefix, length = copied, longer
        if prefix is None or any(name not in prefix.hidden for name in self.taps):
            return
        self.target.restore(run.open_sequence, prefix.snapshot, length)
        run.stats.num_prompt_tokens_computed -= length
        run.states = HiddenText()
        run.add_states({name: prefix.hidden[name][:length] for name in self.taps})

    def read_before(self, run: Running, others: Sequence[Running]) -> tuple[Running, int] | None:
        """The first request that is prefilling the longest common prefix, and the prefix's length, if its remaining
        part is half of this prompt or more. Else, and for a target without copies, ``None``.

        Choices of one prompt arrive together: the first one prefills it, and the others copy it.
        """
        if not (self.keeps and self._can_copy) or run.request.prompt_logprobs is not None:
            return None
        prompt = np.asarray(_prompt_of(run), dtype=np.int64)
        reading = ((other, _prompt_of(other), True) for other in _alike(run, others) if not other.started)
        other, length = longest_common(reading, prompt)
        if other is None or 2 * (length - other.num_read) < len(prompt):
            return None
        return other, length

    def find_draft(
        self, run: Running, others: Sequence[Running], key: Hashable, draft_text: DraftText, tokens: Sequence[int]
    ) -> tuple[Snapshot, int] | None:
        """A draft model's state for the longest common prefix of a cached or running sequence, and its length in
        tokens.

        Args:
            tokens: the sequence to prefill, in the model's own ids.
        """
        ids = np.asarray(tokens, dtype=np.int64)

        def fits(draft: CachedDraft) -> bool:
            return draft.version == draft_text.version and draft.snapshot.regime == draft_text.sequence.regime

        snapshot, length = self.prefixes.find_draft(_salt(run), run.context.tokens, key, ids, fits)
        beginning = run.context.tokens[:SHORTEST]
        alike = (other for other in _alike(run, others) if other.context.tokens[:SHORTEST] == beginning)
        theirs = (entry for other in alike if (entry := DraftTexts.of(other.context).by_key.get(key)) is not None)
        current = (
            entry for entry in theirs if entry.is_current and entry.sequence.regime == draft_text.sequence.regime
        )
        best, longer = longest_common(((entry, entry.sequence.tokens, True) for entry in current), ids, length)
        copied = None if best is None else best.model.snapshot(best.sequence, longer)
        if copied is not None:
            return copied, longer
        return None if snapshot is None else (snapshot, length)

    def keep(self, run: Running) -> None:
        """Cache the sequence of a request that leaves, if it fits; no larger one is copied."""
        if not self.keeps or run.request.prompt_logprobs is not None or run.open_sequence.scratch_tokens:
            return
        length, limit = len(run.open_sequence.tokens), self.prefixes.limit
        if length < SHORTEST or length * self.target.kv_bytes_per_token > limit:  # 0 if unknown
            return
        copied = self._copy_of(run, length)
        if copied is not None and copied.nbytes <= limit:
            self.prefixes.keep(replace(copied, drafts=_drafts_of(run)))

    def _copy_of(self, run: Running, length: int) -> CachedPrefix | None:
        if length < SHORTEST:
            return None
        hidden = self._hidden(run.states, length)
        if hidden is None:
            return None
        snapshot = self.target.snapshot(run.open_sequence, length)
        self._can_copy = snapshot is not None
        if snapshot is None:
            return None
        tokens = np.asarray(run.open_sequence.tokens[:length], dtype=np.int64)
        return CachedPrefix(_salt(run), tokens, snapshot, hidden)

    def _hidden(self, states: HiddenText, length: int) -> dict[str, Tensor] | None:
        """[length, D] by tap; ``None`` if some are missing."""
        if states.count < length and self.taps:
            return None
        copied = states.copied()
        return {name: copied[name][:length] for name in self.taps} if copied.keys() >= set(self.taps) else None


def _drafts_of(run: Running) -> dict[Hashable, CachedDraft]:
    """Copies of the draft models' states for a request's sequence."""
    drafts: dict[Hashable, CachedDraft] = {}
    for key, draft in DraftTexts.of(run.context).by_key.items():
        size = len(draft.sequence.tokens)
        worth = size >= SHORTEST and draft.is_current and draft.model.reads
        snapshot = draft.model.snapshot(draft.sequence, size) if worth else None
        if snapshot is not None:
            drafts[key] = CachedDraft(np.asarray(snapshot.tokens, dtype=np.int64), snapshot, draft.version)
    return drafts


def _alike(run: Running, others: Sequence[Running]) -> Iterator[Running]:
    """Requests with a sequence of the same owner, computed in the same way."""
    return (other for other in others if other is not run and other.sequence is not None and _salt(other) == _salt(run))


def _prompt_of(run: Running) -> Sequence[int]:
    """The prompt tokens of the prefill, without the last one, which is the first root."""
    return run.context.tokens[: run.context.prompt_length - 1]


def _salt(run: Running) -> tuple[str, int]:
    """Owner of a sequence and the way it was computed; sequences that differ in either share nothing."""
    return run.context.salt, run.open_sequence.regime
