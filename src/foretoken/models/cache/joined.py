"""Caches of several sequences joined for one forward.

Recurrent states and convolution windows are concatenated and split again afterwards.  Keys and values stay where they
are: an attention layer gets those of all sequences aligned at the end, with masked zeros in front of shorter ones.  A
sequence with fewer rows than others is padded at the end; the padding is dropped when its cache is handed back.  A
recurrence must ignore it (:mod:`foretoken.models.cache.delta_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from foretoken.models.base import CapabilityError


def join_key(cache: Any) -> Hashable:
    """Compatibility key: caches with the same key can be joined.  ``None`` for an empty cache, which cannot be
    joined."""
    if cache is None:
        return None
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    return tuple(
        tuple((i, state.shape) for i, state in layer.conv_states.items() if state is not None) for layer in linear
    )


class JoinedCache(Cache):
    """Cache for a forward of several sequences, ended by :meth:`hand_back`.

    Args:
        caches: caches of the sequences, all with the same :func:`join_key`.
        pads: number of padding rows at the end of each sequence.

    Attributes:
        lengths: tokens in the attention layers, per sequence; empty without such layers.
    """

    def __init__(self, caches: Sequence[Cache], pads: Sequence[int]) -> None:
        columns = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[_joined(column, pads) for column in columns])
        keys = [layer for layer in self.layers if isinstance(layer, _JoinedKeys)]
        self.lengths = [text_layer.get_seq_length() for text_layer in keys[0].text_layers] if keys else []

    def mask(self, rows: int) -> Tensor | None:
        """[sequences, slots + rows] ones where a slot holds a token; ``None`` if all do."""
        longest = max(self.lengths, default=0)
        if all(length == longest for length in self.lengths):
            return None
        mask = torch.ones(len(self.lengths), longest + rows, dtype=torch.long)
        for row, length in zip(mask, self.lengths, strict=True):
            row[: longest - length] = 0
        return mask

    @torch.inference_mode()
    def hand_back(self) -> None:
        """Return the states to their sequences and drop the padding."""
        for layer in self.layers:
            if isinstance(layer, _JoinedKeys | _JoinedStates):
                layer.hand_back()


def _joined(column: tuple[Any, ...], pads: Sequence[int]) -> Any:
    kind = type(column[0])
    if kind is DummyLayer:  # stores nothing
        return column[0]
    if kind not in JOINED:
        raise CapabilityError(f"cache layers of type {kind.__name__} of several sequences cannot be batched")
    return JOINED[kind](column, pads)


class _JoinedKeys(DynamicLayer):
    """Keys and values, stored in each sequence's own layer."""

    def __init__(self, layers: Sequence[Any], pads: Sequence[int]) -> None:
        super().__init__()
        self.text_layers, self.pads = layers, pads

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, H, slots, D] of everything read so far."""
        pairs = [
            layer.update(key_states[i : i + 1], value_states[i : i + 1]) for i, layer in enumerate(self.text_layers)
        ]
        longest = max(key.shape[-2] for key, _ in pairs)
        keys, values = (
            torch.cat([F.pad(part, (0, 0, longest - part.shape[-2], 0)) for part in side])
            for side in zip(*pairs, strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        """Length of the longest sequence."""
        return max(layer.get_seq_length() for layer in self.text_layers)

    def hand_back(self) -> None:
        for layer, pad in zip(self.text_layers, self.pads, strict=True):
            if pad:
                DynamicLayer.crop(layer, -pad)


class _JoinedStates(LinearAttentionLayer):
    """Convolution windows and recurrent states, concatenated."""

    def __init__(self, layers: Sequence[Any], pads: Sequence[int]) -> None:
        first = layers[0]
        super().__init__(number_of_states=first.number_of_states)
        self.text_layers, self.pads, self.device, self.dtype = layers, pads, first.device, first.dtype
        # A window of fixed size would keep the padding and lose the tokens before it.
        self.record_past = any(pads) or any(layer.record_past for layer in layers)
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, name, dict(getattr(first, name)))
        self.conv_kernel_size = dict(first.conv_kernel_size)
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(first, name).items():
                if state is not None:
                    getattr(self, name)[i] = torch.cat([getattr(layer, name)[i] for layer in layers])

    def hand_back(self) -> None:
        for name in ("conv_states", "recurrent_states"):
            for i, states in getattr(self, name).items():
                if states is None:
                    continue
                for layer, state, pad in zip(self.text_layers, states.split(1), self.pads, strict=True):
                    if name == "conv_states":
                        end = state.shape[-1] - pad
                        state = state[..., 0 if layer.record_past else end - self.conv_kernel_size[i] : end]
                    buffer = getattr(layer, name)[i]
                    if buffer.shape == state.shape:
                        buffer.copy_(state)
                    else:  # a window that keeps past inputs has grown
                        getattr(layer, name)[i] = state.clone()


class _JoinedBoth(_JoinedKeys, _JoinedStates):  # type: ignore[misc]  # as Transformers' own
    def __init__(self, layers: Sequence[Any], pads: Sequence[int]) -> None:
        DynamicLayer.__init__(self)
        _JoinedStates.__init__(self, layers, pads)

    def hand_back(self) -> None:
        _JoinedKeys.hand_back(self)
        _JoinedStates.hand_back(self)


JOINED: dict[type, Callable[[Sequence[Any], Sequence[int]], Any]] = {
    DynamicLayer: _JoinedKeys,
    LinearAttentionLayer: _JoinedStates,
    LinearAttentionAndFullAttentionLayer: _JoinedBoth,
}
"""Joined layer by type of the sequences' own layers."""
