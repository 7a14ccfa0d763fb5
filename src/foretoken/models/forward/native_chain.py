"""Chains of tokens after several sequences on the native forward.

A draft model's step is short, and the Python around it (masks, plans, addresses of every layer's keys) takes a quarter
of its time.  In a chain every node sees all slots up to its own, so almost all of that is constant and prepared once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.forward.native import NativeForward
from foretoken.models.forward.native_parts import BestTokens
from foretoken.models.native import forward as native_forward


@dataclass(frozen=True)
class Pick:
    """Selection of the tokens of chains (``LanguageModel.chains``).

    Attributes:
        choose: from the indices of feeds, the number of tokens chosen before, and one row per feed, returns one token
            each.
        states: whether rows are states [n, D] after the final norm; else logits [n, V].
    """

    choose: Callable[[Sequence[int], int, Tensor], Sequence[int]]
    states: bool = False


@dataclass(frozen=True)
class ChainEnd:
    """Location of a sequence's next node.

    Attributes:
        cache: the cache of its keys and values, with room for the whole chain.
        slot: slot of that node; it sees all slots before it.
        position: position of that node.
        steps: number of nodes to run.
    """

    cache: TreeCache
    row: int
    slot: int
    position: int
    steps: int


class NativeChains:
    """The steps of chains after several sequences."""

    def __init__(self, forward: NativeForward, ends: Sequence[ChainEnd]) -> None:
        self.forward, self.ends = forward, ends
        by_cache: dict[int, list[int]] = {}
        for i, end in enumerate(ends):
            by_cache.setdefault(id(end.cache), []).append(i)
        self.groups = [
            _Group(forward, ends, sorted(indices, key=lambda i: ends[i].row)) for indices in by_cache.values()
        ]
        self.order = [i for group in self.groups for i in group.indices]
        count, layers = max(end.steps for end in ends), len(forward.layers)
        first = torch.tensor([ends[i].position for i in self.order])
        positions = (torch.arange(count)[:, None] + first).flatten()
        self.turns = [
            [side.view(count, len(ends), -1) for side in forward.rotary[rope](positions)] for rope in forward.ropes
        ]
        self.taps, self.nothing = native_forward.pointers([None] * (layers + 1)), bytes(layers)

    def step(self, number: int, tokens: Sequence[int], states: bool) -> tuple[list[int], Tensor, BestTokens | None]:
        """Run the ``number``-th node of every sequence that has one.

        Args:
            number: step, from 0 on.
            tokens: the node's token per sequence; those of inactive sequences are ignored.
            states: whether to return the states after the final norm [n, D] instead of logits.

        Returns:
            the sequences in row order, their logits [n, V] or states, and the likeliest token of each.
        """
        active = [i for i in self.order if self.ends[i].steps > number]
        groups = native_forward.array(native_forward.GroupStruct, [group.at(number) for group in self.groups])
        x = self.forward.embedded(torch.tensor([tokens[i] for i in active])).contiguous()
        rows: Any = number if len(active) == len(self.order) else (number, [self.order.index(i) for i in active])
        turns = [[side[rows].contiguous() for side in sides] for sides in self.turns]
        cos, sin = (native_forward.pointers(tensors) for tensors in zip(*turns, strict=True))
        want = native_forward.numbers([] if states else range(len(active)))
        output = x.new_empty(len(active), x.shape[-1] if states else self.forward.num_outputs)
        best = None if states else BestTokens(len(active), 1, 1.0)
        call = native_forward.CallStruct(
            *(len(active), len(self.groups), ctypes.addressof(groups), x.data_ptr(), 0, len(self.nothing)),
            *(self.nothing, self.nothing, self.forward.num_kinds, turns[0][0].shape[-1]),
            *(ctypes.addressof(pointers) for pointers in (cos, sin, self.taps)),
            *(output.data_ptr() if states else None, len(want), ctypes.addressof(want), None),
            *(None if states else output.data_ptr(), None),
            native_forward.BestStruct() if best is None else best.struct,
        )
        native_forward.run(self.forward.model, call, torch.get_num_threads())
        return active, output, best


class _Group:
    """The sequences of one cache as a group for the library."""

    def __init__(self, forward: NativeForward, ends: Sequence[ChainEnd], indices: list[int]) -> None:
        self.indices, self.ends = indices, [ends[i] for i in indices]
        self.low, high = self.ends[0].row, self.ends[-1].row + 1
        cache = self.ends[0].cache
        cache.flush()
        self.used = max(end.slot + end.steps for end in self.ends)
        cache.reserve(high, self.used)
        self.slots = cache.num_slots
        self._buffers = cache.buffers(forward.like)
        self._pointers = [native_forward.pointers(tensors) for tensors in self._buffers]
        zeros = [0] * (high - self.low)
        self._starts, self._widths = native_forward.numbers(zeros), native_forward.numbers(zeros)
        self._masks = native_forward.pointers([None] * forward.num_kinds)

    def at(self, number: int) -> native_forward.GroupStruct:
        for end in self.ends:
            self._starts[end.row - self.low] = end.slot + number
            self._widths[end.row - self.low] = int(end.steps > number)
        first, second, *others = map(ctypes.addressof, (*self._pointers, self._starts, self._widths, self._masks))
        sizes = self.slots, self.used, self.low, len(self._starts), 1
        return native_forward.GroupStruct(first, second, *sizes, *others, 1)
