"""A language model from a forward and a cache: ragged batches of trees over committed prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretoken.core import HiddenStates
from foretoken.models.base import Feed, Rows, SequenceState, Snapshot
from foretoken.models.cache.masks import RowPlan, additive_masks
from foretoken.models.cache.pool import CachePool, by_cache, take
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.cache.window import WHOLE_TEXT, Window
from foretoken.models.clock import now
from foretoken.models.module import ModuleModel
from foretoken.models.network.call import Forward, NetworkCall, inputs_of, padded_states
from foretoken.models.network.layers import WHOLE, LayerPlan
from foretoken.models.network.rotary import ChangingRotary
from foretoken.models.network.taps import check_taps
from foretoken.models.provisional import comes_before, keep_common, layer_reached, window_inputs, without_first

PREFILL_CHUNK = 512
"""Maximum prompt tokens per call."""
SCRATCH_ROOM = 512
"""Slots for scratch nodes beyond the context."""


def check_distinct(feeds: Sequence[Feed]) -> None:
    """Raise ``ValueError`` if two feeds belong to the same sequence."""
    if len({id(feed.sequence) for feed in feeds}) < len(feeds):
        raise ValueError("two feeds of one forward belong to the same sequence: join them")


class TreeRunner(ModuleModel):
    """Runs a forward over committed prefixes plus scratch trees in a cache.

    Attributes:
        graphs: runs forwards as CUDA graphs (:mod:`foretoken.models.forward.graphed`), if available.
        window: window of new rows in long texts; the whole text by default.
    """

    graphs_off: str = "not asked for"
    prefill_chunk = PREFILL_CHUNK
    window: Window = WHOLE_TEXT

    def __init__(self, forwards: Forward, cache: TreeCache) -> None:
        self.forwards, self.capabilities, self.vocab_size = forwards, forwards.capabilities, forwards.vocab_size
        self.context_length, self.context_why = forwards.context_length, forwards.context_why
        self.eos_token_ids, self.num_layers = forwards.eos_token_ids, forwards.num_layers
        self.cache = cache
        self._checked_plans: set[LayerPlan] = set()

    @property
    def model(self) -> Any:
        return self.forwards.model

    @property
    def forward_name(self) -> str:  # type: ignore[override]
        return self.forwards.name

    @property
    def device(self) -> torch.device:
        return self.forwards.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.forwards.dtype

    @property
    def rotary(self) -> ChangingRotary | None:
        """Rotary embeddings that depend on the text length, if any."""
        return self.forwards.rotary

    @property
    def cache(self) -> TreeCache:
        """The permanent cache; long sequences may be in others (:mod:`foretoken.models.cache.pool`)."""
        return self.pool.first

    @cache.setter
    def cache(self, cache: TreeCache) -> None:
        self.pool = CachePool(cache)

    @property
    def _sequences(self) -> list[SequenceState]:
        return self.pool.sequences

    def separate(self, cache: TreeCache) -> None:
        """Switch to an empty cache with separate sequences and counters."""
        self.cache = cache
        self.graphs, self.graphs_off = None, "this copy of a model has its own cache"
        self.run_s, self.run_rows = 0.0, 0

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        self.follow()
        return self.pool.open(SequenceState(row=0))

    def release(self, sequence: SequenceState) -> None:
        self.pool.release(sequence)

    def _slots(self, sequence: SequenceState) -> int:
        return len(sequence.tokens)

    @property
    def kv_bytes(self) -> int:
        return self.pool.num_bytes()

    @property
    def kv_peak_bytes(self) -> int:
        return self.pool.peak_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        probe = TreeRunner(self.forwards, TreeCache(self.cache.num_layers, self.cache.max_slots))
        sequence = probe.open()
        probe.prefill(sequence, [0])
        return sequence.cache.slot_bytes

    @torch.inference_mode()
    def snapshot(self, sequence: SequenceState, length: int) -> Snapshot | None:
        layers = sequence.cache.copied(sequence.row, length)
        return Snapshot(list(sequence.tokens[:length]), layers, regime=sequence.regime) if any(layers) else None

    def restore(self, sequence: SequenceState, snapshot: Snapshot, length: int) -> None:
        if sequence.regime != snapshot.regime:
            raise ValueError(
                "this prefix is from a sequence of another length, with other rotary embeddings: prefill it"
            )
        self.pool.make_room(sequence, length)
        for layer, pair in enumerate(snapshot.layers):
            if pair is not None:
                sequence.cache.load(sequence.row, layer, pair[0][:, :length], pair[1][:, :length])
        sequence.tokens.extend(snapshot.tokens[:length])
        self.pool.note_size()

    def prefill_batch(
        self, prompts: Sequence[tuple[SequenceState, Sequence[int]]], taps: Sequence[str] = ()
    ) -> list[Mapping[str, Tensor]]:
        """Read as many texts per call as fit into a chunk, unless the forward would run much padding."""
        taps_of: list[Mapping[str, Tensor]] = []
        for group in self._groups([len(tokens) for _, tokens in prompts]):
            together = [prompts[i] for i in group]
            if len(group) == 1:
                taps_of.append(self.prefill(*together[0], taps))
                continue
            self._grow(together)
            rows = self.forward([Feed(sequence, tokens, wanted=0) for sequence, tokens in together], taps)
            for sequence, tokens in together:
                self.commit(sequence, range(len(tokens)))
            taps_of += [row.taps for row in rows]
        return taps_of

    def _groups(self, lengths: Sequence[int]) -> list[range]:
        """Index ranges of texts to read in one call: neighbours, whose cache rows are neighbours, too."""
        groups = [range(0)]
        for end in range(1, len(lengths) + 1):
            group = range(groups[-1].start, end)
            group_lengths = [lengths[i] for i in group]
            run = sum(group_lengths) if self.forwards.spared is not None else len(group_lengths) * max(group_lengths)
            if len(group_lengths) == 1 or (
                0 not in group_lengths and run <= min(2 * sum(group_lengths), self.prefill_chunk)
            ):
                groups[-1] = group
            else:
                groups.append(range(end - 1, end))
        return [group for group in groups if group]

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Commit one scratch path (gathered to contiguous slots) and drop the rest."""
        if sequence.provisional and len(path):
            raise ValueError("only some layers were run on these nodes: run all before committing them")
        sequence.cache.keep(sequence.row, self._slots(sequence), path)
        sequence.tokens.extend(sequence.scratch_tokens[node] for node in path)
        sequence.clear_scratch()

    def forget(self, sequence: SequenceState) -> None:
        self.commit(sequence, ())
        sequence.cache.blank(sequence.row, self._slots(sequence))

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` committed tokens; later slots are overwritten."""
        del sequence.tokens[length:]
        sequence.clear_scratch()
        if not sequence.tokens:
            sequence.regime = 0

    def expect(self, sequence: SequenceState, length: int) -> None:
        if self.rotary is not None:
            self.rotary.expect(self, sequence, length)

    def room(self, sequence: SequenceState) -> int:
        room = None if self.rotary is None else self.rotary.room(sequence)
        return super().room(sequence) if room is None else room

    def _grow(self, prompts: Sequence[tuple[SequenceState, Sequence[int]]]) -> None:
        """Account for committed tokens: sequences that cross the rotary border are read again."""
        if self.rotary is not None:
            self.rotary.grow(self, prompts)

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> Mapping[str, Tensor]:
        self._grow([(sequence, tokens)])
        return super().prefill(sequence, tokens, taps)

    # -- forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append and score nodes in one padded [b, width] call over the rows that the feeds span.

        If a feed repeats provisional nodes (see :meth:`forward_part`), they resume from the layer that they reached;
        others are dropped.  After a failure the scratch trees are unchanged, or empty if they were provisional.
        """
        self._check(feeds, taps)
        if any(feed.sequence.provisional for feed in feeds):
            return self._finish(feeds, taps)
        return self._whole(feeds, taps)

    def _whole(
        self,
        feeds: Sequence[Feed],
        taps: Sequence[str],
        plan: LayerPlan = WHOLE,
        inputs: Sequence[Sequence[Tensor] | Tensor] = (),
    ) -> list[Rows]:
        before = [len(feed.sequence.scratch_tokens) for feed in feeds]
        try:
            return self._score(feeds, [self._append(feed) for feed in feeds], taps, plan, inputs)
        except BaseException:
            for feed, size in zip(feeds, before, strict=True):
                feed.sequence.drop_last(len(feed.sequence.scratch_tokens) - size)
            raise

    def _check(self, feeds: Sequence[Feed], taps: Sequence[str]) -> None:
        """Reject invalid calls.  The roots of trees are committed text."""
        check_taps(taps, self.num_layers)
        check_distinct(feeds)
        self._grow([(feed.sequence, feed.tokens[:1]) for feed in feeds if not feed.sequence.scratch_tokens])

    @torch.inference_mode()
    def forward_part(self, feeds: Sequence[Feed], plan: LayerPlan, taps: Sequence[str] = ()) -> list[Rows]:
        """Append provisional nodes, run by a part of the network, and record where they can resume.

        Above the first layer, nodes resume from the ``states`` [n, D] of their feeds, which otherwise may replace their
        embeddings; nothing is recorded then.
        """
        self._check(feeds, taps)
        if plan not in self._checked_plans:  # a draft uses the same plan at every step
            self.forwards.check(plan)
            self._checked_plans.add(plan)
        inputs = window_inputs(feeds, plan)
        reached = 0 if inputs and not plan.start else layer_reached(plan, self.num_layers)
        for sequence in (feed.sequence for feed in feeds):
            if sequence.scratch_tokens and (not sequence.provisional or sequence.exit_layer != reached):
                raise ValueError("the scratch nodes were run by other layers: commit or drop them first")
            sequence.provisional, sequence.exit_layer = True, reached
        exit_tap = f"layer:{reached}"
        results = self._whole(feeds, (*taps, exit_tap) if reached and exit_tap not in taps else taps, plan, inputs)
        if reached:
            for feed, rows in zip(feeds, results, strict=True):
                feed.sequence.exit_states.extend(rows.taps[exit_tap])
        return results

    @torch.inference_mode()
    def forward_on(self, feeds: Sequence[Feed], plan: LayerPlan, taps: Sequence[str] = ()) -> list[Rows]:
        """Run further layers of provisional nodes: feeds list all of them, with ``states`` at ``plan.start``."""
        plans = [self._row_plan(feed.sequence, len(feed.tokens)) for feed in feeds]
        return self._score(feeds, plans, taps, plan, [list(feed.states) for feed in feeds if feed.states is not None])

    def _finish(self, feeds: Sequence[Feed], taps: Sequence[str]) -> list[Rows]:
        """A full forward of trees whose leading nodes have already run the first layers."""
        exits = {feed.sequence.exit_layer for feed in feeds if feed.sequence.exit_layer}
        exit_tap = f"layer:{min(exits, default=0)}"
        if len(exits) != 1 or any(comes_before(name, min(exits)) for name in taps):
            for feed in feeds:  # nothing to resume from, or hidden states of the first layers are requested
                feed.sequence.clear_scratch()
            return self._whole(feeds, taps)
        window = LayerPlan(stop=exits.pop())
        try:
            for feed in feeds:
                keep_common(feed)
            rest = [without_first(feed, len(feed.sequence.scratch_tokens)) for feed in feeds]
            fresh = [feed for feed in rest if feed.tokens]
            if fresh:
                self.forward_part(fresh, window)
            plans = [self._row_plan(feed.sequence, len(feed.tokens)) for feed in feeds]
            upper = LayerPlan(start=window.end(self.num_layers))
            states = [feed.sequence.exit_states for feed in feeds]
            results = self._score(feeds, plans, [name for name in taps if name != exit_tap], upper, states)
            if exit_tap in taps:  # the input of the upper layers
                results = [
                    replace(rows, taps={**rows.taps, exit_tap: torch.stack(row_states)})
                    for rows, row_states in zip(results, states, strict=True)
                ]
        except BaseException:
            for feed in feeds:
                feed.sequence.clear_scratch()
            raise
        for feed in feeds:
            feed.sequence.provisional, feed.sequence.exit_layer = False, 0
            feed.sequence.exit_states.clear()
        return results

    def _score(
        self,
        feeds: Sequence[Feed],
        plans: Sequence[RowPlan],
        taps: Sequence[str],
        plan: LayerPlan = WHOLE,
        inputs: Sequence[Sequence[Tensor] | Tensor] = (),
    ) -> list[Rows]:
        """Run the network, or the part in ``plan``, on the last nodes of the scratch trees.

        ``inputs`` holds, per feed, the hidden states [D] of its nodes at layer ``plan.start``.
        """
        if self.graphs is not None and self.graphs.owner is self and plan == WHOLE and not inputs:
            fixed: list[Rows] | None = self.graphs.score(feeds, plans, taps)
            if fixed is not None:
                return fixed
        for feed, row_plan in zip(feeds, plans, strict=True):
            self.pool.make_room(feed.sequence, row_plan.committed + len(row_plan.parents))
        groups = by_cache([feed.sequence for feed in feeds])
        calls = [
            self._call(take(feeds, group), take(plans, group), take(inputs, group), taps, plan) for group in groups
        ]
        self.pool.note_size()
        start_s = now(self.device)
        outputs = self.forwards.run_all(calls)
        self.run_s += now(self.device) - start_s
        results: dict[int, Rows] = {}
        for group, call, (logits, hidden) in zip(groups, calls, outputs, strict=True):
            self.run_rows += call.ids.numel() if call.counts is None else sum(call.counts)
            width = call.ids.shape[1]
            for index, row_logits, (i, _, end) in zip(group, logits, call.wanted, strict=True):
                results[index] = Rows(
                    row_logits, HiddenStates(hidden, range(i * width, i * width + end)) if hidden else {}
                )
        return [results[index] for index in range(len(feeds))]

    def _call(
        self,
        feeds: Sequence[Feed],
        plans: Sequence[RowPlan],
        inputs: Sequence[Sequence[Tensor] | Tensor],
        taps: Sequence[str],
        plan: LayerPlan,
    ) -> NetworkCall:
        """The padded [b, width] call for nodes whose sequences share a cache, over the rows that they span."""
        cache = feeds[0].sequence.cache
        by_row = {feed.sequence.row: row_plan for feed, row_plan in zip(feeds, plans, strict=True)}
        low, high = min(by_row), max(by_row) + 1
        width = max(row_plan.new for row_plan in plans)
        # A row between the fed ones is inactive: its padding is written after its own scratch.
        rows = [by_row[r] if r in by_row else self._row_plan(cache.sequences[r], 0) for r in range(low, high)]
        starts = [row.committed + len(row.parents) - row.new for row in rows]
        used = max(starts) + width
        cache.plan(low, high, starts, width, used)
        ids, positions = inputs_of(rows, low, feeds, width, self.context_length - 1, self.device)
        cut, layers = self._reach.applied(rows, self.forwards.layer_masks)
        masks = additive_masks(rows, layers, width, used, self.forwards.run_dtype, self.device)
        if cut is not None and not self.forwards.skips_masked:
            cache.cut, masks = cut, {name: cut.mask(mask) for name, mask in masks.items()}
        spans = [(f.sequence.row - low, p.new - f.num_wanted, p.new) for f, p in zip(feeds, plans, strict=True)]
        states = padded_states(inputs, feeds, low, ids, self.forwards.run_dtype) if inputs else None
        regimes = [sequence.regime for sequence in cache.sequences[low:high]]
        lengths = None if self.rotary is None else self.rotary.lengths(positions, regimes)
        return NetworkCall(cache, ids, positions, masks, spans, taps, plan, states, self._counts(rows, width), lengths)

    @property
    def _reach(self) -> Window:
        return self.window

    def _append(self, feed: Feed) -> RowPlan:
        sequence = feed.sequence
        sequence.append(feed.tokens, feed.parents_behind(len(sequence.scratch_tokens)))
        return self._row_plan(sequence, len(feed.tokens), feed.after)

    def _row_plan(self, sequence: SequenceState, new: int, after: int | None = None) -> RowPlan:
        """Location of a sequence's last ``new`` scratch nodes."""
        committed, after = len(sequence.tokens), -1 if after is None else after
        return RowPlan(committed, sequence.scratch_parents, sequence.scratch_depths, new, after)

    def _counts(self, rows: Sequence[RowPlan], width: int) -> list[int] | None:
        """Number of nodes per row, if removing padding saves more than it costs; else ``None``."""
        counts, spared = [row.new for row in rows], self.forwards.spared
        return None if spared is None or len(rows) * width - sum(counts) < spared else counts
