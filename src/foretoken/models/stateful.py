"""Recurrent and hybrid models as target or draft model: chains, with exact rollback by checkpoint and replay.

A recurrent state cannot be undone.  So it is copied before scoring rows that may be rejected, and restored after a
rejection.  Then either it is advanced by the recorded recurrence inputs of the accepted tokens
(:mod:`foretoken.models.cache.delta_rule`), or these tokens are fed again *before the next verification*: a rejection
costs rows, not a forward (Wu et al., "Snakes and Ladders").  See ``docs/hybrid.md``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, Rows, SequenceState
from foretoken.models.cache.delta_rule import recorded, rule_files
from foretoken.models.cache.joined import JoinedCache, join_key
from foretoken.models.cache.state import StateCache
from foretoken.models.checks.self_test import joined_fault, state_fault
from foretoken.models.clock import now
from foretoken.models.module import OneByOneModel
from foretoken.models.network.alone import alone, lock_of
from foretoken.models.network.own_code import forwards_of
from foretoken.models.network.placement import decoding
from foretoken.models.network.taps import check_taps, recording
from foretoken.models.network.traits import parameters_of
from foretoken.models.network.watch import Watch
from foretoken.models.refusals import refusal
from foretoken.models.runner import check_distinct

REPLAYS = ("auto", "lazy", "capture")
PADDED = 16
"""Maximum rows of a sequence that is padded for a common forward: drafts, not prompts."""

_FAULTS: WeakKeyDictionary[Any, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()
"""Results of self-tests: every call of ``custom_generate`` wraps the same model again."""
_JOINED: WeakKeyDictionary[Any, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()
"""The same for sequences that share a forward."""


class StatefulModel(OneByOneModel):
    """Runs a ``PreTrainedModel`` with recurrent layers over committed prefixes plus a scratch chain.

    Every sequence has its own Transformers cache.  Sequences with equally many rows share a forward
    (:mod:`foretoken.models.cache.joined`), as do chains of any length if the recurrences can ignore padding
    (``capture``).  The cache may lag behind the committed tokens, which are then fed before the next nodes.

    Args:
        model: any causal LM that returns a Transformers cache.
        replay: ``"capture"`` computes the state of accepted tokens from recorded recurrence inputs (Gated DeltaNet
            only), ``"lazy"`` feeds these tokens again; ``"auto"`` captures if possible.
        flush: for ``"lazy"``, number of lagging tokens from which they get a forward of their own before nodes that may
            be rejected (0 or 1: always).  In float32 on a CPU, where rows cost most, 4 was slower than 8.
        joined: whether sequences share forwards.  Alone, a sequence does not depend on others, not even in near-ties.

    Attributes:
        joined_off: reason why sequences share no forwards; empty if they do.

    Raises:
        ValueError: ``flush`` is negative, or ``replay`` is unknown or unsupported by the model.
        CapabilityError: the model's state does not survive a rollback (use :func:`foretoken.models.wrap`, which then
            decodes plainly); the message states the difference.
    """

    prefill_chunk = 512

    def __init__(self, model: Any, *, flush: int = 8, replay: str = "auto", joined: bool = True) -> None:
        if replay not in REPLAYS:
            raise ValueError(f"replay must be one of {', '.join(REPLAYS)}, not {replay!r}")
        if flush < 0:
            raise ValueError(f"flush must be at least 0, not {flush}")
        super().__init__(model)
        self.flush = flush
        self._files: list[ModuleType] = []
        self.num_forwards = 0
        self._states: dict[int, StateCache] = {}
        self._parameters = frozenset(parameters_of(model))
        self.joined_off = "" if joined else "sequences were requested to run one by one"
        fault = self._choose(replay)
        if fault is not None:
            raise CapabilityError(f"{self.config.model_type} cannot be rolled back: {fault}")
        missing = {name: reason for name, reason in self.capabilities.missing.items() if name != "rollback"}
        self.capabilities = replace(self.capabilities, rollback=True, missing=missing)
        if joined:
            self._try_joined()
        with lock_of(model):
            self._watch = Watch(model)

    @property
    def replay(self) -> str:
        """Rollback method: ``"capture"`` or ``"lazy"``."""
        return "capture" if self._files else "lazy"

    def _choose(self, replay: str) -> str | None:
        """Choose a replay method that passes the self-test; return the fault if none does."""
        files = rule_files(self.model) if replay != "lazy" else []
        if replay == "capture" and not files:
            raise ValueError(f"replay='capture' needs Gated DeltaNet layers, which {self.config.model_type} lacks")
        self._files = files
        fault = self._fault()
        if fault is not None and files and replay == "auto":
            self._files = []
            fault = self._fault()
        return fault

    def _fault(self) -> str | None:
        """Fault found by the self-test, run once per model object, forwards, dtype, device and replay method."""
        faults = _FAULTS.setdefault(self.model, {})
        key = self._key()
        if key not in faults:
            faults[key] = state_fault(self)
        return faults[key]

    def _key(self) -> tuple[object, ...]:
        """What a result holds for, besides the model object."""
        return self.dtype, self.device, self.replay, *map(id, forwards_of(self.model.modules()))

    def _try_joined(self) -> None:
        """Test whether sequences can share a forward; a fault is reported as a refusal."""
        faults = _JOINED.setdefault(self.model, {})
        key = self._key()
        if key not in faults:
            faults[key] = joined_fault(self)
        self.joined_off = faults[key] or ""
        if self.joined_off:
            self.refused = (
                refusal("one forward for the sequences of a batch", self.joined_off, "they run one by one"),
            )

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        sequence = super().open()
        self._states[sequence.row] = StateCache()
        return sequence

    def release(self, sequence: SequenceState) -> None:
        self._states.pop(sequence.row, None)

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Keep a prefix of the scratch chain; return to the checkpoint if some of it is dropped."""
        self._keep(sequence, path)
        self._back_to(sequence)

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` committed tokens; those before a checkpoint are not read again."""
        del sequence.tokens[length:]
        sequence.clear_scratch()
        self._back_to(sequence)

    def _back_to(self, sequence: SequenceState) -> None:
        """Reduce the cache to a prefix of the committed tokens."""
        state, length = self._states[sequence.row], len(sequence.tokens)
        if state.on_tape and state.saved <= length <= state.length:
            state.cut(length)
        elif state.length > length:
            state.careful = state.careful or not state.guarded
            if 0 <= state.saved <= length:
                state.restore()
            else:
                state.reset()
        elif state.saved > length:
            state.reset()
        state.guarded = False

    def state(self, sequence: SequenceState) -> StateCache:
        """The cached state of a sequence."""
        return self._states[sequence.row]

    # -- forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        check_taps(taps, self._num_layers)
        check_distinct(feeds)
        for feed in feeds:
            self._check(feed)
        for feed in feeds:
            self._guard(feed)
        results: dict[int, Rows] = {}
        for group in self._groups(feeds):
            results.update(zip(group, self._together([feeds[i] for i in group], taps), strict=True))
        return [results[i] for i in range(len(feeds))]

    def _groups(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """Indices of feeds by forward: those with equally many rows, or few, and layers of the same shapes."""
        groups: dict[Hashable, list[int]] = {}
        for i, feed in enumerate(feeds):
            state = self._states[feed.sequence.row]
            alike = None if self.joined_off else join_key(state.cache)
            rows = len(_behind(feed.sequence, state.length)) + len(feed.tokens)
            width = 0 if self._files and rows <= PADDED else rows
            groups.setdefault(i if alike is None else (width, alike), []).append(i)
        return list(groups.values())

    def _guard(self, feed: Feed) -> None:
        """Reduce a sequence's lag, and save a checkpoint before rows that may be rejected."""
        sequence, count, num_scored = feed.sequence, len(feed.tokens), feed.num_wanted
        state, scratch = self._states[sequence.row], sequence.scratch_tokens
        # Rows without logits are prompt text, and a lone root was already accepted: in practice such rows are not
        # rejected (if they are, the text is read again), so that plain decoding copies nothing.
        at_risk = bool(scratch) or (count > 1 and num_scored > 1) or state.careful
        try:
            lag = len(sequence.tokens) - state.length
            if lag >= (max(self.flush, 1) if at_risk else self.prefill_chunk):
                self.settle(sequence)
            if at_risk and not state.guarded:
                if state.saved != state.length:
                    state.save()
                if self._files:
                    state.start_tape()
                state.guarded = True
        except BaseException:
            state.reset()  # an interrupted forward has changed some layers
            raise

    def _together(self, feeds: Sequence[Feed], taps: Sequence[str]) -> list[Rows]:
        """One forward for feeds whose states are guarded."""
        states = [self._states[feed.sequence.row] for feed in feeds]
        texts = [
            [*_behind(feed.sequence, state.length), *feed.tokens] for feed, state in zip(feeds, states, strict=True)
        ]
        start_s = now(self.device)
        try:
            with alone(self.model), recording(self.model, taps) as hidden:
                logits = self._read(states, texts, [feed.num_wanted for feed in feeds])
            self.run_s += now(self.device) - start_s
        except BaseException:
            for state in states:
                state.reset()
            raise
        rows_of: list[Rows] = []
        for row, (feed, text) in enumerate(zip(feeds, texts, strict=True)):
            feed.sequence.append(feed.tokens, feed.parents_behind(len(feed.sequence.scratch_tokens)))
            fed_rows = slice(len(text) - len(feed.tokens), len(text))
            rows_of.append(Rows(logits[row], {name: h[row, fed_rows] for name, h in hidden.items()}))
        return rows_of

    def settle(self, sequence: SequenceState) -> None:
        """Read the committed tokens that the state lacks, in separate forwards."""
        state, start_s = self._states[sequence.row], now(self.device)
        while state.length < len(sequence.tokens):
            self.read(state, sequence.tokens[state.length : state.length + self.prefill_chunk], 0)
        self.run_s += now(self.device) - start_s

    @torch.inference_mode()
    def read(self, state: StateCache, tokens: Sequence[int], count: int) -> Tensor:
        """Read tokens into the state; return logits [count, V] of the last ones."""
        return self._read([state], [tokens], [count])[0]

    def _read(
        self, states: Sequence[StateCache], token_lists: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[Tensor]:
        """Read texts into the states; return logits [count, V] of the last tokens of each.  Shorter texts are
        padded."""
        rows = max(map(len, token_lists))
        pads = [rows - len(token_list) for token_list in token_lists]
        num_logits = max(map(sum, zip(pads, counts, strict=True)))
        ids = torch.tensor(
            [[*token_list, *[token_list[-1]] * pad] for token_list, pad in zip(token_lists, pads, strict=True)]
        )
        cache = JoinedCache([state.cache for state in states], pads) if len(states) > 1 else states[0].cache
        files = self._files if any(pads) or any(state.on_tape for state in states) else []
        with alone(self.model), recorded(files, padding_of(pads, rows, self.device)) as records:
            decoding(self.model)
            inputs = self._inputs(states, cache, pads, rows, num_logits)
            out = self.model(input_ids=ids.to(self.device), use_cache=True, **inputs)
        if isinstance(cache, JoinedCache):
            cache.hand_back()
        for row, (state, token_list) in enumerate(zip(states, token_lists, strict=True)):
            state.advance(state.cache if len(states) > 1 else out.get(self._cache_name or ""), len(token_list))
            if state.on_tape:
                state.record([record.of(row, len(token_list)) for record in records])
        self.num_forwards += 1
        self.run_rows += rows * len(token_lists)
        ends = [out.logits.shape[1] - pad for pad in pads]
        return [out.logits[row, end - count : end] for row, (end, count) in enumerate(zip(ends, counts, strict=True))]

    def _inputs(
        self, states: Sequence[StateCache], cache: Any, pads: Sequence[int], rows: int, num_logits: int
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {} if cache is None else {self._cache_name or "": cache}
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = max(num_logits, 1)
        if "position_ids" in self._parameters:  # not every family gets positions from its cache
            positions = [
                [state.length + min(i, rows - pad - 1) for i in range(rows)]
                for state, pad in zip(states, pads, strict=True)
            ]
            inputs["position_ids"] = torch.tensor(positions, device=self.device)
        mask = cache.mask(rows) if isinstance(cache, JoinedCache) else None
        return inputs if mask is None else {**inputs, "attention_mask": mask.to(self.device)}


def padding_of(pads: Sequence[int], rows: int, device: torch.device) -> Tensor | None:
    """[sequences, rows] whether a row is padding; ``None`` if there is none."""
    if not any(pads):
        return None
    ends = torch.tensor([rows - pad for pad in pads], device=device)
    return torch.arange(rows, device=device) >= ends[:, None]


def _behind(sequence: SequenceState, length: int) -> list[int]:
    """Committed and scratch tokens after the first ``length``."""
    have = len(sequence.tokens)
    return sequence.tokens[length:] + sequence.scratch_tokens[max(length - have, 0) :]
