"""Arguments shared by all library calls of drafter networks: cache locations of their rows, and rotary tables."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.cache.masks import RowPlan
from foretoken.models.cache.pool import by_cache
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.native import attention
from foretoken.models.native import forward as native_forward
from foretoken.models.native.library import NotCoveredError
from foretoken.models.network.frequencies import rotary_frequencies
from foretoken.models.network.watch import Watch

Masks = Callable[[Sequence[int], Sequence[RowPlan], int], Sequence[Tensor | None]]
"""Masks of the new nodes of one cache's rows over its used slots, per kind of layer, see :func:`stacked_mask`; ``None``
if they see all of them."""


class NativeRows(ABC):
    """A network in the library, with its caches and rotary embeddings; it follows the weights.

    Args:
        config: configuration with ``heads``, ``kv_heads``, ``head_dim``, ``rope_theta`` and ``rope``.

    Raises:
        NotCoveredError: the library does not support the network; also when it is described again.
    """

    _watch: Watch

    def __init__(self, config: Any) -> None:
        self.size = (config.heads, config.kv_heads, config.head_dim)
        if not attention.fits(torch.bfloat16, config.head_dim):
            raise NotCoveredError(f"attention with head dimension {config.head_dim} is not supported")
        self.frequencies, self.turn_scale = rotary_frequencies(config.head_dim, config.rope_theta, config.rope)
        self._table = self._turned(torch.arange(0))
        self.like = torch.empty(config.kv_heads, 1, config.head_dim, dtype=torch.bfloat16)

    @abstractmethod
    def describe(self) -> None:
        """Describe the current weights to the library."""

    def renew(self) -> None:
        """Describe the network again if it changed."""
        if self._watch.has_changed():
            self.describe()

    def grouped(
        self, sequences: Sequence[Any], plans: Sequence[RowPlan], masks: Masks
    ) -> tuple[list[int], Any, list[Any]]:
        """The sequences in row order, the library's groups, and the objects that these point to."""
        order: list[int] = []
        groups: list[native_forward.GroupStruct] = []
        pointed_to: list[Any] = []
        for indices in by_cache(sequences):
            indices.sort(key=lambda i: sequences[i].row)
            order += indices
            rows = [sequences[i].row for i in indices]
            cache: TreeCache = sequences[indices[0]].cache
            groups.append(self._group(cache, rows, [plans[i] for i in indices], masks, pointed_to))
        return order, native_forward.array(native_forward.GroupStruct, groups), pointed_to

    def _group(
        self, cache: TreeCache, rows: Sequence[int], plans: Sequence[RowPlan], masks: Masks, pointed_to: list[Any]
    ) -> native_forward.GroupStruct:
        low, count = rows[0], rows[-1] + 1 - rows[0]
        starts, widths = [0] * count, [0] * count  # rows between the fed ones are inactive
        for row, plan in zip(rows, plans, strict=True):
            starts[row - low], widths[row - low] = plan.committed + len(plan.parents) - plan.new, plan.new
        used = max(start + width for start, width in zip(starts, widths, strict=True))
        cache.flush()
        cache.reserve(rows[-1] + 1, used)
        keys, values = self._buffers(cache)
        group_masks = masks(rows, plans, used)
        arrays = [native_forward.pointers(tensors) for tensors in (keys, values)]
        arrays += [native_forward.numbers(starts), native_forward.numbers(widths)]
        arrays.append(native_forward.pointers(group_masks))
        pointed_to += [group_masks, arrays, keys, values]
        first, second, *others = map(ctypes.addressof, arrays)
        return native_forward.GroupStruct(first, second, cache.num_slots, used, low, count, max(widths), *others)

    def _buffers(self, cache: TreeCache) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values in bfloat16; those that the twin stored in another dtype are rounded."""
        keys, values = cache.buffers(self.like)
        for store, buffers in ((cache.keys, keys), (cache.values, values)):
            for i, buffer in enumerate(buffers):
                if buffer.dtype != torch.bfloat16:
                    store[i] = buffers[i] = buffer.to(torch.bfloat16)
        return keys, values

    def turns(self, plans: Sequence[RowPlan]) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [n, r] of the rows' positions."""
        positions = [
            plan.first_position + depth for plan in plans for depth in plan.depths[len(plan.depths) - plan.new :]
        ]
        last, most = max(positions), 8192  # positions with cached cosines and sines
        if last >= most:
            return self._turned(torch.tensor(positions))
        if last >= len(self._table[0]):
            self._table = self._turned(torch.arange(min(most, 2 * last + 256)))
        rows = torch.tensor(positions)
        return self._table[0][rows], self._table[1][rows]

    def _turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.turn_scale, angles.sin() * self.turn_scale
        return torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)


def stacked_mask(rows: Sequence[int], visible: Sequence[NDArray[np.bool_]]) -> Tensor:
    """[sequences, width, used], zero where a node sees a slot.

    Args:
        rows: cache rows in order; those between them are inactive.
        visible: [nodes, used] per row.
    """
    wide = np.zeros((rows[-1] + 1 - rows[0], max(map(len, visible)), visible[0].shape[1]), np.bool_)
    for row, row_visible in zip(rows, visible, strict=True):
        wide[row - rows[0], : len(row_visible)] = row_visible
    return torch.from_numpy(np.where(wide, np.int16(0), np.int16(0x3F80)))  # any nonzero bfloat16 number
