"""The compiled library of a wheel: it is loaded where it is whole, and what is damaged or missing is said and replaced.

Most tests compile a library of one empty function, which takes no time.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foretoken.loading.measured.machine import hardware
from foretoken.models.linear import layouts
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.native import compiling, library

ROOT = Path(__file__).parents[3]
needs_a_compiler = pytest.mark.skipif(
    compiling.compiler() is None or library.level() is None, reason="no C++ compiler, or a CPU without kernels"
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process with an empty cache folder, ``tmp_path / "foretoken"``, that has loaded nothing yet."""
    caches = (library._loaded, library.function, layouts.has_layout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.SWITCH, raising=False)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


@pytest.fixture
def shipped(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel's libraries, which have one function that does nothing."""
    source = machine / "tiny.cpp"
    source.write_text('extern "C" void tiny(void) {}\n')
    monkeypatch.setattr(compiling, "SOURCES", [source])
    monkeypatch.setattr(compiling, "HEADERS", [])
    monkeypatch.setattr(library, "SHIPPED", machine / "compiled")
    compiling.write_all(library.SHIPPED)
    return library.SHIPPED


def file_of(shipped: Path) -> Path:
    return shipped / compiling.file_name(library.level() or "")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@needs_a_compiler
def test_it_has_every_instruction_set_and_their_checksums(shipped: Path) -> None:
    names = {compiling.file_name(level) for level in compiling.LEVELS}
    assert len(names) == len(compiling.LEVELS)
    assert {file.name for file in shipped.iterdir()} == {*names, compiling.CHECKSUMS}
    for name in names:
        compiling.check(shipped / name)
    lines = (shipped / compiling.CHECKSUMS).read_text().splitlines()
    assert sorted(line.split("  ")[1] for line in lines) == sorted(names)


@needs_a_compiler
def test_it_is_loaded_without_a_compiler(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    assert library.why_not() is None
    library.function("tiny", "")()
    assert library.described() == f"{library.level()}, from the wheel" == hardware()["kernels"]
    assert not (shipped.parent / "foretoken").exists()


@needs_a_compiler
@pytest.mark.parametrize("damage", ["a byte", "no line", "no checksums", "cut off"])
def test_a_wrong_checksum_is_said_and_the_library_compiled(
    shipped: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file, sums = file_of(shipped), shipped / compiling.CHECKSUMS
    if damage == "a byte":
        flip(file)
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "no line":
        sums.write_text("".join(line + "\n" for line in sums.read_text().splitlines() if file.name not in line))
    else:
        sums.unlink()
    with caplog.at_level(logging.WARNING, "foretoken"):
        assert library.why_not() is None and library.why_not() is None
    (line,) = caplog.messages
    assert line.startswith("the wheel's kernels cannot be used: ") and "\n" not in line and file.name in line
    assert "install foretoken again" in line
    assert library.described() == f"{library.level()}, compiled here; {line}"
    library.function("tiny", "")()
    assert [path.name for path in (shipped.parent / "foretoken").iterdir()] == [file.name]


@needs_a_compiler
def test_without_a_compiler_a_damaged_one_leaves_pytorchs_products(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(file_of(shipped))
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    reason = library.why_not() or ""
    assert "install foretoken again" in reason and "no C++ compiler" in reason and "\n" not in reason
    assert library.described() == reason
    assert "native" not in usable_layouts(torch.bfloat16)
    with pytest.raises(RuntimeError, match="install foretoken again"):
        library.function("tiny", "")


@needs_a_compiler
def test_one_that_this_system_cannot_load_is_compiled(shipped: Path) -> None:
    """With the right checksum: made for another C library, say."""
    file = file_of(shipped)
    file.write_bytes(b"not for this system")
    (shipped / compiling.CHECKSUMS).write_text(f"{compiling.checksum(file)}  {file.name}\n")
    assert library.why_not() is None
    assert "compiled here; the wheel's kernels cannot be used" in library.described()


@needs_a_compiler
def test_changed_sources_are_compiled(shipped: Path) -> None:
    """An installed package whose sources were changed does not run what they were before."""
    compiling.SOURCES[0].write_text('extern "C" void changed(void) {}\n')
    assert library.described() == f"{library.level()}, compiled here"
    library.function("changed", "")()


def test_a_machine_that_has_neither_says_what_it_lacks(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SHIPPED", machine / "none")
    monkeypatch.setattr(library, "_cpu_level", lambda allowed: next(iter(compiling.LEVELS)))
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    assert library.why_not() == ("the kernels could not be compiled: no C++ compiler (g++, c++, or the one in CXX)")
    assert hardware()["kernels"] == library.why_not()


# -- machines ----------------------------------------------------------------------------------------------------------


def on(monkeypatch: pytest.MonkeyPatch, system: str, processor: str) -> None:
    """Another machine, of which PyTorch says nothing."""
    monkeypatch.setattr(library.platform, "system", lambda: system)
    monkeypatch.setattr(library.platform, "machine", lambda: processor)
    monkeypatch.setattr(library, "_cpu_has", lambda question: False)
    monkeypatch.setattr(library, "_cpu_flags", lambda: frozenset())


@pytest.mark.parametrize(("system", "processor"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "riscv64")])
def test_other_machines(machine: Path, monkeypatch: pytest.MonkeyPatch, system: str, processor: str) -> None:
    on(monkeypatch, system, processor)
    assert library.why_not() == f"made for Linux on x86-64 and 64-bit Arm, not for {system} on {processor}"


def test_an_old_x86_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Linux", "x86_64")
    assert library.why_not() == "the CPU has no AVX2"
    monkeypatch.setenv(library.SWITCH, "portable")
    with pytest.raises(ValueError, match=r"^FORETOKEN_CPU=portable, and this CPU has no AVX2: leave it out$"):
        library.level()


def test_64_bit_arm_has_the_portable_kernels(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "Linux", "aarch64")
    assert library._lacking() is None and library.level() == "portable"
    monkeypatch.setenv(library.SWITCH, "portable")
    assert library.level() == "portable"
    monkeypatch.setenv(library.SWITCH, "avx2")
    with pytest.raises(ValueError, match="this CPU has no AVX2: leave it out"):
        library.level()


# -- building a wheel --------------------------------------------------------------------------------------------------


def build(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The first step of a wheel, in a copy of what it needs."""
    native = tmp_path / "src" / "foretoken" / "models" / "native"
    native.mkdir(parents=True)
    for file in (*compiling.SOURCES, *compiling.HEADERS, Path(compiling.__file__)):
        (native / file.name).write_bytes(file.read_bytes())
    (tmp_path / "setup.py").write_bytes((ROOT / "setup.py").read_bytes())
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FORETOKEN_WHEEL_KERNELS": "yes"}, "FORETOKEN_WHEEL_KERNELS must be 0 or 1, not 'yes'"),
        (
            {"FORETOKEN_WHEEL_KERNELS": "1", "CXX": "false"},
            "FORETOKEN_WHEEL_KERNELS=1: the kernels could not be compiled",
        ),
    ],
)
def test_a_wheel_without_its_kernels_is_not_built(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    process = build(tmp_path, **variables)
    assert process.returncode != 0 and process.stderr.splitlines()[-1].startswith(message)


def test_a_wheel_for_any_machine_needs_no_compiler(tmp_path: Path) -> None:
    assert build(tmp_path, FORETOKEN_WHEEL_KERNELS="0", CXX="false").returncode == 0
    assert not list(tmp_path.rglob("*.so"))
