"""Additive attention masks for committed prefixes plus scratch trees, one per layer type.

Everything is expressed by one boolean question, "may this node see that slot": a node sees the committed prefix, its
ancestors and itself.  Sliding and chunked layers add a condition on positions.  Additive float masks are the only form
that every Transformers attention reads the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def unseen(dtype: torch.dtype) -> float:
    """What is added to the score of a slot that is not seen: half of the dtype's lowest number.

    A score that is added to the lowest number itself may overflow to -inf, and kernels that take a row in blocks make
    NaN of a block of nothing but -inf.
    """
    return torch.finfo(dtype).min / 2


@dataclass(frozen=True)
class LayerMask:
    """What a layer type may look at.

    Attributes:
        kind: ``"full"``, ``"sliding"`` (``position - key < size``) or ``"chunked"`` (same block of ``size`` positions).
        size: window or chunk in tokens; 0 for full.
        back: places before its own that a node looks at, besides; 0: no such limit.
        sink: first places of the text that it looks at all the same.
    """

    kind: str = "full"
    size: int = 0
    back: int = 0
    sink: int = 0


@dataclass(frozen=True)
class RowPlan:
    """One row of a forward: where its new nodes are.

    Attributes:
        committed: tokens in the cache before the scratch.
        parents: parents of *all* scratch nodes, old and new; ``-1`` hangs from the last committed token.
        new: how many of them are fed in this forward (the last ones).
        visible: how many committed tokens the scratch hangs from and sees; -1: all.
        base: the position of scratch depth 0; -1: right behind the visible tokens.
    """

    committed: int
    parents: Sequence[int]
    depths: Sequence[int]
    new: int
    visible: int = -1
    base: int = -1

    @property
    def num_seen(self) -> int:
        """How many committed tokens the scratch sees."""
        return self.committed if self.visible < 0 else self.visible

    @property
    def first_position(self) -> int:
        """The position of scratch depth 0."""
        return self.num_seen if self.base < 0 else self.base

    @property
    def first_new(self) -> int:
        """The first position of a new node; that behind the visible tokens where there is none."""
        return self.first_position + min(self.depths[len(self.depths) - self.new :], default=0)

    @property
    def last_new(self) -> int:
        return self.first_position + max(self.depths[len(self.depths) - self.new :], default=0)

    @property
    def is_chain(self) -> bool:
        """Whether the whole scratch is one chain."""
        return list(self.parents) == list(range(-1, len(self.parents) - 1))


def ancestor_matrix(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[m, m] whether node j is node i or one of its ancestors."""
    visible = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


def row_allowed(row: RowPlan, layer: LayerMask, used: int) -> NDArray[np.bool_]:
    """[row.new, used] whether each new node may see each slot."""
    m, c = len(row.parents), row.committed
    old = m - row.new
    allowed = np.zeros((row.new, used), dtype=np.bool_)
    allowed[:, : row.num_seen] = True
    if row.is_chain:
        allowed[:, c : c + m] = np.tri(row.new, m, old, dtype=np.bool_)
    else:
        allowed[:, c : c + m] = ancestor_matrix(row.parents)[old:]
    if layer.kind != "full" or layer.back:
        depths = np.asarray(row.depths)
        query = (row.first_position + depths[old:])[:, None]
        keys = np.arange(used) + row.first_position - row.num_seen  # a part of a text is taken as the end of it
        keys[c : c + m] = row.first_position + depths
        if layer.kind == "sliding":
            allowed &= query - keys < layer.size
        elif layer.kind == "chunked":
            allowed &= query // layer.size == keys // layer.size
        if layer.back:
            allowed &= (query - keys <= layer.back) | (keys < layer.sink)
    return allowed


def additive_mask(
    rows: Sequence[RowPlan], layer: LayerMask, width: int, used: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[b, 1, width, used] additive mask: 0 where a node may look, :func:`unseen` elsewhere.

    ``None`` when nothing is masked (one row, one node).  Padding nodes see the committed prefix at least, or slot 0, so
    that no row is ever fully masked.
    """
    if layer.kind == "full" and not layer.back and all(row.visible < 0 and row.is_chain for row in rows):
        first = [row.committed + len(row.parents) - row.new for row in rows]  # the slot of the first new node
        return None if width == len(rows) == 1 and used == first[0] + 1 else _chains(first, width, used, dtype, device)
    allowed = np.zeros((len(rows), 1, width, used), dtype=np.bool_)
    for i, row in enumerate(rows):
        if row.new:
            allowed[i, 0, : row.new] = row_allowed(row, layer, used)
        allowed[i, 0, row.new :, : max(row.committed, 1)] = True
    mask = torch.full(allowed.shape, unseen(dtype), dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(allowed), 0.0).to(device)


def additive_masks(
    rows: Sequence[RowPlan],
    layers: Mapping[str, LayerMask],
    width: int,
    used: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor | None]:
    return {name: additive_mask(rows, layer, width, used, dtype, device) for name, layer in layers.items()}


def _chains(first: Sequence[int], width: int, used: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The commonest case in two calls: a node sees everything up to itself, padding up to where it is written."""
    step, size = _step(1 << used.bit_length(), dtype, device), 1 << used.bit_length()
    starts = torch.tensor([[size - 1 - slot - column for column in range(width)] for slot in first], device=device)
    return step.unfold(0, used, 1)[starts][:, None]


@lru_cache(maxsize=64)
def _step(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2 size] zeros, then :func:`unseen`: every row of the mask of a chain is a part of it."""
    return torch.tensor([0.0, unseen(dtype)], dtype=dtype, device=device).repeat_interleave(size)
