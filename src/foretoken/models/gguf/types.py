"""GGUF's quantised types, unpacked into integers and scales.

A quantised row consists of blocks of 32 or 256 numbers.  A number is ``(value - middle) * scale + zero``, with one
scale, and in some types one zero, per group of 16 or 32: a float16 number, or the block's float16 number times an
integer.  Integers, scales and zeros are the file's own, and the arithmetic is that of ``gguf.dequantize``, so the
numbers are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """Unpacked blocks [n, b].

    Attributes:
        values: [n, b] uint8, or int8 if signed.
        scale: [n, k] float16, one per group, or one that ``steps`` multiply.
        zero: the same for zeros; ``None``: no zeros.
        steps: [n, b / group] int8 factors of the scale; ``None``: none.
        zero_steps: the same for zeros.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    steps: Tensor | None = None
    zero_steps: Tensor | None = None


@dataclass(frozen=True)
class QuantisedType:
    """A quantised type.

    Attributes:
        parts: unpacks blocks [n, bytes].
        bits: bits per stored value, 4 or 8.
        group: numbers that share a scale.
        middle: offset subtracted from a value.
    """

    parts: Callable[[Tensor], Parts]
    bits: int
    group: int
    middle: int = 0


def _half(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Float16 numbers [n, k] of bytes [n, start:stop]."""
    return blocks[:, start:stop].contiguous().view(torch.float16)


def _split(bytes_: Tensor, count: int, bits: int, width: int) -> Tensor:
    """Values [n, k, count, width]: for every ``width`` bytes of [n, k * width], first their lowest ``bits``, then the
    next."""
    # Four bytes at a time.  A part of a single block counts as contiguous although it does not start on four bytes.
    aligned = bytes_.clone(memory_format=torch.contiguous_format)
    words = aligned.view(torch.int32).unflatten(1, (-1, width // 4))
    values = words.new_empty(*words.shape[:2], count, width // 4)
    for index in range(count):
        torch.bitwise_right_shift(words, index * bits, out=values[:, :, index])
    return values.bitwise_and_((2**bits - 1) * 0x01010101).view(torch.uint8)


def _above(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Values [n, b] from their low and high bits."""
    return (low.view(torch.int32) | high.view(torch.int32) << bits).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_split(blocks[:, 2:], 2, 4, 16).flatten(1), _half(blocks, 0, 2))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_split(blocks[:, 4:], 2, 4, 16).flatten(1), _half(blocks, 0, 2), _half(blocks, 2, 4))


def _fifth(bytes_: Tensor) -> Tensor:
    """Fifth bits [n, 32] of 32 values, from four bytes."""
    eights = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64)  # [256, 1]
    return eights[bytes_.int()].view(torch.uint8).flatten(1)


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_above(_split(blocks[:, 6:], 2, 4, 16).flatten(1), _fifth(blocks[:, 2:6]), 4), _half(blocks, 0, 2))


def _q5_1(blocks: Tensor) -> Parts:
    values = _above(_split(blocks[:, 8:], 2, 4, 16).flatten(1), _fifth(blocks[:, 4:8]), 4)
    return Parts(values, _half(blocks, 0, 2), _half(blocks, 2, 4))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:].view(torch.int8), _half(blocks, 0, 2))


def _iq4_nl(blocks: Tensor) -> Parts:
    # The scaled numbers of the 16 values (llama.cpp, kvalues_iq4nl).
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    table = torch.tensor(values, dtype=torch.int8)
    return Parts(table[_split(blocks[:, 2:], 2, 4, 16).flatten(1).int()], _half(blocks, 0, 2))


def _sixes(bytes_: Tensor) -> tuple[Tensor, Tensor]:
    """6-bit scales and minima [n, 8] from twelve bytes: four of each in the low bits of the first eight bytes, the
    others in the halves of the last four bytes and the remaining two bits of the first eight."""
    first, second, last = bytes_.unflatten(1, (3, 4)).unbind(1)
    scale = torch.cat([first & 63, (last & 15) | ((first >> 2) & 48)], 1)
    least = torch.cat([second & 63, (last >> 4) | ((second >> 2) & 48)], 1)
    return scale, least


def _stepped(values: Tensor, blocks: Tensor) -> Parts:
    """Q4_K and Q5_K, with unpacked values."""
    scale, least = _sixes(blocks[:, 4:16])
    return Parts(values, _half(blocks, 0, 2), -_half(blocks, 2, 4), scale.to(torch.int8), least.to(torch.int8))


def _q4_k(blocks: Tensor) -> Parts:
    return _stepped(_split(blocks[:, 16:], 2, 4, 32).flatten(1), blocks)


def _q5_k(blocks: Tensor) -> Parts:
    low = _split(blocks[:, 48:], 2, 4, 32).flatten(1)
    high = _split(blocks[:, 16:48], 8, 1, 32).flatten(1)
    return _stepped(_above(low, high, 4), blocks)


def _q6_k(blocks: Tensor) -> Parts:
    low = _split(blocks[:, :128], 2, 4, 64).flatten(1)
    high = _split(blocks[:, 128:192], 4, 2, 32).flatten(1)
    return Parts(_above(low, high, 4), _half(blocks, 208, 210), steps=blocks[:, 192:208].view(torch.int8))


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    values = _split(blocks[:, 16:80], 4, 2, 32).flatten(1)
    steps, least = (scales & 15).to(torch.int8), (scales >> 4).to(torch.int8)
    return Parts(values, _half(blocks, 80, 82), -_half(blocks, 82, 84), steps, least)


def _q3_k(blocks: Tensor) -> Parts:
    low = _split(blocks[:, 32:96], 4, 2, 32).flatten(1)
    high = _split(blocks[:, :32], 8, 1, 32).flatten(1)  # four is subtracted where it is not set
    packed = blocks[:, 96:108]
    scales = _split(packed[:, :8], 2, 4, 8).flatten(1) | _split(packed[:, 8:], 4, 2, 4).flatten(1) << 4
    return Parts(_above(low, high, 2), _half(blocks, 108, 110), steps=scales.to(torch.int8) - 32)


KINDS: dict[str, QuantisedType] = {
    "Q4_0": QuantisedType(_q4_0, 4, 32, 8),
    "Q4_1": QuantisedType(_q4_1, 4, 32),
    "Q5_0": QuantisedType(_q5_0, 8, 32, 16),
    "Q5_1": QuantisedType(_q5_1, 8, 32),
    "Q8_0": QuantisedType(_q8_0, 8, 32),
    "Q2_K": QuantisedType(_q2_k, 4, 16),
    "Q3_K": QuantisedType(_q3_k, 4, 16, 4),
    "Q4_K": QuantisedType(_q4_k, 4, 32),
    "Q5_K": QuantisedType(_q5_k, 8, 32),
    "Q6_K": QuantisedType(_q6_k, 8, 16, 32),
    "IQ4_NL": QuantisedType(_iq4_nl, 8, 32),
}
"""Quantised types by name."""
PLAIN: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Unquantised types by name."""
