"""A KV cache whose writes and moves have fixed shapes and take their indices from tensors, as CUDA graphs require.

A graph replays the captured kernels with the current contents of its input tensors; every decision made in Python is
frozen.  So a fixed step writes at slots read from a tensor and sends padding to a *spare* slot that is never visible.
The next step moves the path accepted in the last round, again by indices from tensors.  The cache remembers pending
moves until then; every other access to the buffers applies them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foretoken.models.cache.rectangle import Moves, TreeCache, whole_chunks

CHUNK = 256
"""Growth step in slots, and the smallest view of a step: every size is a separate graph."""
PATH = 16
"""Longest accepted path that a fixed step moves; longer ones are moved immediately, outside the graph."""


class FixedCache(TreeCache):
    """A :class:`TreeCache` with fixed steps beside its ordinary forwards; both see the same keys and values.

    The keys of all layers are one tensor [L, R, H, S, Dk], and so are the values, so that a move takes four kernels at
    any depth.  Layers of another shape get separate buffers.

    Attributes:
        generation: incremented when a buffer moves to other memory, which invalidates graphs captured earlier.
        ceiling: number of slots above which rows are no longer doubled, but grow only as needed.
    """

    movable = False

    def __init__(self, num_layers: int, max_slots: int) -> None:
        self._stacks: list[Tensor | None] = [None, None]
        self._places: tuple[Tensor, Tensor] | None = None  # rows [b, 1] and slots [b, n] of a fixed step
        self.generation = 0
        super().__init__(num_layers, max_slots + 1)
        self.num_slots = CHUNK
        self.ceiling = self.max_slots

    @property
    def spare(self) -> int:
        """The slot for padding: the last one, which no token ever uses."""
        return self.num_slots - 1

    def view_of(self, used: int) -> int:
        """Number of slots that attention reads when ``used`` are occupied: a power of two from ``CHUNK`` on, or all."""
        return min(max(CHUNK, 1 << (used - 1).bit_length()), self.num_slots)

    # -- room --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Reserve rows (in powers of two) and slots (plus the spare one), so that growth is rare."""
        if num_rows <= self.num_rows and num_slots < self.num_slots:
            return
        self.flush()
        rows = 1 << (max(num_rows, self.num_rows) - 1).bit_length()
        slots = self.num_slots
        if num_slots + 1 > slots:
            slots = whole_chunks(max(num_slots + 1, min(2 * slots, self.ceiling)), CHUNK)
        self._rebuild(rows, slots)

    @staticmethod
    def rectangle(lengths: Sequence[int]) -> tuple[int, int]:
        """Rows and slots that sequences of these lengths take together: every row is as long as the longest of them."""
        return (1 << (len(lengths) - 1).bit_length(), whole_chunks(max(lengths) + 1, CHUNK)) if lengths else (0, 0)

    def fit(self, lengths: Sequence[int], most: int) -> bool:
        """Check whether sequences of these lengths fit into ``most`` slots over all rows; if so, limit the cache to
        that.

        Memory left over from earlier sequences is released if needed.

        Args:
            lengths: slots of each open sequence, and of one more.
            most: total slots over all rows.
        """
        open_slots = [sequence.num_slots for sequence in self.sequences]
        rows, slots = self.rectangle([*lengths, *[1] * (len(open_slots) + 1 - len(lengths))])
        slots = max(slots, whole_chunks(max(open_slots, default=0) + 1, CHUNK))
        if rows * slots > most:
            return False
        if max(rows, self.num_rows) * max(slots, self.num_slots) > most:
            if self.sequences:
                self.flush()
                self._rebuild(rows, slots)
            else:
                self.clear()
        self.ceiling = slots
        return True

    def _rebuild(self, rows: int, slots: int) -> None:
        """Move everything to buffers of another size, or nothing if memory is full.

        New keys with old values would leave graphs that read freed memory, so both are allocated before either is used.
        """
        stores = (self._keys, self._values)
        stacks = [None if old is None else _resized(old, rows, slots) for old in self._stacks]
        buffers: list[list[Tensor | None]] = [
            [None if old is None else _resized(old[None], rows, slots)[0] for old in store]
            if stack is None
            else [*stack.unbind(0)]
            for stack, store in zip(stacks, stores, strict=True)
        ]
        self.generation += 1
        self._stacks, (self._keys, self._values) = stacks, buffers
        self.num_rows, self.num_slots = rows, slots

    def _buffer(self, store: list[Tensor | None], like: Tensor, layer: int) -> Tensor:
        index = 0 if store is self._keys else 1
        if all(buffer is None for buffer in store):
            shape = (self.num_layers, self.num_rows, like.shape[-3], self.num_slots, like.shape[-1])
            stack = self._stacks[index] = like.new_zeros(shape)
            store[:] = stack.unbind(0)
        buffer = store[layer]
        if buffer is None or (buffer.shape[1], buffer.shape[3]) != (like.shape[-3], like.shape[-1]):
            new = like.new_zeros(self.num_rows, like.shape[-3], self.num_slots, like.shape[-1])
            buffers = store
            if self._stacks[index] is not None:  # another layer's shape: every layer gets a separate buffer
                buffers = [None if view is None else view.clone() for view in store]
            self.generation += 1
            self._stacks[index] = None
            store[:] = buffers
            store[layer] = buffer = new
        return buffer

    def _parts(self) -> list[Tensor]:
        parts: list[Tensor] = []
        for stack, store in zip(self._stacks, (self._keys, self._values), strict=True):
            parts += [stack] if stack is not None else [buffer[None] for buffer in store if buffer is not None]
        return parts

    # -- ordinary forwards -------------------------------------------------------------------------------------------

    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Note the scratch slots ``start + path[i]`` that belong at ``start + i``; the next step moves them."""
        moves = [(start + node, start + i) for i, node in enumerate(path) if node != i]
        if row in self._moves or len(moves) > PATH:
            self.flush()
        if moves:
            self._moves[row] = moves
        if len(moves) > PATH:
            self.flush()

    @torch.inference_mode()
    def flush(self) -> None:
        """Apply pending moves; a fixed step has applied them already."""
        if self._places is None:
            super().flush()

    def clear(self) -> None:
        self.generation += 1
        self._stacks = [None, None]
        super().clear()
        self.num_slots = CHUNK

    # -- fixed steps -------------------------------------------------------------------------------------------------

    def take_moves(self, rows: int) -> Moves:
        """Hand over the pending moves of the first ``rows`` rows; the caller must apply them."""
        return {row: self._moves.pop(row) for row in sorted(self._moves) if row < rows}

    @contextmanager
    def fixed(self, slots: Tensor, view: int) -> Iterator[None]:
        """Let forwards inside the block cover rows 0 to b, write at ``slots`` [b, n] and read the first ``view``
        slots."""
        batch = len(slots)
        self._places = (torch.arange(batch, device=slots.device)[:, None], slots)
        self.low, self._high, self.used, self.starts = 0, batch, view, [0]
        try:
            yield
        finally:
            self._places = None

    def _write(self, store: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        if self._places is None:
            return super()._write(store, new, layer)
        rows, slots = self._places
        buffer = self._buffer(store, new, layer)
        buffer[rows, :, slots] = new.transpose(1, 2)
        return buffer[: self._high, :, : self.used]


def _resized(stack: Tensor, rows: int, slots: int) -> Tensor:
    """[L, R, H, S, D] with other numbers of rows and slots, zero-filled."""
    layers, old_rows, heads, old_slots, dim = stack.shape
    new = stack.new_zeros(layers, rows, heads, slots, dim)
    kept_rows, kept_slots = min(rows, old_rows), min(slots, old_slots)
    new[:, :kept_rows, :, :kept_slots] = stack[:, :kept_rows, :, :kept_slots]
    return new


def rectangle_of(model: Any) -> FixedCache | None:
    """The cache of a model that runs graphs, where every row is as long as the longest; ``None`` for other models."""
    cache = getattr(model, "cache", None)
    return cache if isinstance(cache, FixedCache) else None
