"""One call of a network: everything that its forward needs, made once for every way to run it; and what runs it."""

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
        cache: where keys and values are; its rows are planned.
        ids: [b, width] token ids.
        positions: [b, width].
        masks: additive masks by layer type, ``None`` where every row sees everything.
        wanted: per feed its row, and the first and the end of the columns whose logits are wanted.
        taps: hidden states that are wanted, see :mod:`foretoken.models.base`.
        counts: nodes of each row, from column 0 on, when much of the rest is padding that a forward may leave out;
            ``None``: run all of it.
        states: [b, width, D] hidden states at layer ``plan.start``, instead of the embedded ids.
        lengths: [b, width] for how long a text the rotary embeddings turn each node, where they change with that.
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
        """The column from which on logits are wanted of any feed; ``width`` for none."""
        return min((start for _, start, end in self.wanted if start < end), default=self.ids.shape[1])

    def feed_logits(self, logits: Tensor) -> list[Tensor]:
        """Logits [n, V] per feed from those of all rows [b, width - first, V]."""
        first = self.first
        return [
            logits[row, start - first : end - first] if start < end else logits[row, :0]
            for row, start, end in self.wanted
        ]


class Forward(Protocol):
    """What computes the calls of a :class:`~foretoken.models.runner.TreeRunner`.

    Attributes:
        name: as :attr:`~foretoken.models.base.LanguageModel.forward_name`.
        run_dtype: of hidden states, keys and values.
        num_layers: layers that plans and taps count.
        layer_masks: the masks that its layers read, by layer type.
        rotary: rotary embeddings that change with the length of the text, if any do.
        spared: rows of padding from which on it leaves them out; ``None``: it never does.
        skips_masked: whether attention spends no time on slots that a mask hides.
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
        """Refuse a part of the layers that it cannot run: ``ValueError``, or a ``CapabilityError``."""

    def run_all(self, calls: Sequence[NetworkCall]) -> list[Outputs]:
        """Logits [n, V] per feed and taps [b, width, D] of calls that are alike but for their rows."""


def inputs_of(
    rows: Sequence[RowPlan], low: int, feeds: Sequence[Feed], width: int, last: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and positions [b, width] of the rows from ``low`` on; padding repeats token 0 at a position up to
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
