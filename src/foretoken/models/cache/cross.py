"""Cross-attention keys and values of an encoder's input, computed once per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from foretoken.models.cache.masks import unseen


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoder output for one input, as read by the decoder.

    Attributes:
        states: [n, D] hidden states of the encoder.
        layers: keys and values [1, H, n, d] of the cross-attention, per decoder layer.
    """

    states: Tensor
    layers: Sequence[tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        tensors = [self.states, *(tensor for pair in self.layers for tensor in pair)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, eq=False)
class Crossed:
    """Several inputs as one batch; shorter ones are padded at the end.

    Attributes:
        inputs: one per row; ``None`` for an inactive row.
        cache: keys and values of all layers, [b, H, n, d].
        length: n, the length of the longest input.
    """

    inputs: Sequence[Encoded | None]
    cache: Cache
    length: int

    def is_of(self, inputs: Sequence[Encoded | None]) -> bool:
        return len(inputs) == len(self.inputs) and all(a is b for a, b in zip(inputs, self.inputs, strict=True))

    @cached_property
    def mask(self) -> Tensor:
        """[b, 1, 1, n] additive mask that hides padding.  An inactive row attends to its padding."""
        like = next(encoded for encoded in self.inputs if encoded is not None).states
        mask = like.new_zeros(len(self.inputs), 1, 1, self.length)
        for row, encoded in enumerate(self.inputs):
            if encoded is not None:
                mask[row, :, :, len(encoded.states) :] = unseen(like.dtype)
        return mask


def crossed(inputs: Sequence[Encoded | None]) -> Crossed:
    """Batch inputs, one per row; at least one must not be ``None``."""
    present = [encoded for encoded in inputs if encoded is not None]
    length = max(len(encoded.states) for encoded in present)
    cache = DynamicCache()
    for layer in range(len(present[0].layers)):
        keys, values = (_filled(inputs, present[0], layer, which, length) for which in (0, 1))
        cache.update(keys, values, layer)
    return Crossed(list(inputs), cache, length)


def _filled(inputs: Sequence[Encoded | None], like: Encoded, layer: int, which: int, length: int) -> Tensor:
    """[b, H, length, d] keys or values of one layer."""
    if len(inputs) == 1:
        return like.layers[layer][which]
    _, heads, _, size = like.layers[layer][which].shape
    joined = like.states.new_zeros(len(inputs), heads, length, size)
    for row, encoded in enumerate(inputs):
        if encoded is not None:
            joined[row, :, : len(encoded.states)] = encoded.layers[layer][which][0]
    return joined


def with_crossed(decoder_cache: Cache, crossed_input: Crossed) -> EncoderDecoderCache:
    """The cache for a decoder's forward: its own keys and values, and those of the encoder's input."""
    return EncoderDecoderCache(decoder_cache, crossed_input.cache)


def reading_cache() -> EncoderDecoderCache:
    """An empty cache in which a decoder's forward stores the cross-attention keys and values."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def encoded(states: Tensor, cache: Any) -> Encoded:
    """The contents of that cache after the forward, with the encoder's hidden states [n, D]."""
    return Encoded(states, [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers])


def placeholder(crossed_input: Crossed, size: int) -> Tensor:
    """[b, n, size] stand-in for the encoder's hidden states, whose keys and values are cached; takes no memory."""
    like = next(encoded for encoded in crossed_input.inputs if encoded is not None).states
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(
        len(crossed_input.inputs), crossed_input.length, size
    )
