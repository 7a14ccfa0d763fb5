"""One forward of fixed shapes, a function of a single integer tensor.

The numbers of a round (token ids, positions, slots, the tree, and the moves of the last round's path) are written to a
host tensor and copied to the device in one transfer.  Masks are computed from them there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.cache.fixed import PATH, FixedCache
from foretoken.models.cache.masks import LayerMask, RowPlan, ancestor_matrix, unseen
from foretoken.models.cache.rectangle import Moves
from foretoken.models.network.call import Forward, NetworkCall

TREE = 128
"""Maximum scratch nodes per sequence, old and new, in the mask of a fixed step."""


@dataclass(frozen=True)
class Bucket:
    """Shape of a fixed step.

    Attributes:
        batch: number of cache rows, counted from the first.
        width: new nodes per row, padding included.
        slots: number of slots that attention sees.
        taps: names of the hidden states that it returns.
    """

    batch: int
    width: int
    slots: int
    taps: tuple[str, ...] = ()


class Numbers:
    """Inputs of a step by name: NumPy arrays on the host, one tensor on the device.

    ==================  ===========  ==================================================================
    ids, positions      [b, w]       of new nodes; padding has 0
    slots               [b, w]       where their keys and values go; padding goes to the spare slot
    tree                [b, w, T]    1 where the new node is the scratch node t or below it
    scratch_slots       [b, T]       where scratch nodes are; one behind the last visible slot for none
    scratch_positions   [b, T]       their positions
    seen, count         [b, 1]       committed tokens that new nodes see, and how many new nodes there are
    source, target      [b, P]       slots that are moved first; from the spare slot to itself for none
    ==================  ===========  ==================================================================

    Args:
        spare: the cache's spare slot.
        host: int32 memory [size_of(bucket)] on the host, pinned if that makes the copy faster.
    """

    def __init__(self, bucket: Bucket, spare: int, host: Tensor, device: torch.device) -> None:
        self.bucket, self.spare, self.host = bucket, spare, host
        self.on_device = torch.zeros(len(host), dtype=torch.int32, device=device)
        self.arrays: dict[str, NDArray[np.int32]] = {}
        start, flat = 0, host.numpy()
        for name, shape in _shapes(bucket).items():
            self.arrays[name] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        self.fill({}, {}, {})

    def fill(self, rows: Mapping[int, RowPlan], tokens: Mapping[int, Sequence[int]], moves: Moves) -> None:
        """Write and send a round's numbers; rows that are not listed are inactive."""
        put = self.arrays
        self.host.zero_()
        for name in ("slots", "source", "target"):
            put[name].fill(self.spare)
        put["scratch_slots"].fill(self.bucket.slots)
        for i, row in rows.items():
            first, nodes, new = row.committed, len(row.parents), row.new
            depths = np.asarray(row.depths, dtype=np.int32) + row.first_position
            put["ids"][i, :new] = tokens[i]
            put["positions"][i, :new] = depths[nodes - new :]
            put["slots"][i, :new] = np.arange(first + nodes - new, first + nodes)
            put["scratch_slots"][i, :nodes] = np.arange(first, first + nodes)
            put["scratch_positions"][i, :nodes] = depths
            chain = row.is_chain
            below = np.tri(new, nodes, nodes - new) if chain else ancestor_matrix(row.parents)[nodes - new :]
            put["tree"][i, :new, :nodes] = below
            put["seen"][i], put["count"][i] = row.num_seen, new
        for i, pairs in moves.items():
            for column, (source, target) in enumerate(pairs):
                put["source"][i, column], put["target"][i, column] = source, target
        self.on_device.copy_(self.host, non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """Views of the device tensor by name, as int64."""
        shapes = _shapes(self.bucket)
        parts = self.on_device.long().split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def size_of(bucket: Bucket) -> int:
    """Number of integers that a step of this shape reads."""
    return sum(map(math.prod, _shapes(bucket).values()))


def _shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    b, w = bucket.batch, bucket.width
    return {
        "ids": (b, w),
        "positions": (b, w),
        "slots": (b, w),
        "tree": (b, w, TREE),
        "scratch_slots": (b, TREE),
        "scratch_positions": (b, TREE),
        "seen": (b, 1),
        "count": (b, 1),
        "source": (b, PATH),
        "target": (b, PATH),
    }


def fixed_mask(numbers: Mapping[str, Tensor], layer: LayerMask, slots: int, dtype: torch.dtype) -> Tensor:
    """[b, 1, w, slots] additive mask of one layer type, equal to :func:`foretoken.models.cache.masks.additive_mask`.

    Padding sees slot 0, so that no row is fully masked.
    """
    positions, tree = numbers["positions"], numbers["tree"]
    (b, w), device = positions.shape, positions.device
    keys = torch.arange(slots + 1, device=device)  # one extra column for entries without a scratch node
    scratch_slots = numbers["scratch_slots"]
    allowed = (keys < numbers["seen"])[:, None].repeat(1, w, 1)
    allowed.scatter_(2, scratch_slots[:, None].expand(b, w, TREE), tree > 0)
    if layer.kind != "full":
        at = keys.repeat(b, 1).scatter_(1, scratch_slots, numbers["scratch_positions"])[:, None]
        query = positions[:, :, None]
        allowed &= query - at < layer.size if layer.kind == "sliding" else query // layer.size == at // layer.size
    padding = torch.arange(w, device=device) >= numbers["count"]
    allowed[:, :, 0] |= padding
    allowed = allowed[:, None, :, :slots]
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(allowed.logical_not(), unseen(dtype))


class OutputMemory:
    """Output memory shared by all steps of a model; results must be copied out before the next step.

    With separate memory, every graph would hold its own logits, the largest tensors of a small batch.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of the given shape, with the dtype of ``like``, in the memory called ``name``.

        If that memory is too small, a larger one replaces it.  Steps captured earlier keep theirs, so the largest step
        should come first.
        """
        size = math.prod(shape)
        buffer = self._by_name.get(name)
        if buffer is None or buffer.dtype != like.dtype or buffer.numel() < size:
            buffer = self._by_name[name] = like.new_empty(size)
        return buffer[:size].view(*shape)


class FixedStep:
    """Program of one bucket, with its input and output tensors."""

    def __init__(
        self, forwards: Forward, cache: FixedCache, bucket: Bucket, host: Tensor, outputs: OutputMemory
    ) -> None:
        self.forwards, self.cache, self.bucket, self.outputs = forwards, cache, bucket, outputs
        self.numbers = Numbers(bucket, cache.spare, host, forwards.device)
        self.run: Any = self.program

    def program(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Apply the moves of the last path and run the network; logits [b, w, V] and taps [b, w, D], in ``outputs``.

        It depends only on the numbers, the cache and the weights, and never waits for the device.
        """
        forwards, bucket, numbers = self.forwards, self.bucket, self.numbers.tensors()
        rows = torch.arange(bucket.batch, device=forwards.device)[:, None]
        self.cache.move(rows, numbers["source"], numbers["target"])
        masks: dict[str, Tensor | None] = {
            name: fixed_mask(numbers, layer, bucket.slots, forwards.run_dtype)
            for name, layer in forwards.layer_masks.items()
        }
        scored = [(row, 0, bucket.width) for row in range(bucket.batch)]
        with self.cache.fixed(numbers["slots"], bucket.slots):
            call = NetworkCall(self.cache, numbers["ids"], numbers["positions"], masks, scored, bucket.taps)
            logits, taps = forwards.run_all([call])[0]
        rows = self.outputs.buffer("logits", logits[0], (bucket.batch, *logits[0].shape))
        torch.stack(logits, out=rows)
        return rows, {name: self.outputs.buffer(name, state, state.shape).copy_(state) for name, state in taps.items()}
