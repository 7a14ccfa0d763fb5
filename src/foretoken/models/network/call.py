"""One call of a network: all inputs of its forward, independent of how it is run, and the protocol of forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.models.base import Capabilities, Feed
from foretoken.models.cache.masks import LayerMask, RowPlan
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.network.layers import WHOLE, LayerPlan
from foretoken.models.network.rotary import ChangingRotary

Outputs = tuple[list[Tensor], dict[str, Tensor]]
"""Logits [n, V] per feed, and taps [b, width, D]."""


@dataclass(frozen=True)
class NetworkCall:
    """Padded rows of nodes; shapes: ``b`` rows of ``width`` columns, ``D`` hidden size.

    Attributes:
        cache: the KV cache, with its rows planned.
        ids: [b, width] token ids.
        positions: [b, width].
        masks: additive masks by layer type; ``None`` if every row sees everything.
        wanted: row of each feed, with first and end column of the required logits.
        taps: required hidden states, see :mod:`foretoken.models.base`.
        counts: number of nodes in each row, from column 0 on, if the rest is mostly padding that a forward may remove;
            ``None``: run everything.
        states: [b, width, D] hidden states at layer ``plan.start``, instead of embedded ids.
        lengths: [b, width] text length for the rotary embedding of each node, if the frequencies depend on it.
    """

    cache: TreeCache
    ids: Tensor
    positions: Tensor
    masks: Mapping[str, Tensor | None]
    wanted: Sequence[tuple[int, int, int]]
    taps: Sequence[str]
    plan: LayerPlan = WHOLE
    states: Tensor | None = None
    counts: Sequence[int] | None = None
    lengths: Tensor | None = None

    @property
    def first(self) -> int:
        """The first column with required logits over all feeds; ``width`` if there is none."""
        return min((start for _, start, end in self.wanted if start < end), default=self.ids.shape[1])

    def feed_logits(self, logits: Tensor) -> list[Tensor]:
        """Logits [n, V] per feed from those of all rows [b, width - first, V]."""
        first = self.first
        return [
            logits[row, start - first : end - first] if start < end else logits[row, :0]
            for row, start, end in self.wanted
        ]


class Forward(Protocol):
    """Computes the calls of a :class:`~foretoken.models.runner.TreeRunner`.

    Attributes:
        name: see :attr:`~foretoken.models.base.LanguageModel.forward_name`.
        run_dtype: dtype of hidden states, keys and values.
        num_layers: number of layers for plans and taps.
        layer_masks: masks of its layers, by layer type.
        rotary: rotary embeddings that depend on the text length, if any.
        spared: number of padding rows from which it removes them; ``None``: never.
        skips_masked: whether attention takes no time for masked slots.
    """

    model: Any
    capabilities: Capabilities
    vocab_size: int
    context_length: int
    context_why: str
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    layer_masks: Mapping[str, LayerMask]
    rotary: ChangingRotary | None

    @property
    def name(self) -> str: ...

    @property
    def run_dtype(self) -> torch.dtype: ...

    @property
    def spared(self) -> int | None: ...

    @property
    def skips_masked(self) -> bool: ...

    def check(self, plan: LayerPlan) -> None:
        """Raise ``ValueError`` or ``CapabilityError`` for layers that it cannot run."""

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        """Logits [n, V] per feed, and taps [b, width, D], for calls that differ in their rows only."""


def inputs_of(
    rows: Sequence[RowPlan], low: int, feeds: Sequence[Feed], width: int, last: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and positions [b, width] of the rows from ``low`` on; padding has token 0 at a position up to
    ``last``."""
    ids = [[0] * width for _ in rows]
    positions = [[min(row.first_position, last)] * width for row in rows]
    for feed in feeds:
        i = feed.sequence.row - low
        row = rows[i]
        ids[i][: row.new] = feed.tokens
        positions[i][: row.new] = [row.first_position + d for d in row.depths[len(row.depths) - row.new :]]
    stacked = torch.tensor([ids, positions], device=device)
    return stacked[0], stacked[1]


def padded_states(
    inputs: Sequence[Sequence[Tensor] | Tensor], feeds: Sequence[Feed], low: int, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """Hidden states [b, width, D] of the fed nodes, zero elsewhere."""
    size = next(len(state) for states in inputs for state in states)
    padded = torch.zeros((*ids.shape, size), dtype=dtype, device=ids.device)
    for feed, states in zip(feeds, inputs, strict=True):
        rows = states if isinstance(states, Tensor) else torch.stack(list(states))
        padded[feed.sequence.row - low, : len(rows)] = rows
    return padded
