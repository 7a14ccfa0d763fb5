"""The structures read by ``forward.cpp`` and ``blocks.cpp``, field by field as there, and the calls of both."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import Structure, c_char_p, c_double, c_long, c_void_p
from typing import Any

from torch import Tensor

from foretoken.models.native.library import function

SILU, GELU_TANH = range(2)
"""Activations of a gated MLP."""


class ProductStruct(Structure):
    """Linear layers with a common input, and possibly a low-rank update."""

    _fields_ = (("parts", c_void_p), ("count", c_long), ("update", c_void_p))


class UpdateStruct(Structure):
    """A change of a product for some rows of a call: ``second (first x)``."""

    _fields_ = (("first", ProductStruct), ("second", ProductStruct))


class NormStruct(Structure):
    """An RMS norm, or none if the weight is null."""

    _fields_ = (("weight", c_void_p), ("eps", c_double))


class ConvolutionStruct(Structure):
    """A convolution around a sublayer, or none if the kernels have no parts."""

    _fields_ = (("kernels", ProductStruct), ("base", c_void_p), ("taps", c_long), ("group", c_long))


class LayerStruct(Structure):
    """A decoder layer; without the product ``out`` it only stores keys and values."""

    _fields_ = (
        *(
            (name, NormStruct)
            for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")
        ),
        *((name, ProductStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_double) for name in ("scaling", "added")),
        *((name, c_long) for name in ("mask", "turn", "norms_all", "activation")),
        *((name, ConvolutionStruct) for name in ("around_attention", "around_mlp")),
    )


ALONE, JOINED, WIDE = range(3)
"""First operation of a drafter's head that reads an embedding with every state; as in the source."""


class ModelStruct(Structure):
    """A stack of layers with last norm and head (possibly without parts), and a drafter head's first operation."""

    _fields_ = (
        ("layers", c_void_p),
        *((name, c_long) for name in ("count", "width", "heads", "kv_heads", "dim")),
        ("last", NormStruct),
        ("head", ProductStruct),
        ("begins", c_long),
        ("of_beside", NormStruct),
        ("of_state", NormStruct),
        ("entry", ProductStruct),
    )


class GroupStruct(Structure):
    """Rows that share a cache."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_long) for name in ("slots", "used", "first", "sequences", "width")),
        *((name, c_void_p) for name in ("starts", "widths", "masks")),
        ("upto", c_long),
    )


class BestStruct(Structure):
    """The likeliest tokens of rows of logits: their number, the scale of the logits, and the output addresses."""

    _fields_ = (("count", c_long), ("scale", c_double), ("values", c_void_p), ("places", c_void_p))


class CallStruct(Structure):
    """One forward."""

    _fields_ = (
        *((name, c_long) for name in ("rows", "groups")),
        *((name, c_void_p) for name in ("group", "x")),
        *((name, c_long) for name in ("start", "stop")),
        *((name, c_char_p) for name in ("skip_attention", "skip_mlp")),
        *((name, c_long) for name in ("kinds", "turned")),
        *((name, c_void_p) for name in ("cos", "sin", "taps", "last")),
        ("wanted", c_long),
        *((name, c_void_p) for name in ("want", "normed", "logits", "beside")),
        ("best", BestStruct),
        ("updated", c_char_p),
    )


def pointers(tensors: Iterable[Tensor | None]) -> Any:
    """An array of tensor addresses, null for ``None``; it keeps the tensors alive."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (c_void_p * len(addresses))(*addresses)


def numbers(values: Sequence[int]) -> Any:
    return (c_long * len(values))(*values)


def array(kind: type[Any], items: Sequence[Any]) -> Any:
    return (kind * len(items))(*items)


def run(model: ModelStruct, call: CallStruct, threads: int) -> None:
    """Run a forward.  Raises ``MemoryError`` if its intermediate results do not fit."""
    if _fails("forward", model, call, threads):
        raise MemoryError(f"too little memory for a forward of {call.rows} rows: feed fewer tokens at once")


def _fails(name: str, described: Structure, call: Structure, threads: int) -> bool:
    failed = c_long(0)
    function(name, "ppnp")(ctypes.addressof(described), ctypes.addressof(call), threads, ctypes.addressof(failed))
    return bool(failed.value)


class BlocksStruct(Structure):
    """K heads of residual blocks with their projections."""

    _fields_ = (
        *((name, c_long) for name in ("heads", "width", "residual")),
        ("first", ProductStruct),
        ("rest", c_void_p),
        ("depth", c_long),
        ("projections", c_void_p),
        ("shared", c_long),
    )


class BlocksCallStruct(Structure):
    """States of some rows, and the addresses of their results."""

    _fields_ = (("rows", c_long), *((name, c_void_p) for name in ("x", "states", "logits")), ("best", BestStruct))


def run_blocks(blocks: BlocksStruct, call: BlocksCallStruct, threads: int) -> None:
    """Run the blocks.  Raises ``MemoryError`` if their intermediate results do not fit."""
    if _fails("blocks", blocks, call, threads):
        raise MemoryError(f"too little memory for heads on {call.rows} rows: draft for fewer requests at once")
