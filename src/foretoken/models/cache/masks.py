"""Additive attention masks for committed prefixes plus scratch trees, one per layer type.

Every mask answers one boolean question, "may this node see that slot": a node sees the committed prefix, its ancestors
and itself.  Sliding and chunked layers add a condition on positions.  Additive float masks are the only form that every
Transformers attention interprets the same way.
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
    """Value added to the score of a hidden slot: half of the dtype's lowest number.

    A score added to the lowest number itself may overflow to -inf, and blockwise kernels turn a block of only -inf into
    NaN.
    """
    return torch.finfo(dtype).min / 2


@dataclass(frozen=True)
class LayerMask:
    """Attention pattern of a layer type.

    Attributes:
        kind: ``"full"``, ``"sliding"`` (``position - key < size``) or ``"chunked"`` (same block of ``size`` positions).
        size: window or chunk in tokens; 0 for full.
        back: maximum distance to an earlier position that a node sees, in addition to the above; 0: no limit.
        sink: number of first positions that stay visible in spite of ``back``.
    """

    kind: str = "full"
    size: int = 0
    back: int = 0
    sink: int = 0


@dataclass(frozen=True)
class RowPlan:
    """Location of the new nodes in one row of a forward.

    Attributes:
        committed: tokens in the cache before the scratch.
        parents: parents of *all* scratch nodes, old and new; ``-1`` is the last committed token.
        new: number of nodes fed in this forward (the last ones).
        visible: number of committed tokens that the scratch follows and sees; -1: all.
        base: position of scratch depth 0; -1: directly after the visible tokens.
    """

    committed: int
    parents: Sequence[int]
    depths: Sequence[int]
    new: int
    visible: int = -1
    base: int = -1

    @property
    def num_seen(self) -> int:
        """Number of committed tokens that the scratch sees."""
        return self.committed if self.visible < 0 else self.visible

    @property
    def first_position(self) -> int:
        """Position of scratch depth 0."""
        return self.num_seen if self.base < 0 else self.base

    @property
    def first_new(self) -> int:
        """First position of a new node; without new nodes, the position after the visible tokens."""
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
    """[row.new, used] whether each new node sees each slot."""
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
        keys = np.arange(used) + row.first_position - row.num_seen  # a part of a text counts as its end
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
    """[b, 1, width, used] additive mask: 0 where a node sees a slot, :func:`unseen` elsewhere.

    ``None`` when nothing is masked (one row, one node).  Padding nodes see at least the committed prefix, or slot 0, so
    that no row is fully masked.
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
    """The most common case in two calls: a node sees every slot up to itself, padding every slot up to its own."""
    step, size = _step(1 << used.bit_length(), dtype, device), 1 << used.bit_length()
    starts = torch.tensor([[size - 1 - slot - column for column in range(width)] for slot in first], device=device)
    return step.unfold(0, used, 1)[starts][:, None]


@lru_cache(maxsize=64)
def _step(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2 size] zeros, then :func:`unseen`; every row of a chain's mask is a slice of it."""
    return torch.tensor([0.0, unseen(dtype)], dtype=dtype, device=device).repeat_interleave(size)
