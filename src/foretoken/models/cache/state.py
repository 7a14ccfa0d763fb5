"""Recurrent states, convolution windows and keys of one sequence, with a checkpoint.

:mod:`foretoken.models.cache.rectangle` lists the files that know Transformers' cache classes.  A recurrent state sums
up the whole text and is overwritten in place, so a checkpoint copies it, with the few past inputs of a convolution.
Keys and values of attention layers only grow, so they are cropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from foretoken.models.base import CapabilityError
from foretoken.models.cache.delta_rule import RecurrenceInputs, replay

NONE = -1


class StateCache:
    """The cache of one sequence.

    Attributes:
        cache: Transformers' cache, created by the model's first forward.
        length: number of tokens read.
        saved: value of ``length`` at the checkpoint; -1 without one.
        guarded: whether tokens read since the last commit can be dropped again.
        careful: whether tokens were dropped unexpectedly; from then on everything is guarded.
    """

    def __init__(self) -> None:
        self.cache: Any = None
        self.length = 0
        self.saved = NONE
        self.guarded = self.careful = False
        self._tape: list[list[RecurrenceInputs]] | None = None
        self._copies: dict[tuple[int, str, int], Tensor] = {}
        self._windows: dict[int, tuple[Tensor | None, Tensor | None, int]] = {}

    def advance(self, cache: Any, count: int) -> None:
        """Take the ``cache`` of a forward that has read ``count`` more tokens."""
        if not isinstance(cache, Cache):
            raise CapabilityError(f"a state of type {type(cache).__name__} cannot be saved")
        self.cache = cache
        self.length += count

    def reset(self) -> None:
        """Drop everything; the sequence must be read again."""
        self.cache, self.length, self.saved, self._tape = None, 0, NONE, None
        self.guarded = False
        self._windows.clear()

    @torch.inference_mode()
    def save(self) -> None:
        """Save a checkpoint of the present state, in the memory of the last one."""
        self.saved = NONE
        if self.cache is not None:
            for index, layer in enumerate(self.cache.layers):
                self._save_layer(index, layer)
        self.saved = self.length

    def _save_layer(self, index: int, layer: Any) -> None:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name, i, state in states_of(layer):
                self._copies[index, name, i] = copied(state, self._copies.get((index, name, i)))
        if isinstance(layer, DynamicSlidingWindowLayer):
            # Such a layer drops tokens outside its window but never writes in place, so a reference is as good as a
            # copy.
            self._windows[index] = (layer.keys, layer.values, layer.cumulative_length)
        elif not (isinstance(layer, LinearAttentionCacheLayerMixin) or hasattr(layer, "crop")):
            raise CapabilityError(f"a cache layer of type {type(layer).__name__} cannot be saved")

    # -- capture and replay --------------------------------------------------------------------------------------------

    @property
    def num_recurrent(self) -> int:
        return sum(any(name == "recurrent_states" for name, _, _ in states_of(layer)) for layer in self.cache.layers)

    def start_tape(self) -> None:
        """Start to keep past inputs of convolutions, and recurrence inputs with :meth:`record`."""
        if self.cache is not None and not self._windows:
            self._tape = []
            self._set_recording(True)

    @property
    def on_tape(self) -> bool:
        """Whether forwards since the checkpoint are recorded."""
        return self._tape is not None

    def record(self, records: list[RecurrenceInputs]) -> None:
        """Record the recurrence inputs of one forward."""
        if len(records) != self.num_recurrent:
            raise RuntimeError(f"{len(records)} reports of {self.num_recurrent} recurrent layers: use replay='lazy'")
        if self._tape is not None:
            self._tape.append(records)

    def _set_recording(self, on: bool) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.record_past = on

    @torch.inference_mode()
    def cut(self, length: int) -> None:
        """End the tape and keep the first ``length`` tokens; recurrent states are replayed from the checkpoint."""
        surplus, tape = self.length - length, self._tape or []
        number = 0
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.crop(layer, -surplus)
                for name, i, state in states_of(layer):
                    if surplus and name == "recurrent_states":
                        state.copy_(self._copies[index, name, i])
                        replay(state, [records[number] for records in tape], length - self.saved)
                        number += 1
            crop(layer, surplus)
        self._set_recording(False)
        self._tape, self.length = None, length

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def restore(self) -> None:
        """Return to the checkpoint and keep it.  Raise ``ValueError`` if there is none."""
        if self.saved == NONE:
            raise ValueError("there is no checkpoint to go back to")
        if self.saved == 0:
            self.reset()
            return
        if self._tape is not None:
            self._set_recording(False)
            self._tape = None
        surplus = self.length - self.saved
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for name, i, state in states_of(layer):
                    getattr(layer, name)[i] = copied(self._copies[index, name, i], state)
            if index in self._windows:
                layer.keys, layer.values, layer.cumulative_length = self._windows[index]
            else:
                crop(layer, surplus)
        self.length = self.saved


def states_of(layer: Any) -> Iterator[tuple[str, int, Tensor]]:
    """Attribute, index and tensor of every convolution window and recurrent state of a layer; empty for other
    layers."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(layer, name).items():
                if state is not None:
                    yield name, i, state


def tensors_of(cache: Any) -> Iterator[tuple[str, Tensor]]:
    """Kind and tensor of everything in a cache, layer by layer."""
    for layer in cache.layers:
        yield from ((name, state) for name, _, state in states_of(layer))
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                yield name, tensor


def copied(source: Tensor, into: Tensor | None) -> Tensor:
    """Copy ``source``, into the memory of ``into`` if it fits."""
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        return source.clone()
    return into.copy_(source)


def crop(layer: Any, count: int) -> None:
    """Drop the last ``count`` slots of a layer's keys and values, if any."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if isinstance(layer, DynamicLayer):  # a layer with both: its own crop would expect recorded inputs
            DynamicLayer.crop(layer, -count)
    else:
        layer.crop(-count)
