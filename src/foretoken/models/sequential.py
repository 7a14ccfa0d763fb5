"""Models that cannot take trees: plain decoding, and chains if Transformers' own cache can be rolled back.

Every sequence has its own Transformers cache and runs alone through the public forward.  A model that returns no cache
reads the whole text again for every token: slow, but correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from foretoken.models.base import Capabilities, CapabilityError, Feed, Rows, SequenceState
from foretoken.models.clock import now
from foretoken.models.module import OneByOneModel
from foretoken.models.network.alone import alone, lock_of
from foretoken.models.network.capabilities import loops_of
from foretoken.models.network.placement import decoding
from foretoken.models.network.taps import check_taps, recording
from foretoken.models.network.watch import Watch


class SequentialModel(OneByOneModel):
    """ALiBi, recurrent and convolutional models.

    Args:
        model: any causal LM with ``use_cache``.
        no_rollback: reason why its cache cannot be rolled back, from a trial.
    """

    def __init__(self, model: Any, no_rollback: str | None = None) -> None:
        super().__init__(model)
        if no_rollback is not None:
            no_trees = self.capabilities.missing.get("tree_mask")
            reason = f"{no_trees}; {no_rollback}" if no_trees else f"{self.config.model_type}: {no_rollback}"
            missing = {"tree_mask": reason, "keep_path": reason, **self.capabilities.missing, "rollback": reason}
            self.capabilities = Capabilities(False, False, False, True, False, missing)
        self._caches: dict[int, Any] = {}
        with lock_of(model):
            self._watch = Watch(model)

    def release(self, sequence: SequenceState) -> None:
        self._caches.pop(sequence.row, None)

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        if not self.capabilities.rollback and len(path) < len(sequence.scratch_tokens):
            raise CapabilityError(self.capabilities.missing["rollback"])
        surplus, cache = self._keep(sequence, path), self._caches.get(sequence.row)
        if cache is not None and self.capabilities.rollback:
            cache.crop(-surplus)  # even of 0 tokens: this drops what was recorded for a rollback

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Read the first ``length`` committed tokens again: a recurrent state cannot be rolled back."""
        if length >= len(sequence.tokens) and not sequence.scratch_tokens:
            return
        prefix = sequence.tokens[:length]
        self.release(sequence)
        sequence.tokens.clear()
        sequence.clear_scratch()
        self.prefill(sequence, prefix)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append and score nodes.  After a failure the scratch chains are unchanged, and the texts are read again."""
        check_taps(taps, self._num_layers)
        for feed in feeds:
            self._check(feed)
        sizes, rows = [len(feed.sequence.scratch_tokens) for feed in feeds], list[Rows]()
        try:
            for feed in feeds:
                rows.append(self._run_feed(feed, taps))
        except BaseException:
            for feed, size in zip(feeds[: len(rows) + 1], sizes, strict=False):
                self._caches.pop(feed.sequence.row, None)  # an interrupted forward has changed some layers
                feed.sequence.drop_last(len(feed.sequence.scratch_tokens) - size)
            raise
        return rows

    def _check(self, feed: Feed) -> None:
        super()._check(feed)
        count = len(feed.sequence.scratch_tokens) + len(feed.tokens)
        if not self.capabilities.rollback and count > 1 and feed.wanted != 0:
            raise CapabilityError(f"only one token at a time can be scored: {self.capabilities.missing['rollback']}")

    def _run_feed(self, feed: Feed, taps: Sequence[str]) -> Rows:
        sequence, count = feed.sequence, len(feed.tokens)
        old = len(sequence.scratch_tokens)
        start_s = now(self.device)
        with alone(self.model), recording(self.model, taps) as hidden:
            logits = self._run(sequence, feed.tokens)
        self.run_s += now(self.device) - start_s
        sequence.append(feed.tokens, feed.parents_behind(old))
        return Rows(logits[len(logits) - feed.num_wanted :], {name: h[0, -count:] for name, h in hidden.items()})

    def _run(self, sequence: SequenceState, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] of n tokens after the sequence's committed and scratch tokens."""
        decoding(self.model)
        cache = self._caches.get(sequence.row)
        unread = [*sequence.tokens, *sequence.scratch_tokens, *tokens] if cache is None else list(tokens)
        ids = torch.tensor([unread], device=self.device)
        if self._cache_name is None:
            return self.model(input_ids=ids, use_cache=False).logits[0, len(unread) - len(tokens) :]
        if cache is None and self.capabilities.rollback:
            # A cache made from the configuration has a place per layer, and a looped network needs one per pass.
            cache = DynamicCache() if loops_of(self.config) > 1 else DynamicCache(config=self.config)
            cache.activate_past_recording()  # sliding and convolutional layers keep what a rollback needs
        cache_argument = {} if cache is None else {self._cache_name: cache}
        out = self.model(input_ids=ids, use_cache=True, **cache_argument)
        if self._cache_name not in out:
            self._cache_name = None
            return self._run(sequence, tokens)
        self._caches[sequence.row] = out[self._cache_name]
        return out.logits[0, len(unread) - len(tokens) :]
