"""GGUF file reader: the header as dictionaries, the tensors memory-mapped.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Type sizes come from the ``gguf``
package.  That package's own reader creates several objects per array entry, which takes six seconds for a vocabulary of
150,000 tokens, and does not notice truncated files.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.io.checkpoints import GGUF_MAGIC, gguf_fault
from foretoken.core.io.hub_ids import expanded

VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``struct`` formats of the value types; 8 is a string and 9 an array."""
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
PART = re.compile(r"(.*-)(\d{5})(-of-\d{5}\.gguf)")
"""File name of one part of a split model."""


class GgufError(ValueError):
    """A GGUF file cannot be used; the message says what to do, in one line whatever names the file contains."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in message))


class UncoveredError(GgufError):
    """A valid file that only llama.cpp runs; the message omits what to do."""


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor.

    Attributes:
        kind: type name in the format (``"Q4_K"``).
        shape: rows first, as in PyTorch.
        data: bytes [..., bytes per row], memory-mapped.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class GgufFile:
    """One file, or all files of a split model.

    Attributes:
        metadata: header values by key.
        tensors: tensors by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """A header value under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """The same for a required value.  Raises ``GgufError`` if it is missing."""
        value = self.get(key)
        if value is None:
            raise GgufError(f"{self.path} lacks {self.architecture}.{key}: it is incomplete, convert the model again")
        return value


def read_gguf(path: str | Path, *, header_only: bool = False) -> GgufFile:
    """Read a file; ``path`` is the first part of a split model.

    Args:
        header_only: skip the tensors (``tensors`` is then empty).

    Raises:
        GgufError: the file is missing, truncated, damaged or not in GGUF, or a part is missing.
        UncoveredError: a tensor type is unsupported.
    """
    path = expanded(path)
    reader = _GgufReader(path)
    metadata = reader.metadata()
    if header_only:
        return GgufFile(path, metadata, {})
    tensors = reader.tensors(metadata)
    parts = reader.whole(metadata, "split.count", 1)
    for number in range(2, parts + 1):
        name = PART.fullmatch(path.name)
        if name is None or int(name[2]) != 1:
            raise GgufError(f"{path} is one of {parts} parts: give the first, ...-00001-of-....gguf")
        tensors.update(_read_shard(path.with_name(f"{name[1]}{number:05}{name[3]}"), number, parts, tensors))
    total = reader.whole(metadata, "split.tensors.count", len(tensors))
    if parts > 1 and total != len(tensors):
        raise GgufError(f"{path} and its parts have {len(tensors)} tensors of {total}: copy all {parts} parts again")
    return GgufFile(path, metadata, tensors)


def _read_shard(path: Path, number: int, parts: int, earlier: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    reader = _GgufReader(path)
    metadata = reader.metadata()
    header = reader.whole(metadata, "split.no", number - 1) + 1, reader.whole(metadata, "split.count", 1)
    tensors = reader.tensors(metadata)
    twice = sorted(tensors.keys() & earlier.keys())
    if header != (number, parts) or twice:
        reason = (
            f"{twice[0]} is in another part too" if twice else f"it says that it is part {header[0]} of {header[1]}"
        )
        raise GgufError(f"{path} is not part {number} of {parts} ({reason}): copy all {parts} parts again")
    return tensors


class _GgufReader:
    """Sequential reader of one file."""

    def __init__(self, path: Path) -> None:
        fault = gguf_fault(path)
        if fault is not None:
            raise GgufError(fault)
        self.path, self.offset = path, len(GGUF_MAGIC)
        with path.open("rb") as opened:
            # A private mapping: nothing writes to it, but PyTorch warns about read-only memory.
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            reason = (
                "it was written for another byte order" if swapped else f"versions 2 and 3 are supported, not {version}"
            )
            raise GgufError(f"{path} cannot be read: {reason}; convert the model again")
        self.num_tensors, self.num_values = self._number("Q"), self._number("Q")

    def metadata(self) -> dict[str, Any]:
        values = {}
        for _ in range(self.num_values):
            key = self._string()
            values[key] = self._value(self._number("I"))
        return values

    def tensors(self, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """The tensors after the header values."""
        entries = [self._entry() for _ in range(self.num_tensors)]
        alignment = self.whole(metadata, "general.alignment", 32) or 32
        if alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment}, not a power of two")
        start = self.offset + -self.offset % alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self._damaged(f"two tensors are called {name}")
            if offset % alignment:
                raise self._damaged(f"{name} is at {offset}, not a multiple of {alignment}")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        return tensors

    def whole(self, metadata: Mapping[str, Any], key: str, usual: int) -> int:
        """A nonnegative integer of the header."""
        number = metadata.get(key, usual)
        if not isinstance(number, int) or number < 0:
            raise self._damaged(f"{key} is {str(number)[:20]!r}")
        return number

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number("I")
        if len(name) > 64:  # GGML_MAX_NAME
            raise self._damaged(f"the name of a tensor has {len(name)} characters")
        if dimensions > 4:  # GGML_MAX_DIMS
            raise self._damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        kind, block, size = _block_of(number)
        if not kind:
            raise UncoveredError(f"{name} in {self.path} is of type {number}, which is unknown")
        width = shape[-1] if shape else 1
        if width % block:
            raise self._damaged(
                f"{name} has rows of {width} numbers, not a multiple of the block size {block} of {kind}"
            )
        in_bytes = (*shape[:-1], width // block * size)
        if max(in_bytes) > len(self.bytes):  # also if another dimension is 0
            raise self._cut_off(offset + max(in_bytes))
        count = math.prod(in_bytes)
        if offset + count > len(self.bytes):
            raise self._cut_off(offset + count)
        data = torch.empty(0, dtype=torch.uint8)
        if count:
            data = torch.frombuffer(self.bytes, dtype=torch.uint8, count=count, offset=offset)
        return GgufTensor(name, kind, shape, data.view(in_bytes))

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._damaged(f"a value is of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in SCALARS:
            size = struct.calcsize(f"<{SCALARS[inner]}")
            return list(struct.unpack(f"<{count}{SCALARS[inner]}", self._next_bytes(count * size)))
        if inner != STRING:  # the format allows arrays of arrays, but no key has them
            raise self._damaged(f"values of an array are of type {inner}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """A list of strings, in a loop that creates no other objects (vocabularies are large)."""
        strings, offset, size = [], self.offset, len(self.bytes)
        for _ in range(count):
            start = offset + LENGTH.size
            if start > size:
                raise self._cut_off(start)
            offset = start + LENGTH.unpack_from(self.bytes, start - LENGTH.size)[0]
            if offset > size:
                raise self._cut_off(offset)
            strings.append(self.bytes[start:offset].decode(errors="replace"))
        self.offset = offset
        return strings

    def _string(self) -> str:
        return self._next_bytes(self._number("Q")).decode(errors="replace")

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._next_bytes(struct.calcsize(f"<{kind}")))[0]

    def _next_bytes(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self.bytes):
            raise self._cut_off(end)
        piece = self.bytes[self.offset : end]
        self.offset = end
        return piece

    def _cut_off(self, end: int) -> GgufError:
        return self._damaged(f"it has {len(self.bytes)} bytes, and its tensors end at byte {end}")

    def _damaged(self, reason: str) -> GgufError:
        return GgufError(f"{self.path} is cut off or damaged ({reason}): copy it again")


@cache
def _block_of(number: int) -> tuple[str, int, int]:
    """Name of a tensor type, and numbers and bytes per block; the name is empty if the package does not know the
    type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return "", 1, 1
    block, size = GGML_QUANT_SIZES[kind]
    return kind.name, int(block), int(size)
