"""The library of our own kernels: the wheel's, or what the machine's C++ compiler makes once from the sources here.

It is made for the highest of :data:`~foretoken.models.native.compiling.LEVELS` that the CPU has, or that the
environment variable ``FORETOKEN_CPU`` allows.  A wheel for this kind of machine brings it compiled, with checksums;
else it lies in the user's cache folder, under the hash of its sources.  A machine that can neither load nor compile
it, or whose CPU has other instructions, uses PyTorch's products (:func:`why_not` says why).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
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
"""Where a wheel has the compiled libraries."""
SWITCH = "FORETOKEN_CPU"
ALLOWED = {
    "avx2": ("avx2", "avx2-vnni"),
    "avx512": ("avx512", "avx512-vnni"),
    "native": tuple(LEVELS),
    "portable": ("portable",),
}
"""Levels that a value of the environment variable leaves."""
MACHINES = {"x86_64": "x86-64", "aarch64": "64-bit Arm"}
KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_long, "d": ctypes.c_double}
"""Arguments of functions: a pointer, a whole number, a number."""
log = logging.getLogger("foretoken")


class _KernelLibrary(NamedTuple):
    """The library that was loaded, and where it comes from."""

    functions: ctypes.CDLL
    origin: str


class NotCoveredError(ValueError):
    """A network that the library does not run; says why."""


def why_not() -> str | None:
    """Why this machine has no kernels of our own, ``None`` where it has them."""
    library = _loaded()
    return library if isinstance(library, str) else None


def described() -> str:
    """Which kernels run and where they come from, or why there are none."""
    library = _loaded()
    return library if isinstance(library, str) else f"{level()}, {library.origin}"


def level() -> str | None:
    """The highest of :data:`LEVELS` that the CPU has and ``FORETOKEN_CPU`` allows; ``None`` where it has none.

    Raises:
        ValueError: ``FORETOKEN_CPU`` is none of its values, or asks for what the CPU lacks.
    """
    choice = os.environ.get(SWITCH, "native")
    if choice not in ALLOWED:
        raise ValueError(f"{SWITCH} must be one of {', '.join(ALLOWED)}, not {choice!r}")
    highest = _cpu_level(ALLOWED[choice])
    if highest is None and choice != "native":
        needed = "AVX512" if choice == "avx512" else "AVX2"
        raise ValueError(f"{SWITCH}={choice}, and this CPU has no {needed}: leave it out")
    return highest


def _cpu_level(allowed: tuple[str, ...]) -> str | None:
    """The highest of some levels that the CPU has."""
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
    """A function of the library, whose arguments are of these :data:`KINDS`, a letter each."""
    library = _loaded()
    if isinstance(library, str):
        raise RuntimeError(f"no products of our own: {library}")
    entry = library.functions[name]
    entry.argtypes = [KINDS[kind] for kind in kinds]
    entry.restype = None
    return entry


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor's first number; ``None`` is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _loaded() -> _KernelLibrary | str:
    """The library, or why there is none."""
    lacking = _lacking()
    if lacking is not None:
        return lacking
    chosen, fault = level() or "portable", ""
    shipped = SHIPPED / compiling.file_name(chosen)
    if shipped.exists():
        try:
            compiling.check(shipped)
            return _KernelLibrary(ctypes.CDLL(str(shipped)), "from the wheel")
        except OSError as error:  # damaged, or made for another C library
            fault = f"the wheel's kernels cannot be used: {error}"
            log.warning(fault)
    try:
        functions = _compiled(chosen)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"the kernels could not be compiled: {str(error).strip().splitlines()[-1]}"
        return f"{fault}; {reason}" if fault else reason
    return _KernelLibrary(functions, f"compiled here; {fault}" if fault else "compiled here")


def _lacking() -> str | None:
    """What of the kernel's conditions this machine does not meet."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        machine = f"{platform.system()} on {platform.machine()}"
        return f"made for Linux on {' and '.join(MACHINES.values())}, not for {machine}"
    return "the CPU has no AVX2" if level() is None else None


def _cpu_has(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return bool(ask is not None and ask())


@cache
def cpu_lines() -> tuple[str, ...]:
    """What Linux says of the first processor; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(text.split("\n\n")[0].splitlines())


def cpu_info(name: str) -> str:
    """One thing that Linux says of the processor, as ``"flags"``; empty where it does not tell."""
    fields = (line.partition(":") for line in cpu_lines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _cpu_flags() -> frozenset[str]:
    return frozenset(cpu_info("flags").split())


@cache
def _has_amx() -> bool:
    """Whether the CPU has AMX and the system lets this process use it: Linux wants to be asked once, by the system
    call ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``."""
    if not {"amx_bf16", "amx_int8"} <= _cpu_flags():
        return False
    return _system_call(158, 0x1023, 18) == 0


def _system_call(*numbers: int) -> int:
    return int(ctypes.CDLL(None).syscall(*numbers))


def _compiled(chosen: str) -> ctypes.CDLL:
    """The library of the cache folder, which is compiled where it is not there or damaged."""
    cached = cache_folder() / compiling.file_name(chosen)
    try:
        if cached.exists():
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
        except OSError:  # the cache cannot be written: every process compiles for itself
            return ctypes.CDLL(str(compiled))
        return ctypes.CDLL(str(cached))
