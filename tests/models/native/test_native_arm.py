"""Our kernels on 64-bit Arm: compiled by a cross compiler, run by an emulator, the same bits as on this CPU.

``native_program.cpp`` runs every kernel and a whole forward, each row in company and alone.  What it writes here, with
AVX2, is what kernels are held to their twins with in the other tests.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.models.native import compiling, library

PROGRAM = Path(__file__).with_name("native_program.cpp")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (CROSS, EMULATOR, compiling.compiler() or "g++") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(library._cpu_level(("avx2",)) is None, reason="no x86-64 CPU with AVX2 to compare with"),
]


def built(compiler: str, flags: tuple[str, ...], file: Path) -> Path:
    """The program with the kernels as a library has them."""
    sources = [source for source in compiling.SOURCES if source.stem != "forward"]  # which the program includes
    folder = compiling.SOURCES[0].parent
    for source in (*sources, PROGRAM):
        object_file = file.with_suffix(f".{source.stem}.o")
        compiling.run(
            compiler, *compiling.FLAGS, *flags, "-fopenmp", f"-I{folder}", "-c", str(source), "-o", str(object_file)
        )
    objects = sorted(map(str, file.parent.glob(f"{file.stem}.*.o")))
    compiling.run(compiler, "-fopenmp", "-static", *objects, "-o", str(file))
    return file


def results(command: list[str], seed: int, file: Path) -> dict[str, Tensor]:
    """The program's output by the names of its blocks; the program fails if a row has other bits alone."""
    process = subprocess.run([*command, str(seed), str(file)], capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    content, blocks = file.read_bytes(), {}
    while content:
        head, _, content = content.partition(b"\n")
        name, _, count = head.decode().partition("\t")
        blocks[name] = torch.frombuffer(bytearray(content[: 2 * int(count)]), dtype=torch.bfloat16)
        content = content[2 * int(count) :]
    return blocks


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(compiling.compiler() or "g++", compiling.AVX2, tmp_path_factory.mktemp("here") / "program")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(CROSS, compiling.PORTABLE["aarch64"], tmp_path_factory.mktemp("arm") / "program")


def test_arm_has_the_bits_of_avx2(host: Path, arm: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        expected, blocks = (
            results([str(host)], seed, tmp_path / "here"),
            results([EMULATOR, str(arm)], seed, tmp_path / "arm"),
        )
        assert list(blocks) == list(expected) and len(expected) == 23
        for name, numbers in expected.items():
            assert numbers.isfinite().all() and numbers.float().std() > 0.1, name
            assert torch.equal(blocks[name].view(torch.int16), numbers.view(torch.int16)), name


def test_other_numbers_have_other_bits(host: Path, tmp_path: Path) -> None:
    """The control: the comparison sees what differs."""
    first, second = (results([str(host)], seed, tmp_path / str(seed)) for seed in (1, 2))
    assert all(not torch.equal(first[name], second[name]) for name in first)
