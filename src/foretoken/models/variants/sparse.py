"""A target that reads a small part of its own cache: the same weights, a few hundred selected slots per layer.

TriForce's retrieval cache, Sun et al. 2024 (https://arxiv.org/abs/2404.11912); sinks and recent tokens as in
StreamingLLM, Xiao et al. 2023 (https://arxiv.org/abs/2309.17453).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.models.base import CapabilityError, Feed, LanguageModel, Rows, SequenceState, opened
from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.attention import watching_queries
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.runner import SCRATCH_ROOM, TreeRunner

SINKS = 16
"""Number of first tokens that ``recent`` keeps: attention always needs them (sinks)."""


@dataclass
class SparseState(SequenceState):
    """A sequence with only a part of its tokens in the cache.

    Attributes:
        source: the target's sequence with the same tokens.
        chosen: whether a subset was already selected.
        chosen_from: number of leading tokens that it was selected from; all later ones are in the cache.
        num_kept: number of slots in the subset.
    """

    source: SequenceState = field(kw_only=True)
    chosen: bool = False
    chosen_from: int = 0
    num_kept: int = 0

    @property
    def committed_slots(self) -> int:
        """Slots of the subset and of the tokens read after it."""
        return self.num_kept + len(self.tokens) - self.chosen_from

    @property
    def num_slots(self) -> int:
        return self.committed_slots + len(self.scratch_tokens)


class SparseModel(TreeRunner):
    """Drafts with the target's weights over a subset of the target's keys and values.

    The subset is copied and used for ``rebuild`` tokens, which this model reads itself and appends.  Positions are
    those of the text, so keys need no correction.  A text of up to ``budget`` tokens is copied as a whole, and this
    model is then the target.  Layers with a window or chunks always get the end of the text: they see nothing before
    their window.

    Args:
        target: the model whose weights and cache are read; they are not modified.
        budget: slots per layer and key head; 0: a quarter of the context, limited to 256 to 4096.
        chunk: number of consecutive tokens that are selected together.
        select: ``"retrieval"`` (the chunks that best match the root's query, per layer and key head) or ``"recent"``
            (the first 16 tokens and the last ones).
        rebuild: number of tokens after which a new subset is selected.
        local: share of the budget that ``retrieval`` reserves for the latest chunks; 0 is the paper's rule.
        offload: keep the target's own keys and values in host memory, and the subset on its device.

    Raises:
        ValueError: an option is out of range, or there is no device to offload from.
        CapabilityError: the target has no such cache.
    """

    reads = False

    def __init__(
        self,
        target: LanguageModel,
        budget: int = 0,
        chunk: int = 8,
        select: str = "retrieval",
        rebuild: int = 64,
        local: float = 0.5,
        offload: bool = False,
    ) -> None:
        if not isinstance(target, HuggingFaceModel):
            reason = target.capabilities.missing.get("tree_mask", f"{type(target).__name__} has none")
            raise CapabilityError(f"sparse_kv needs a target with a cache of keys and values: {reason}")
        self._ends_only = windowed_layers(target)
        self.budget = budget if budget != 0 else min(max(target.context_length // 4, 256), 4096)
        self.chunk, self.select, self.rebuild, self.local = chunk, select, rebuild, local
        self._check_options()
        if offload:
            target.keep_on_host()
        self.target = target
        slots = self.budget + rebuild + SCRATCH_ROOM
        super().__init__(target.forwards, TreeCache(target.cache.num_layers, slots))
        self.stored_as, self.weights_version = target.stored_as, target.weights_version
        if select == "retrieval":
            self._check_keys()

    def _check_options(self) -> None:
        if self.select not in ("retrieval", "recent"):
            raise ValueError(f"select must be retrieval or recent, not {self.select!r}")
        if self.chunk < 1:
            raise ValueError(f"sparse_kv needs chunk >= 1, not {self.chunk}")
        if self.rebuild < 1:
            raise ValueError(f"sparse_kv needs rebuild >= 1, not {self.rebuild}")
        if not 0.0 <= self.local < 1.0:
            raise ValueError(f"sparse_kv needs 0 <= local < 1, not {self.local}")
        # The first chunk, a selected one and the text's last partial one; or the sinks and the last token.
        least = 3 * self.chunk if self.select == "retrieval" else SINKS + 1
        if self.budget < least:
            reason = (
                f"3 chunks of {self.chunk}" if self.select == "retrieval" else f"{SINKS} first tokens and a recent one"
            )
            raise ValueError(f"sparse_kv needs budget >= {least} ({reason}), not {self.budget}")

    def _check_keys(self) -> None:
        """Test with one token that queries can be compared with the cached keys."""
        with opened(self.target, []) as (source,):
            queries = self.queries(source, 0)
            stored = list(source.cache.keys)
        for layer, keys in enumerate(stored):
            if keys is not None and (layer not in queries or queries[layer].shape[-1] != keys.shape[-1]):
                raise CapabilityError(
                    "retrieval cannot compare a query with the compressed keys of "
                    f"{self.target.config.model_type} layers: use select=recent"
                )

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        raise CapabilityError("a sparse cache is a part of the target's: it cannot work inside another drafter")

    def open_beside(self, source: SequenceState | None) -> SequenceState:
        """Open a sequence for the tokens in the target's ``source``; its subset is selected on demand."""
        if source is None:
            return self.open()
        if self.weights_version != self.target.weights_version:
            self.weights_version = self.target.weights_version
            self.cache = self.cache.fresh()  # the network may have another dtype now
        return self.pool.open(SparseState(row=0, source=source))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        self.forwards = self.target.forwards  # which may be another one since it was changed
        return super().forward(feeds, taps)

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> dict[str, Tensor]:
        """Reads nothing: the subset is selected from the target's cache once the next token is known."""
        state = _sparse_state(sequence)
        if taps or state.source.tokens != list(tokens):
            raise ValueError("a sparse cache is a copy of the target's: prefill the target first, with the same tokens")
        return {}

    def catch_up(self, sequence: SequenceState, tokens: Sequence[int]) -> Sequence[int]:
        """As in the base class, but from a new subset if there is none or it is ``rebuild`` tokens old."""
        state = _sparse_state(sequence)
        self.target.expect(state.source, len(tokens))
        other_regime = state.regime != state.source.regime
        if not state.chosen or other_regime or len(state.source.tokens) - state.chosen_from >= self.rebuild:
            self.choose(sequence, tokens[-1])
        return super().catch_up(sequence, tokens)

    def expect(self, sequence: SequenceState, length: int) -> None:
        """Does nothing: the tokens are those of the target, and a new subset follows when the target reads them
        again."""

    def rewind(self, sequence: SequenceState, length: int) -> None:
        if length < _sparse_state(sequence).chosen_from:
            raise CapabilityError("a sparse cache cannot roll back tokens that its subset was chosen from")
        super().rewind(sequence, length)

    def _slots(self, sequence: SequenceState) -> int:
        return _sparse_state(sequence).committed_slots

    def _row_plan(self, sequence: SequenceState, new: int, after: int | None = None) -> RowPlan:
        if after is not None:
            raise ValueError("a sparse cache does not hold the whole sequence: nodes must follow its end")
        slots, base = self._slots(sequence), len(sequence.tokens)
        return RowPlan(slots, sequence.scratch_parents, sequence.scratch_depths, new, base=base)

    snapshot = LanguageModel.snapshot  # none: a subset is not a text

    # -- choosing ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def choose(self, sequence: SequenceState, root: int) -> None:
        """Select the subset of the target's committed tokens for the next token ``root``; drop the scratch."""
        state = _sparse_state(sequence)
        source, num_slots = state.source, 0
        count = len(source.tokens)
        retrieve = count > self.budget and self.select == "retrieval"
        queries = self.queries(source, root) if retrieve and len(self._ends_only) < self.num_layers else {}
        size = num_retrieved(count, self.budget, self.chunk) if retrieve else self.budget
        for layer, (keys, values) in enumerate(zip(source.cache.keys, source.cache.values, strict=True)):
            if keys is None or values is None:
                continue
            key, value = keys[source.row, :, :count], values[source.row, :, :count]  # [H, count, D]
            if count > self.budget:
                if layer in self._ends_only:
                    slots = torch.arange(count - size, count, device=key.device).expand(len(key), -1)
                elif retrieve:
                    slots = retrieved_slots(key, queries[layer].to(key.device), self.budget, self.chunk, self.local)
                else:
                    slots = recent_slots(count, self.budget).to(key.device).expand(len(key), -1)
                key, value = _gathered(key, slots), _gathered(value, slots)
            num_slots = key.shape[1]
            state.cache.load(state.row, layer, key.to(self.device), value.to(self.device))
        state.clear_scratch()
        state.tokens[:], state.regime = source.tokens, source.regime
        state.chosen, state.chosen_from, state.num_kept = True, count, num_slots

    def queries(self, source: SequenceState, root: int) -> dict[int, Tensor]:
        """Query [Hq, D] per layer of a token after the target's tokens, from one forward of the target."""
        if source.scratch_tokens:
            raise CapabilityError("the target's scratch must be empty while a sparse subset is chosen")
        public = copy.copy(self.target)  # shares the cache; only the public forward calls the attention function
        public.forwards = self.target.forwards.public()
        with watching_queries() as queries:
            public.forward([Feed(source, [root], wanted=0)])
        self.target.commit(source, ())
        return queries


def retrieved_slots(keys: Tensor, query: Tensor, budget: int, chunk: int, local: float = 0.0) -> Tensor:
    """[H, m] slots (m <= budget, ascending) of the chunks whose mean keys best match the query.

    Args:
        keys: [H, n, D] of one layer.
        query: [Hq, D]; the query heads that share a key head are averaged.
        chunk: slots per chunk.  The first chunk and the last partial one are always selected.
        local: share of the budget for the latest chunks, selected regardless of the query.
    """
    heads, count, _ = keys.shape
    whole = count // chunk * chunk
    room = (num_retrieved(count, budget, chunk) - (count - whole)) // chunk
    wide = torch.promote_types(keys.dtype, torch.float32)
    means = keys[:, :whole].unflatten(1, (-1, chunk)).mean(2, dtype=wide)  # [H, whole / chunk, D]
    mean_query = query.to(wide).view(heads, -1, query.shape[-1]).mean(1)  # [H, D]
    scores = torch.einsum("hcd,hd->hc", means, mean_query)
    latest = min(int(local * budget) // chunk, room - 1)
    scores[:, 0] = torch.inf
    scores[:, scores.shape[1] - latest :] = torch.inf
    best = scores.topk(room).indices.sort().values
    inside = torch.arange(chunk, device=keys.device)
    chosen = (best[:, :, None] * chunk + inside).flatten(1)
    rest = torch.arange(whole, count, device=keys.device).expand(heads, -1)
    return torch.cat([chosen, rest], 1)


def num_retrieved(count: int, budget: int, chunk: int) -> int:
    """Number of selected slots out of ``count``: whole chunks, and the last partial one."""
    rest = count % chunk
    return (budget - rest) // chunk * chunk + rest


def recent_slots(count: int, budget: int) -> Tensor:
    """[budget] slots of the first 16 tokens and the last ones of ``count``."""
    return torch.cat([torch.arange(SINKS), torch.arange(count - budget + SINKS, count)])


def _gathered(stored: Tensor, slots: Tensor) -> Tensor:
    """Slots [H, m] of keys or values [H, n, D] -> [H, m, D]."""
    return stored.gather(1, slots[:, :, None].expand(-1, -1, stored.shape[-1]))


def _sparse_state(sequence: SequenceState) -> SparseState:
    if not isinstance(sequence, SparseState):
        raise ValueError("this sequence belongs to another model: open it with open_beside")
    return sequence


def windowed_layers(target: HuggingFaceModel) -> frozenset[int]:
    """Layers with a window or chunk shorter than the context: they see only the end of a long text."""
    masks = target.forwards.layer_masks
    kinds = list(getattr(target.config, "layer_types", None) or ())
    by_layer = [masks[kinds[layer] if "" not in masks else ""] for layer in range(target.num_layers)]
    return frozenset(i for i, mask in enumerate(by_layer) if mask.kind != "full" and mask.size < target.context_length)
