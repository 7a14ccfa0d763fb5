"""Products by bfloat16 weights in a kernel of our own (``native.cpp``), which the machine's C++ compiler makes once.

oneDNN multiplies one to eight rows at 50 to 75 % of the speed at which a thread can read memory, and small matrices at
less (``docs/log.md``).  The kernel reads at that speed, and a row's bits do not depend on how many rows there are.

The library lies in the user's cache folder under the hash of its source.  A machine without a compiler, or whose CPU
has other instructions, uses PyTorch's products (:func:`why_not` says why).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from foretoken.io.files import cache_folder, replacing

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("g++", "c++")
"""Tried in this order; the environment's ``CXX`` comes first."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-w")
COMPILING_S = 120
"""A compiler that takes longer is given up: it needs one second."""
WIDTH = 32
"""Outputs that are stored together, as in the source."""
ALIASED_BYTES, ALIASED_ROWS, SHIFT = 1024, 6, 32
"""More than this many rows that lie a multiple of so many bytes apart share few places of the nearest cache: they are
copied, each row this many numbers further."""


def why_not() -> str | None:
    """Why this machine has no such products, ``None`` where it has them."""
    found = _loaded()
    return found if isinstance(found, str) else None


def laid_out(weight: Tensor) -> Tensor:
    """A bfloat16 weight [out, in] as the kernel reads it, [ceil(out / 32), in / 2, 32, 2].

    Raises:
        ValueError: an odd number of inputs.
    """
    out, inner = weight.shape
    if inner % 2:
        raise ValueError(f"weights of an even number of inputs are multiplied in pairs, not of {inner}")
    blocks = -(-out // WIDTH)
    if out % WIDTH:
        weight = torch.cat((weight, weight.new_zeros(blocks * WIDTH - out, inner)))
    return weight.reshape(blocks, WIDTH, inner // 2, 2).transpose(1, 2).contiguous()


def in_rows(packed: Tensor, out: int) -> Tensor:
    """The weight [out, in] that :func:`laid_out` was given; a copy."""
    return packed.transpose(1, 2).reshape(len(packed) * WIDTH, -1)[:out].contiguous()


def product(x: Tensor, packed: Tensor, out: int, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """``x W^T (+ bias) (+ residual)`` [n, out], summed in float32 and rounded once.

    Args:
        x: [n, in], bfloat16 like all others.
        packed: the weight as :func:`laid_out` gives it.
        out: outputs of the weight.
        bias: [out].
        residual: [n, out].
    """
    rows, inner = x.shape
    if rows > ALIASED_ROWS and 2 * inner % ALIASED_BYTES == 0:
        x = torch.cat((x, x.new_empty(rows, SHIFT)), 1)
    elif x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    result = x.new_empty(rows, out)
    function = _loaded()
    assert not isinstance(function, str), function
    function(
        x.data_ptr(),
        rows,
        inner,
        x.stride(0),
        packed.data_ptr(),
        out,
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        result.data_ptr(),
    )
    return result


@cache
def _loaded() -> Callable[..., None] | str:
    """The compiled function, or why there is none."""
    lacking = _lacking()
    if lacking is not None:
        return lacking
    try:
        try:
            library = ctypes.CDLL(str(_library()))
        except OSError:  # damaged, or from another system that shares the folder
            library = ctypes.CDLL(str(_library(again=True)))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernel could not be compiled: {str(error).strip().splitlines()[-1]}"
    function = library.product
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, number, number, number, pointer, number, pointer, pointer, pointer]
    function.restype = None
    return function


def _lacking() -> str | None:
    """What of the kernel's conditions this machine does not meet."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "made for Linux on x86-64"
    if not _cpu_has("_is_avx512_bf16_supported"):
        return "the CPU has no AVX512-BF16"
    if _cpu_has("_is_amx_tile_supported"):
        return "not measured on CPUs with AMX, whose oneDNN products score 32 rows for the cost of one"
    if _compiler() is None:
        return f"no C++ compiler ({', '.join(COMPILERS)}, or what CXX names)"
    return None


def _cpu_has(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return bool(ask is not None and ask())


def _compiler() -> str | None:
    names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def _file() -> Path:
    """Where the library is kept: under the hash of what it is made from."""
    text = "\n".join([SOURCE.read_text(encoding="utf-8"), *FLAGS])
    return cache_folder() / f"native-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.so"


def _library(again: bool = False) -> Path:
    """The library, compiled where it is not there yet, or ``again``.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled or written.
    """
    file = _file()
    if file.exists() and not again:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _compiled(file)
    except OSError:  # the cache cannot be written: once for each process, then
        return _compiled(Path(tempfile.mkdtemp(prefix="foretoken-")) / file.name)


def _compiled(file: Path) -> Path:
    compiler = _compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory() as folder, replacing(file) as draft:
        objects = str(Path(folder) / "native.o")
        _run(compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", objects)
        # Linked without OpenMP's library: its symbols are those that PyTorch has loaded.
        _run(compiler, "-shared", objects, "-o", str(draft))
    return file


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILING_S)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr or error) from None
