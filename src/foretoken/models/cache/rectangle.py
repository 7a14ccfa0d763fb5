"""The KV cache: preallocated rows, written in place; a commit keeps one path.

Four files of this package know Transformers' cache classes: this one, ``state``, ``joined`` and ``cross``; elsewhere
only :mod:`foretoken.models.sequential` does, which makes one.  Every layer keeps keys [B, H, S, Dk] and values
[B, H, S, Dv].  A sequence owns one row.  Slot ``s`` of a row holds the committed token at position ``s``; scratch nodes
follow in feeding order.  Positions come from depth, so a commit only moves slots: rotary embeddings are already right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from foretoken.models.cache.window import Cut

CHUNK = 64
"""Minimum growth in slots, so that growth is rare and little memory stays empty."""


Moves = dict[int, list[tuple[int, int]]]
"""Pairs of source and target slot by row, all applied at once."""


class TreeCache(Cache):
    """A Transformers cache over preallocated buffers; ``plan`` sets where the next forward writes.

    Args:
        num_layers: number of layers that will call :meth:`update`.
        max_slots: maximum slots of a row (context plus scratch); buffers grow towards it.

    Attributes:
        sequences: the sequences that own the rows, in row order (:mod:`foretoken.models.cache.pool`).
        low: the first row of the planned forward.
        starts: the first slot written in each of its rows.
        used: slots that attention sees.
        cut: the subset of them that it reads; ``None``: all.
        movable: whether its sequences may move to another cache.
    """

    movable = True

    def __init__(self, num_layers: int, max_slots: int) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.max_slots = max_slots
        self._moves: Moves = {}
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self.sequences: list[Any] = []
        self.num_rows = 1
        self.num_slots = CHUNK
        self.low, self._high = 0, 1
        self.starts: list[int] = [0]
        self._uniform = True
        self.used = 0
        self.cut: Cut | None = None
        self._rows = self._slots = torch.empty(0, dtype=torch.long)
        self._rows_from = 0

    @property
    def keys(self) -> list[Tensor | None]:
        """Keys by layer, with pending moves applied."""
        self.flush()
        return self._keys

    @property
    def values(self) -> list[Tensor | None]:
        """Values by layer, with pending moves applied."""
        self.flush()
        return self._values

    @torch.inference_mode()
    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Reserve rows and slots; keep stored values and zero-fill the rest.

        Zeros matter: a masked slot contributes ``0 * value`` to the weighted sum, which NaN would poison.
        """
        if num_rows <= self.num_rows and num_slots <= self.num_slots:
            return
        rows, slots = self.num_rows, self.num_slots
        if num_rows > rows:
            rows = max(num_rows, rows + rows // 8)
        if num_slots > slots:
            slots = whole_chunks(max(num_slots, min(slots + slots // 4, self.max_slots)))
        self._resize(rows, slots)

    @torch.inference_mode()
    def trim(self, num_rows: int, num_slots: int) -> None:
        """Shrink to the given numbers of rows and slots; anything beyond them is lost."""
        self._resize(min(max(num_rows, 1), self.num_rows), min(whole_chunks(max(num_slots, 1)), self.num_slots))

    def _resize(self, rows: int, slots: int) -> None:
        """Resize buffers layer by layer, so that old and new memory coexist for one layer only."""
        if (rows, slots) == (self.num_rows, self.num_slots):
            return
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                if old is not None:
                    new = old.new_zeros(rows, old.shape[1], slots, old.shape[3])
                    kept_rows, kept_slots = min(rows, old.shape[0]), min(slots, old.shape[2])
                    new[:kept_rows, :, :kept_slots] = old[:kept_rows, :, :kept_slots]
                    store[i] = new
        self.num_rows, self.num_slots = rows, slots

    def plan(self, low: int, high: int, starts: Sequence[int], count: int, used: int) -> None:
        """Let the next forward cover rows ``low:high`` and write ``count`` slots in each, beginning at ``starts``.

        ``used`` is the number of slots that attention sees.  Pending moves are applied first.
        """
        self.flush()
        self.reserve(high, max(used, max(starts) + count))
        self.low, self._high, self.used, self.cut = low, high, used, None
        self.starts = list(starts)
        self._uniform = len(set(self.starts)) == 1
        if not self._uniform:
            device = next((k.device for k in self.keys if k is not None), None)
            if self._rows.shape[:1] != (high - low,) or self._rows_from != low:
                self._rows, self._rows_from = torch.arange(low, high, device=device)[:, None], low
            self._slots = torch.tensor([range(start, start + count) for start in self.starts], device=device)

    @property
    def num_read(self) -> int:
        """Number of slots that :meth:`update` returns."""
        return self.used if self.cut is None else self.cut.sink + self.used - self.cut.low

    def buffers(self, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values [rows, H, slots, D] of all layers, for a kernel that writes them itself.  Missing buffers are
        allocated for keys ``like`` [H, n, D]."""
        stores = (self.keys, self.values)
        keys, values = ([self._buffer(store, like, i) for i in range(self.num_layers)] for store in stores)
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, H, n, D] as planned; return the visible slices [b, H, used, D]."""
        return (self._write(self._keys, key_states, layer_idx), self._write(self._values, value_states, layer_idx))

    def _write(self, store: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        buffer = self._buffer(store, new, layer)
        view = buffer[self.low : self._high]
        if self._uniform:
            start = self.starts[0]
            view[:, :, start : start + new.shape[2]] = new
        else:
            if self._rows.device != new.device:
                self._rows, self._slots = self._rows.to(new.device), self._slots.to(new.device)
            buffer[self._rows, :, self._slots] = new.transpose(1, 2).to(buffer.dtype)
        slots = view[:, :, : self.used] if self.cut is None else self.cut.slots(view[:, :, : self.used])
        return slots.to(new.dtype)  # copies only if the reader computes in another dtype

    def _buffer(self, store: list[Tensor | None], like: Tensor, layer: int) -> Tensor:
        """The buffer of a layer, allocated for tensors ``like`` [..., H, n, D] if missing."""
        if layer >= len(store):
            raise ValueError(
                f"this network has {len(store)} decoder layers and keeps keys and values of more: its layers run more "
                "than once for a token (a looped network), which is not supported"
            )
        buffer = store[layer]
        if buffer is None:
            shape = (self.num_rows, like.shape[-3], self.num_slots, like.shape[-1])
            buffer = store[layer] = like.new_zeros(shape)
        return buffer

    @torch.inference_mode()
    def load(self, row: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the first m slots of a row with keys and values [H, m, D] from elsewhere."""
        count = keys.shape[1]
        self.reserve(row + 1, count)
        self._buffer(self.keys, keys, layer)[row, :, :count] = keys
        self._buffer(self.values, values, layer)[row, :, :count] = values

    def copied(self, row: int, count: int) -> list[tuple[Tensor, Tensor] | None]:
        """Keys and values [H, count, D] of the first slots of a row, by layer."""
        stored = zip(self.keys, self.values, strict=True)
        return [
            None if k is None or v is None else (k[row, :, :count].clone(), v[row, :, :count].clone())
            for k, v in stored
        ]

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot of one row, over all layers; 0 before anything was stored."""
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in self._buffers())

    @torch.inference_mode()
    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move the scratch slots ``start + path[i]`` of a row to ``start + i``.

        On a device the moves of all sequences are deferred until the next access, so that their indices are sent once.
        """
        first = next((i for i, node in enumerate(path) if node != i), None)
        if first is None:
            return
        if row in self._moves:
            self.flush()
        buffers = self._buffers()
        if any(buffer.device.type != "cpu" for buffer in buffers):
            self._moves[row] = [(start + node, start + i) for i, node in enumerate(path) if node != i]
            return
        for buffer in buffers:
            # index_select copies before the write, so overlapping moves are safe.
            moved = buffer[row].index_select(1, torch.tensor(path[first:]) + start)
            buffer[row, :, start + first : start + len(path)] = moved

    @torch.inference_mode()
    def flush(self) -> None:
        """Apply pending moves."""
        if self._moves:
            moves = torch.tensor([(row, *pair) for row, pairs in self._moves.items() for pair in pairs])
            self.move(*moves.to(self._buffers()[0].device).T)  # one transfer, however many sequences there are
            self._moves.clear()

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` to slots ``target`` of ``rows`` in all layers, reading everything before writing.

        The three tensors must broadcast.  If memory is full, nothing moves: keys without their values would be
        inconsistent.
        """
        parts = self._parts()
        devices = {part.device for part in parts}
        indices = {device: [index.to(device) for index in (rows, source, target)] for device in devices}
        read = []
        for part in parts:
            r, s, _ = indices[part.device]
            read.append(part[:, r, :, s])
        for part, moved in zip(parts, read, strict=True):
            r, _, t = indices[part.device]
            part[:, r, :, t] = moved

    def _parts(self) -> list[Tensor]:
        """All buffers as tensors [L, R, H, S, D] of one layer or more."""
        return [buffer[None] for buffer in self._buffers()]

    @torch.inference_mode()
    def move_row(self, source: int, target: int, slots: int) -> None:
        self.flush()
        for buffer in self._buffers():
            buffer[target, :, :slots] = buffer[source, :, :slots]

    @torch.inference_mode()
    def blank(self, row: int, start: int = 0) -> None:
        """Zero the unused slots of a row from ``start`` on: attention multiplies masked values by 0, which NaN and
        infinity survive."""
        self.flush()
        for part in self._parts():
            part[:, row, :, start:] = 0

    @torch.inference_mode()
    def take_row(self, source: TreeCache, row: int, target: int, slots: int) -> None:
        """Copy the first ``slots`` slots of a row of another cache to row ``target``."""
        self.reserve(target + 1, slots)
        for target_buffers, source_buffers in ((self.keys, source.keys), (self.values, source.values)):
            for layer, buffer in enumerate(source_buffers):
                if buffer is not None:
                    self._buffer(target_buffers, buffer, layer)[target, :, :slots] = buffer[row, :, :slots]

    def fresh(self) -> TreeCache:
        """An empty cache for the same layers, without graphs."""
        return TreeCache(self.num_layers, self.max_slots)

    def clear(self) -> None:
        """Drop all buffers; the next forward allocates new ones in its own dtype."""
        self._moves = {}
        self._keys, self._values = [None] * self.num_layers, [None] * self.num_layers
        self.num_rows, self.num_slots = 1, CHUNK

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The next write position (models that get position ids do not depend on it)."""
        return self.starts[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_slots

    @property
    def is_initialized(self) -> bool:
        return any(buffer is not None for buffer in self._keys)

    @property
    def is_compileable(self) -> bool:
        """Always false: the write position is host state."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """All layers keep the whole past; masks implement windows."""
        return [False] * self.num_layers

    def __len__(self) -> int:
        return self.num_layers

    def num_bytes(self) -> int:
        """Bytes of the buffers; called from other threads as well."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers())

    def _buffers(self) -> list[Tensor]:
        """All buffers, without applying pending moves."""
        return [buffer for store in (self._keys, self._values) for buffer in store if buffer is not None]


def whole_chunks(slots: int, chunk: int = CHUNK) -> int:
    """``slots``, rounded up to a multiple of ``chunk``."""
    return -(-slots // chunk) * chunk


class HostCache(TreeCache):
    """A :class:`TreeCache` with buffers in host memory, for sequences longer than the device has room for.

    A forward copies one layer at a time to its device, as TriForce (Sun et al. 2024, https://arxiv.org/abs/2404.11912)
    does with the cache that it verifies on; the drafts in between read a small part that stays on the device.
    """

    def fresh(self) -> TreeCache:
        return HostCache(self.num_layers, self.max_slots)

    def _write(self, store: list[Tensor | None], new: Tensor, layer: int) -> Tensor:
        return super()._write(store, new.cpu(), layer).to(new.device)

    def _buffer(self, store: list[Tensor | None], like: Tensor, layer: int) -> Tensor:
        return super()._buffer(store, like.cpu(), layer)


def growing_cache() -> Cache:
    """An empty cache that every forward appends to and that gradients flow through; all layers keep everything."""
    return DynamicCache()
