"""What is kept of texts: copied when one ends, found again when another one begins alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from foretoken.core import HiddenText
from foretoken.engine.prefixes import SHORTEST, Kept, KeptDraft, Prefixes, common
from foretoken.engine.request import Running
from foretoken.methods.drafters.texts import DraftText, DraftTexts
from foretoken.models.base import LanguageModel, Snapshot


class PrefixCache:
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
        run.states = HiddenText()
        run.add_states({name: found.hidden[name][:length] for name in self.taps})

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

    def find_draft(
        self, run: Running, others: Sequence[Running], key: Hashable, own: DraftText, tokens: Sequence[int]
    ) -> tuple[Snapshot, int] | None:
        """What a drafter's model has of the beginning of a text that it opens: of an earlier text, or of one that runs.

        Args:
            key: the drafter's.
            tokens: what it is to read, in the model's own ids.
        """
        wanted = np.asarray(tokens, dtype=np.int64)

        def fits(draft: KeptDraft) -> bool:
            return draft.version == own.version and draft.snapshot.regime == own.sequence.regime

        found, kept = self.prefixes.find_draft(_salt(run), run.context.tokens, key, wanted, fits)
        longest, best = max(kept, SHORTEST - 1), None
        for other in (one for one in others if one is not run and one.sequence is not None):
            theirs = DraftTexts.of(other.context).by_key.get(key)
            if theirs is None or not theirs.is_current or theirs.sequence.regime != own.sequence.regime:
                continue
            if _salt(other) == _salt(run) and other.context.tokens[:SHORTEST] == run.context.tokens[:SHORTEST]:
                length = common(np.asarray(theirs.sequence.tokens, dtype=np.int64), wanted)
                if length > longest:
                    best, longest = theirs, length
        beside = None if best is None else best.model.snapshot(best.sequence, longest)
        if beside is not None:
            return beside, longest
        return None if found is None else (found, kept)

    def keep(self, run: Running) -> None:
        """Keep the text of a request that leaves."""
        if self.keeps and run.request.prompt_logprobs is None and not run.text.scratch_tokens:
            kept = self._kept(run, len(run.text.tokens))
            if kept is not None:
                self.prefixes.keep(replace(kept, drafts=_drafts_of(run)))

    def _kept(self, run: Running, length: int) -> Kept | None:
        if length < SHORTEST:
            return None
        hidden = self._hidden(run.states, length)
        snapshot = None if hidden is None else self.target.snapshot(run.text, length)
        if snapshot is None or hidden is None:
            return None
        tokens = np.asarray(run.text.tokens[:length], dtype=np.int64)
        return Kept(_salt(run), tokens, snapshot, hidden)

    def _hidden(self, states: HiddenText, length: int) -> dict[str, Tensor] | None:
        """[length, D] by tap; ``None`` where some are missing."""
        if states.count < length and self.taps:
            return None
        found = states.copied()
        return {name: found[name][:length] for name in self.taps} if all(name in found for name in self.taps) else None


def _drafts_of(run: Running) -> dict[Hashable, KeptDraft]:
    """What drafters' models have read of a request's text, copied."""
    found: dict[Hashable, KeptDraft] = {}
    for key, own in DraftTexts.of(run.context).by_key.items():
        size = len(own.sequence.tokens)
        worth = size >= SHORTEST and own.is_current and own.model.reads
        snapshot = own.model.snapshot(own.sequence, size) if worth else None
        if snapshot is not None:
            found[key] = KeptDraft(np.asarray(snapshot.tokens, dtype=np.int64), snapshot, own.version)
    return found


def _salt(run: Running) -> str:
    """Whose a text is, and how it was read: texts that differ in either share nothing."""
    regime = run.text.regime
    return f"{run.context.salt}\0{regime}" if regime else run.context.salt
