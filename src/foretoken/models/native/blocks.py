"""The structures that ``blocks.cpp`` reads: residual blocks as data, and one call of them.  Field by field as there."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_long, c_void_p

from foretoken.models.native.forward import BestStruct, ProductStruct
from foretoken.models.native.library import function


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
    """States of some rows, and where what is made of them goes."""

    _fields_ = (("rows", c_long), *((name, c_void_p) for name in ("x", "states", "logits")), ("best", BestStruct))


def run(blocks: BlocksStruct, call: BlocksCallStruct, threads: int) -> None:
    """Run the blocks.

    Raises:
        MemoryError: too little memory for what they keep in between.
    """
    failed = c_long(0)
    compute = function("blocks", "ppnp")
    compute(ctypes.addressof(blocks), ctypes.addressof(call), threads, ctypes.addressof(failed))
    if failed.value:
        raise MemoryError(f"too little memory for heads on {call.rows} rows: draft for fewer requests at once")
