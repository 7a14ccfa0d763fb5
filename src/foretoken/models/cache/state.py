"""Recurrent states, convolution windows and keys of one sequence, with a checkpoint to go back to.

Beside :mod:`foretoken.models.cache.rectangle` the only file that knows Transformers' cache API.  A recurrent state sums
up the whole text and is overwritten in place, so a checkpoint copies it (and the few inputs that a convolution looks
back on); keys and values of attention layers only grow, so that going back drops their end.
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
        cache: Transformers' cache; the model's first forward makes it.
        length: tokens that it has read.
        saved: tokens that it had read at the checkpoint; -1 without one.
        guarded: whether what was read since the last commit can be dropped again.
        careful: whether tokens were dropped that nobody expected to be: from then on everything is guarded.
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
        """A forward has read ``count`` more tokens and handed out ``cache``."""
        if not isinstance(cache, Cache):
            raise CapabilityError(f"a state of type {type(cache).__name__} cannot be saved")
        self.cache = cache
        self.length += count

    def reset(self) -> None:
        """Forget everything: the text must be read again."""
        self.cache, self.length, self.saved, self._tape = None, 0, NONE, None
        self.guarded = False
        self._windows.clear()

    @torch.inference_mode()
    def save(self) -> None:
        """Make a checkpoint of the present state, in the memory of the last one."""
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
            # Such a layer forgets what leaves its window; it never writes in place, so that a reference is a copy.
            self._windows[index] = (layer.keys, layer.values, layer.cumulative_length)
        elif not (isinstance(layer, LinearAttentionCacheLayerMixin) or hasattr(layer, "crop")):
            raise CapabilityError(f"a cache layer of type {type(layer).__name__} cannot be saved")

    # -- capture and replay --------------------------------------------------------------------------------------------

    @property
    def num_recurrent(self) -> int:
        return sum(any(name == "recurrent_states" for name, _, _ in states_of(layer)) for layer in self.cache.layers)

    def start_tape(self) -> None:
        """From now on convolutions keep their past inputs, and :meth:`record` what the recurrences are fed."""
        if self.cache is not None and not self._windows:
            self._tape = []
            self._set_recording(True)

    @property
    def on_tape(self) -> bool:
        """Whether forwards since the checkpoint are recorded."""
        return self._tape is not None

    def record(self, windows: list[RecurrenceInputs]) -> None:
        """What the recurrent layers were fed in a forward."""
        if len(windows) != self.num_recurrent:
            raise RuntimeError(f"{len(windows)} reports of {self.num_recurrent} recurrent layers: use replay='lazy'")
        if self._tape is not None:
            self._tape.append(windows)

    def _set_recording(self, on: bool) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.record_past = on

    @torch.inference_mode()
    def cut(self, length: int) -> None:
        """End the tape and keep the first ``length`` tokens; recurrent states are made from the checkpoint's."""
        surplus, tape = self.length - length, self._tape or []
        number = 0
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.crop(layer, -surplus)
                for name, i, state in states_of(layer):
                    if surplus and name == "recurrent_states":
                        state.copy_(self._copies[index, name, i])
                        replay(state, [windows[number] for windows in tape], length - self.saved)
                        number += 1
            crop(layer, surplus)
        self._set_recording(False)
        self._tape, self.length = None, length

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def restore(self) -> None:
        """Go back to the checkpoint, which stays.  Raises ``ValueError`` where there is none."""
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
    """Attribute, number and tensor of every convolution window and recurrent state of a layer; none elsewhere."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(layer, name).items():
                if state is not None:
                    yield name, i, state


def tensors_of(cache: Any) -> Iterator[tuple[str, Tensor]]:
    """Kind and tensor of everything that a cache holds, layer by layer."""
    for layer in cache.layers:
        yield from ((name, state) for name, _, state in states_of(layer))
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if tensor is not None:
                yield name, tensor


def copied(source: Tensor, into: Tensor | None) -> Tensor:
    """A copy of ``source``, in the memory of ``into`` where it fits."""
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        return source.clone()
    return into.copy_(source)


def crop(layer: Any, count: int) -> None:
    """Drop the last ``count`` slots of a layer's keys and values, if it has any."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if isinstance(layer, DynamicLayer):  # a layer with both: its own crop would look for recorded inputs
            DynamicLayer.crop(layer, -count)
    else:
        layer.crop(-count)
