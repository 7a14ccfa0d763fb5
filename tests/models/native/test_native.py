"""Our own bfloat16 products: right to one rounding for every shape, the same bits in any company, and never in the way
of a machine that cannot have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.models.linear import layouts
from foretoken.models.linear.layouts import usable_layouts
from foretoken.models.linear.quantised import fastest_draft_product
from foretoken.models.linear.quantised_products import NativeInt4Product, NativeInt8Product, NativeProduct
from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight
from foretoken.models.native import bfloat16, compiling, library, linear
from foretoken.models.native.library import address

needs_it = pytest.mark.skipif(library.why_not() is not None, reason=f"no native kernels: {library.why_not()}")
HALF_STEP = 2.0**-8


def multiplied(x: Tensor, packed: Tensor, out: int, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The product of a weight that was laid out."""
    offset = None if bias is None else bias.float()
    described = linear.Linear(linear.BFLOAT16, 2 * packed.shape[1], out, 0, address(packed), None, address(offset))
    return linear.product(x, described, residual)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that has not compiled anything yet, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.SWITCH, raising=False)
    caches = (library._loaded, library.function, layouts.has_layout)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


# -- numbers -----------------------------------------------------------------------------------------------------------


@needs_it
@pytest.mark.parametrize("out", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("inner", [2, 30, 64, 512, 2048])
def test_products_are_rounded_once(level: str, out: int, inner: int) -> None:
    weight, bias = numbers(out, inner), numbers(out, seed=1)
    packed = bfloat16.laid_out(weight)
    assert torch.equal(bfloat16.in_rows(packed, out), weight)
    for rows in (1, 2, 7, 8, 9, 14, 15, 29):
        x, residual = numbers(rows, inner, seed=2), numbers(rows, out, seed=3)
        for offset in (None, bias):
            for added in (None, residual):
                expected = x.double() @ weight.double().T
                room = inner * 2.0**-23 * (x.double().abs() @ weight.double().abs().T)  # of float32 sums
                for term in (offset, added):
                    expected = expected if term is None else expected + term.double()
                output = multiplied(x, packed, out, offset, added)
                assert output.shape == (rows, out) and output.dtype == torch.bfloat16
                assert ((output.double() - expected).abs() <= HALF_STEP * expected.abs() + room).all()


@needs_it
@pytest.mark.parametrize("inner", [96, 512, 2048])
def test_a_rows_bits_do_not_depend_on_the_others(level: str, inner: int) -> None:
    packed, x, residual = bfloat16.laid_out(numbers(70, inner)), numbers(40, inner, seed=2), numbers(40, 70, seed=3)
    alone = torch.cat([multiplied(x[i : i + 1], packed, 70, None, residual[i : i + 1]) for i in range(40)])
    for rows in range(1, 41):
        assert torch.equal(multiplied(x[:rows], packed, 70, None, residual[:rows]), alone[:rows])
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(multiplied(x, packed, 70, None, residual), alone)
        finally:
            torch.set_num_threads(before)


@needs_it
@pytest.mark.parametrize("rows", [33, 64, 65, 97, 257, 300])
def test_rows_of_several_tiles_have_the_bits_of_one(level: str, rows: int) -> None:
    packed, x, residual = bfloat16.laid_out(numbers(70, 96)), numbers(rows, 96, seed=2), numbers(rows, 70, seed=3)
    alone = torch.cat([multiplied(x[i : i + 1], packed, 70, None, residual[i : i + 1]) for i in range(rows)])
    assert torch.equal(multiplied(x, packed, 70, None, residual), alone)


@needs_it
def test_rows_may_lie_anywhere(level: str) -> None:
    weight = numbers(40, 64)
    packed, wide = bfloat16.laid_out(weight), numbers(9, 131, seed=2)
    for x in (wide[:, :64], wide[:, 3:67], wide[::2, :64], numbers(64, 9, seed=4).T, wide[:0, :64]):
        residual = numbers(80, len(x), seed=5).T[:, ::2]
        assert torch.equal(
            multiplied(x, packed, 40, None, residual),
            multiplied(x.contiguous(), packed, 40, None, residual.contiguous()),
        )


@needs_it
def test_what_is_not_a_number_stays_in_its_row_or_output(level: str) -> None:
    weight, x = numbers(33, 64), numbers(3, 64, seed=2)
    weight[5, 7], x[1, 3] = float("inf"), float("nan")
    output = multiplied(x, bfloat16.laid_out(weight), 33, None)
    assert output[1].isnan().all() and output[[0, 2]][:, 5].isinf().all()
    rest = output[[0, 2]][:, torch.arange(33) != 5]
    assert rest.isfinite().all()


@needs_it
@pytest.mark.parametrize("kind", [linear.EIGHT, linear.FOUR, linear.BYTES])
def test_too_little_memory_is_an_error(level: str, kind: int) -> None:
    """Before anything is read or written."""
    x, inner = numbers(40, 64), 2**50
    with pytest.raises(MemoryError, match="too little memory for a product of 40 rows"):
        linear.product(x, linear.Linear(kind, inner, 32, inner, address(x), address(x)))


def test_a_large_product_by_several_threads_is_the_small_ones_side_by_side(level: str) -> None:
    """What one thread does alone (below ``ONE_THREAD`` weights) and what several share."""
    weight, x = numbers(640, 256), numbers(5, 256, seed=2)
    parts = [multiplied(x, bfloat16.laid_out(weight[i : i + 64]), 64, None) for i in range(0, 640, 64)]
    assert torch.equal(multiplied(x, bfloat16.laid_out(weight), 640, None), torch.cat(parts, 1))


def test_pairs_need_an_even_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="must be even, not 63"):
        bfloat16.laid_out(numbers(8, 63))


# -- weights in 8 and 4 bits -------------------------------------------------------------------------------------------


def stored(bits: int, out: int, inner: int, group: int) -> tuple[NativeProduct, Tensor]:
    """The product, and the weight [out, in] in float64 that it stands for."""
    weight = numbers(out, inner).float() * torch.linspace(0.1, 3, out)[:, None]
    if bits == 8:
        eight = Int8Weight.of(weight)
        return NativeInt8Product(eight, None), eight.dequantised().double()
    four = Int4Weight.of(weight, group)
    return NativeInt4Product(four, None), four.dequantised().double()


CASES = [(8, out, inner, 0) for out in (1, 16, 31, 33, 96) for inner in (8, 40, 512)]
CASES += [(4, out, inner, group) for out in (16, 48, 96) for inner in (128, 512) for group in (32, 64, 128)]


@needs_it
@pytest.mark.parametrize(("bits", "out", "inner", "group"), CASES)
def test_integers_are_as_exact_as_15_bits(level: str, bits: int, out: int, inner: int, group: int) -> None:
    kernel, weight = stored(bits, out, inner, group)
    assert torch.equal(kernel.dense().double(), weight)
    x = numbers(15, inner, seed=2) * torch.logspace(-3, 3, 15, dtype=torch.bfloat16)[:, None]
    x[4] = 0
    expected = x.double() @ weight.T
    # An input is off by half a step of 2 x 127 x 254 between its row's largest numbers, at most.
    step = x.double().abs().amax(1, keepdim=True) / (2 * 127 * 254)
    room = 1.1 * step * weight.abs().sum(1) + inner * 2.0**-22 * (x.double().abs() @ weight.abs().T)
    alone = torch.cat([kernel.product(row[None]) for row in x])
    for rows in range(1, 16):
        output = kernel.product(x[:rows])
        assert output.dtype == torch.bfloat16 and torch.equal(output, alone[:rows])
        assert ((output.double() - expected[:rows]).abs() <= HALF_STEP * expected[:rows].abs() + room[:rows]).all()


@needs_it
@pytest.mark.parametrize(("bits", "inner", "group"), [(8, 512, 0), (8, 4104, 0), (4, 64, 32), (4, 8192, 8192)])
def test_the_largest_sums_fit(level: str, bits: int, inner: int, group: int) -> None:
    ones = torch.ones(32, inner // group if group else 1).bfloat16()
    if bits == 8:
        eight = Int8Weight(torch.full((32, inner), 127, dtype=torch.int8), ones[:, 0])
        kernel: NativeProduct = NativeInt8Product(eight, None)
    else:
        kernel = NativeInt4Product(Int4Weight(torch.full((32, inner), 15, dtype=torch.int32), ones, ones, group), None)
    x = torch.ones(5, inner).bfloat16()
    assert torch.equal(kernel.product(x), (x.double() @ kernel.dense().double().T).bfloat16())
    assert torch.equal(kernel.product(-x), (-x.double() @ kernel.dense().double().T).bfloat16())


@needs_it
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_integers_hide_nothing_that_is_no_number(level: str, bits: int, value: float) -> None:
    kernel, _ = stored(bits, 48, 64, 32)
    x = numbers(3, 64, seed=2)
    x[1, 5] = value
    output = kernel.product(x)
    assert not output[1].isfinite().any() and output[[0, 2]].isfinite().all()


@needs_it
def test_integers_may_lie_anywhere_and_fill_the_cpu(level: str) -> None:
    kernel, _ = stored(8, 640, 256, 0)
    wide = numbers(9, 515, seed=2)
    for x in (wide[:, :256], wide[:, 3:259], wide[::2, :256], numbers(256, 9, seed=4).T, wide[:0, :256]):
        assert torch.equal(kernel.product(x), kernel.product(x.contiguous()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = kernel.product(wide[:, :256])
        torch.set_num_threads(1)
        assert torch.equal(several, kernel.product(wide[:, :256]))
    finally:
        torch.set_num_threads(before)


@needs_it
def test_inputs_come_in_eights() -> None:
    with pytest.raises(RuntimeError, match="not 12"):
        NativeInt8Product(Int8Weight.of(numbers(4, 12)), None)
    assert fastest_draft_product(32, 12, 32, "8") not in (None, NativeInt8Product)


# -- machines ----------------------------------------------------------------------------------------------------------


@needs_it
def test_the_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.why_not() is None and "native" in usable_layouts(torch.bfloat16)
    (file,) = (fresh / "foretoken").glob("native-*.so")
    library._loaded.cache_clear()
    monkeypatch.setattr(compiling, "run", lambda *_: pytest.fail("compiled twice"))
    assert library.why_not() is None and file.exists()


@needs_it
def test_a_cache_that_cannot_be_written_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert library.why_not() is None


@needs_it
@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_made_again(fresh: Path, content: bytes) -> None:
    file = fresh / "foretoken" / compiling.file_name(library.level() or "")
    file.parent.mkdir()
    file.write_bytes(content)
    assert library.why_not() is None and len(file.read_bytes()) > 1000


@needs_it
def test_a_truncated_library_is_not_loaded(fresh: Path) -> None:
    assert library.why_not() is None
    (file,) = (fresh / "foretoken").glob("native-*.so")
    whole = file.read_bytes()
    code = "from foretoken.models.native import library; print(library.why_not())"
    said = {}
    for size in (63, len(whole) // 2, len(whole) - 4096, len(whole)):
        file.unlink()  # this process has mapped the first one
        file.write_bytes(whole[:size])
        process = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "CXX": "false"}, capture_output=True, text=True
        )
        assert process.returncode == 0, f"{size} of {len(whole)} bytes: {process.stderr}"
        said[size] = process.stdout.strip()
    assert said.pop(len(whole)) == "None"
    assert all(line.startswith("the kernels could not be compiled: ") for line in said.values())


def test_a_compiler_that_fails_leaves_pytorchs_products(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cpu_has", lambda question: True)
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CXX", "false")
    assert compiling.compiler() is not None
    assert (library.why_not() or "").startswith("the kernels could not be compiled: ")
    assert "native" not in usable_layouts(torch.bfloat16) and not list(fresh.rglob("*.so"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "In file included from a.h:1,\n                 from x.cpp:1:\na.h:1:10: fatal error: omp.h: No such file\n"
            "    1 | #include <omp.h>\n      |          ^~~~~~~\ncompilation terminated.",
            "a.h:1:10: fatal error: omp.h: No such file",
        ),
        (
            "/usr/bin/ld: cannot find -lm: No such file\ncollect2: error: ld returned 1 exit status",
            "/usr/bin/ld: cannot find -lm: No such file",
        ),
        ("x.cpp:1: Fehler: unbekannt\n  1 | x", "x.cpp:1: Fehler: unbekannt"),
        ("x.cpp: error: \udcff", "x.cpp: error: \ufffd"),
        ("\n", "wrapper ends with 3 and says nothing"),
        ("", "wrapper ends with 3 and says nothing"),
    ],
)
def test_the_reason_is_the_compilers_first_fault(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, output: str, reason: str
) -> None:
    monkeypatch.setattr(library, "_cpu_has", lambda question: True)
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    (fresh / "output").write_bytes(output.encode(errors="surrogateescape"))
    wrapper = fresh / "wrapper"
    wrapper.write_text(f"#!/bin/sh\ncat {fresh}/output >&2\nexit 3\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    said = (library.why_not() or "").replace(f"{fresh}/", "")
    assert said == f"the kernels could not be compiled: {reason}"


@pytest.mark.parametrize(
    ("system", "flags", "compiler", "reason"),
    [
        ("Darwin", ("_is_avx512_bf16_supported", "_is_vnni_supported"), "g++", "made for Linux"),
        ("Linux", (), "g++", "no AVX2"),
        ("Linux", ("_is_avx512_bf16_supported", "_is_vnni_supported"), None, "no C++ compiler"),
    ],
)
def test_why_not(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    flags: tuple[str, ...],
    compiler: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(library.platform, "system", lambda: system)
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "_cpu_has", lambda question: question in flags)
    monkeypatch.setattr(compiling, "compiler", lambda: compiler)
    assert reason in (library.why_not() or "")
    assert "native" not in usable_layouts(torch.bfloat16)


@needs_it
def test_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "from foretoken.models.native import library; raise SystemExit(library.why_not() is not None)"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    name = compiling.file_name(library.level() or "")
    assert [file.name for file in (tmp_path / "foretoken").iterdir()] == [name]
