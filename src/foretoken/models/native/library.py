"""Our kernel library: the wheel's, or compiled once from the sources by the machine's C++ compiler.

It is compiled for the highest of :data:`~foretoken.models.native.compiling.LEVELS` that the CPU supports and the
environment variable ``FORETOKEN_CPU`` allows.  A wheel for this type of machine contains it, with checksums; otherwise
it is in the user's cache folder, under the hash of its sources.  A machine that can neither load nor compile it, or
whose CPU lacks the instructions, uses PyTorch's products (:func:`why_not` gives the reason).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.io.files import cache_folder, replacing
from foretoken.models.native import compiling
from foretoken.models.native.compiling import LEVELS

SHIPPED = Path(__file__).with_name("compiled")
"""Folder of a wheel's compiled libraries."""
SWITCH = "FORETOKEN_CPU"
ALLOWED = {
    "avx2": ("avx2", "avx2-vnni"),
    "avx512": ("avx512", "avx512-vnni"),
    "native": tuple(LEVELS),
    "portable": ("portable",),
}
"""Levels allowed by each value of the environment variable."""
KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_long, "d": ctypes.c_double}
"""Argument types of functions: pointer, integer, floating-point number."""
log = logging.getLogger("foretoken")


class _KernelLibrary(NamedTuple):
    functions: ctypes.CDLL
    origin: str


class NotCoveredError(ValueError):
    """The library does not support a network; the message states the reason."""


def why_not() -> str | None:
    """Reason why this machine cannot use our kernels; ``None`` if it can."""
    library = _loaded()
    return library if isinstance(library, str) else None


def described() -> str:
    """The kernels in use and their origin, or the reason why there are none."""
    library = _loaded()
    return library if isinstance(library, str) else f"{level()}, {library.origin}"


def level() -> str | None:
    """The highest of :data:`LEVELS` that the CPU supports and ``FORETOKEN_CPU`` allows; ``None`` if there is none.

    Raises:
        ValueError: ``FORETOKEN_CPU`` has an unknown value, or requires instructions that the CPU lacks.
    """
    choice = os.environ.get(SWITCH) or "native"
    if choice not in ALLOWED:
        raise ValueError(f"{SWITCH} must be one of {', '.join(ALLOWED)}, not {choice!r}")
    highest = _cpu_level(ALLOWED[choice])
    if highest is None and choice != "native":
        needed = "AVX512" if choice == "avx512" else "AVX2"
        raise ValueError(f"{SWITCH}={choice}, and this CPU has no {needed}: leave it out")
    return highest


def _cpu_level(allowed: tuple[str, ...]) -> str | None:
    """The highest of the allowed levels that the CPU supports."""
    vnni = _cpu_has("_is_vnni_supported")
    wide = _cpu_has("_is_avx512_supported")
    has = {
        "portable": platform.machine() == "aarch64" or _cpu_has("_is_avx2_supported"),
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
    """A function of the library; ``kinds`` has one letter of :data:`KINDS` per argument."""
    library = _loaded()
    if isinstance(library, str):
        raise RuntimeError(f"no native kernels: {library}")
    entry = library.functions[name]
    entry.argtypes = [KINDS[kind] for kind in kinds]
    entry.restype = None
    return entry


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first number; ``None`` is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _loaded() -> _KernelLibrary | str:
    """The library, or the reason why there is none."""
    lacking = _lacking()
    if lacking is not None:
        return lacking
    chosen, fault = level() or "portable", ""
    shipped = SHIPPED / compiling.file_name(chosen)
    if shipped.exists():
        try:
            compiling.check(shipped)
            return _KernelLibrary(ctypes.CDLL(str(shipped)), "from the wheel")
        except OSError as error:  # damaged, or built for another C library
            fault = f"the wheel's kernels cannot be used: {error}"
            log.warning(fault)
    try:
        functions = _compiled(chosen)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"the kernels could not be compiled: {compiling.first_fault(error)}"
        return f"{fault}; {reason}" if fault else reason
    return _KernelLibrary(functions, f"compiled here; {fault}" if fault else "compiled here")


def _lacking() -> str | None:
    """Unmet requirement of the kernels; ``None`` if there is none."""
    machines = {"x86_64": "x86-64", "aarch64": "64-bit Arm"}
    if platform.system() != "Linux" or platform.machine() not in machines:
        machine = f"{platform.system()} on {platform.machine()}"
        return f"made for Linux on {' and '.join(machines.values())}, not for {machine}"
    return "the CPU has no AVX2" if level() is None else None


def _cpu_has(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return bool(ask is not None and ask())


@cache
def cpu_lines() -> tuple[str, ...]:
    """Lines about the first processor in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(text.split("\n\n")[0].splitlines())


def cpu_info(name: str) -> str:
    """A field of :func:`cpu_lines`, such as ``"flags"``; empty if missing."""
    fields = (line.partition(":") for line in cpu_lines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _cpu_flags() -> frozenset[str]:
    return frozenset(cpu_info("flags").split())


@cache
def _has_amx() -> bool:
    """Whether the CPU has AMX and this process may use it.  Linux requires one request per process, the system call
    ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``."""
    if not {"amx_bf16", "amx_int8"} <= _cpu_flags():
        return False
    return _system_call(158, 0x1023, 18) == 0


def _system_call(*numbers: int) -> int:
    return int(ctypes.CDLL(None).syscall(*numbers))


def _compiled(chosen: str) -> ctypes.CDLL:
    """The library in the cache folder, compiled if missing or damaged."""
    cached = cache_folder() / compiling.file_name(chosen)
    try:
        if cached.exists() and _is_whole(cached):
            return ctypes.CDLL(str(cached))
    except OSError:  # damaged, or from another system that shares the folder
        pass
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        compiled = Path(folder) / cached.name
        compiling.write_library(chosen, compiled)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as draft:
                shutil.copyfile(compiled, draft)
        except OSError:  # read-only cache: every process compiles for itself
            return ctypes.CDLL(str(compiled))
        return ctypes.CDLL(str(cached))


def _is_whole(library: Path) -> bool:
    """Whether a library has its table of sections, which linkers write last.  The loader maps a truncated one without
    an error, and the first read beyond its end kills the process."""
    with library.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64:
        return False
    start, size, count = (*struct.unpack_from("=Q", header, 0x28), *struct.unpack_from("=HH", header, 0x3A))
    return bool(start + size * count <= library.stat().st_size)
