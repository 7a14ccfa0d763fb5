"""The library of our own kernels, which the machine's C++ compiler makes once from the sources beside this file.

It lies in the user's cache folder under the hash of its sources, compiled for the highest of :data:`LEVELS` that the
CPU has, or that the environment variable ``FORETOKEN_CPU`` allows.  A machine without a compiler, or whose CPU has
other instructions, uses PyTorch's products (:func:`why_not` says why).
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
from typing import Any

import torch
from torch import Tensor

from foretoken.io.files import cache_folder, replacing

SOURCES = [
    Path(__file__).with_name(f"{name}.cpp") for name in ("attention", "bfloat16", "integers", "integers8", "forward")
]
HEADERS = [
    Path(__file__).with_name(f"{name}.h")
    for name in ("lanes", "amx", "integers8", "integers8_amx", "linear", "attention", "stages")
]
COMPILERS = ("g++", "c++")
"""Tried in this order; the environment's ``CXX`` comes first."""
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-w")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
LEVELS = {
    "avx2": AVX2,
    "avx2-vnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512-vnni": (*AVX512, "-mavx512vnni"),
    "avx512-bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Instruction sets that kernels are written for, from the least to the most, and what the compiler is told of them."""
SWITCH = "FORETOKEN_CPU"
ALLOWED = {
    "avx2": ("avx2", "avx2-vnni"),
    "avx512": ("avx512", "avx512-vnni"),
    "native": tuple(LEVELS),
}
"""Levels that a value of the environment variable leaves."""
KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_long, "d": ctypes.c_double}
"""Arguments of functions: a pointer, a whole number, a number."""
COMPILING_S = 120
"""A compiler that takes longer is given up: it needs one second."""


def why_not() -> str | None:
    """Why this machine has no kernels of our own, ``None`` where it has them.

    Raises:
        ValueError: ``FORETOKEN_CPU`` is none of its values, or asks for what the CPU lacks.
    """
    found = _loaded()
    return found if isinstance(found, str) else None


def level() -> str | None:
    """The highest of :data:`LEVELS` that the CPU has and ``FORETOKEN_CPU`` allows; ``None`` where it has none.

    Raises:
        ValueError: ``FORETOKEN_CPU`` is none of its values, or asks for what the CPU lacks.
    """
    asked = os.environ.get(SWITCH, "native")
    if asked not in ALLOWED:
        raise ValueError(f"{SWITCH} must be one of {', '.join(ALLOWED)}, not {asked!r}")
    found = _cpu_level(ALLOWED[asked])
    if found is None and asked != "native":
        raise ValueError(f"{SWITCH}={asked}, and this CPU has no {asked.upper()}: leave it out")
    return found


def _cpu_level(allowed: tuple[str, ...]) -> str | None:
    """The highest of some levels that the CPU has."""
    vnni = _cpu_has("_is_vnni_supported")
    wide = _cpu_has("_is_avx512_supported")
    has = {
        "avx2": _cpu_has("_is_avx2_supported"),
        "avx2-vnni": _cpu_has("_is_avx2_supported") and "avx_vnni" in _cpu_flags(),
        "avx512": wide,
        "avx512-vnni": wide and vnni,
        "avx512-bf16": vnni and _cpu_has("_is_avx512_bf16_supported"),
        "amx": vnni and _cpu_has("_is_avx512_bf16_supported") and _has_amx(),
    }
    return next((name for name in reversed(LEVELS) if name in allowed and has[name]), None)


@cache
def function(name: str, kinds: str) -> Callable[..., None]:
    """A function of the library.

    Args:
        name: of the function.
        kinds: of its arguments, a letter each, see :data:`KINDS`.

    Raises:
        RuntimeError: this machine has no such library.
    """
    library = _loaded()
    if isinstance(library, str):
        raise RuntimeError(f"no products of our own: {library}")
    found = library[name]
    found.argtypes = [KINDS[kind] for kind in kinds]
    found.restype = None
    return found


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor's first number; ``None`` is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _loaded() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    lacking = _lacking()
    if lacking is not None:
        return lacking
    try:
        try:
            return ctypes.CDLL(str(_library()))
        except OSError:  # damaged, or from another system that shares the folder
            return ctypes.CDLL(str(_library(again=True)))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernels could not be compiled: {str(error).strip().splitlines()[-1]}"


def _lacking() -> str | None:
    """What of the kernel's conditions this machine does not meet."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "made for Linux on x86-64"
    if level() is None:
        return "the CPU has no AVX2"
    if _compiler() is None:
        return f"no C++ compiler ({', '.join(COMPILERS)}, or what CXX names)"
    return None


def _cpu_has(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return bool(ask is not None and ask())


@cache
def _cpu_flags() -> frozenset[str]:
    """What Linux says of the CPU's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


@cache
def _has_amx() -> bool:
    """Whether the CPU has AMX and the system lets this process use it: Linux wants to be asked once, by the system
    call ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``."""
    if not {"amx_bf16", "amx_int8"} <= _cpu_flags():
        return False
    return _system_call(158, 0x1023, 18) == 0


def _system_call(*numbers: int) -> int:
    return int(ctypes.CDLL(None).syscall(*numbers))


def _flags() -> tuple[str, ...]:
    """What the compiler is told."""
    return (*FLAGS, *LEVELS[level() or "avx2"])


def _compiler() -> str | None:
    names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def _file() -> Path:
    """Where the library is kept: under the hash of what it is made from."""
    text = "\n".join([*(source.read_text(encoding="utf-8") for source in (*SOURCES, *HEADERS)), *_flags()])
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
    if compiler is None:
        raise OSError("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder, replacing(file) as draft:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in SOURCES]
        for source, made in zip(SOURCES, objects, strict=True):
            _run(compiler, *_flags(), "-fopenmp", "-c", str(source), "-o", made)
        # Linked without OpenMP's library: its symbols are those that PyTorch has loaded.
        _run(compiler, "-shared", *objects, "-o", str(draft))
    return file


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILING_S)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr or error) from None
