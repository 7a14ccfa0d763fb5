"""Compilation of our kernel library: sources, and compiler flags per instruction set.

Needs only the standard library, so that ``setup.py`` builds a wheel with the library without PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES, HEADERS = (sorted(Path(__file__).parent.glob(f"*.{suffix}")) for suffix in ("cpp", "h"))
COMPILERS = ("g++", "c++")
"""Tried in this order, after the environment's ``CXX``."""
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-fno-exceptions", "-fno-asynchronous-unwind-tables", "-w")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
PORTABLE = {"x86_64": ("-DPORTABLE", *AVX2), "aarch64": ("-DPORTABLE",)}
"""Flags by machine; on x86-64 for comparisons, with the instructions that reproduce the sums of 64-bit Arm."""
X86_LEVELS = {
    "avx2": AVX2,
    "avx2-vnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512-vnni": (*AVX512, "-mavx512vnni"),
    "avx512-bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
LEVELS = {
    "portable": PORTABLE.get(platform.machine(), ("-DPORTABLE",)),
    **(X86_LEVELS if platform.machine() == "x86_64" else {}),
}
"""Supported instruction sets in ascending order, with their compiler flags."""
CHECKSUMS = "SHA256SUMS"
"""Checksum file beside a wheel's libraries, in the format of ``sha256sum``."""


def compiler() -> str | None:
    names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


def file_name(level: str) -> str:
    """File name with a hash of the sources and flags."""
    sources = (source.read_text(encoding="utf-8") for source in (*SOURCES, *HEADERS))
    text = "\n".join([*sources, *FLAGS, *LEVELS[level]])
    return f"native-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.so"


def write_library(level: str, file: Path) -> None:
    """Compile the library for an instruction set.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, it fails, or the file cannot be written.
    """
    program = compiler()
    if program is None:
        raise OSError(f"no C++ compiler ({', '.join(COMPILERS)}, or the one in CXX)")
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in SOURCES]

        def compile_one(source: Path, compiled: str) -> None:
            run(program, *FLAGS, *LEVELS[level], "-fopenmp", "-c", str(source), "-o", compiled)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, SOURCES, objects))
        # Linked without the OpenMP library: PyTorch has already loaded its symbols.
        run(program, "-shared", "-s", *objects, "-o", str(file))


def write_all(folder: Path) -> None:
    """Compile the libraries of a wheel, one per instruction set of this machine type, and write their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {level: folder / file_name(level) for level in LEVELS}
    for level, file in files.items():
        write_library(level, file)
    lines = [f"{checksum(file)}  {file.name}\n" for file in files.values()]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def check(file: Path) -> None:
    """Raise ``OSError`` if a wheel's library does not match its checksum."""
    checksums = file.parent / CHECKSUMS
    lines = checksums.read_text(encoding="utf-8", errors="replace").splitlines() if checksums.exists() else []
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if digests.get(file.name) != checksum(file):
        raise OSError(f"{file} does not have the checksum that {CHECKSUMS} has for it: install foretoken again")


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run(*command: str) -> None:
    try:  # a source takes two to ten seconds on an idle machine
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=600)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.strip() or f"{command[0]} ends with {error.returncode} and says nothing") from None


def first_fault(error: Exception) -> str:
    """The line of a compiler's output that states the reason; others show the place, or say that it gives up."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    faults = [line for line in lines if re.search(r"\b(error|ld): ", line, re.IGNORECASE)]
    return next(iter(faults or lines), type(error).__name__)
