"""Our kernels with activations of 8 bits, on every instruction set that this CPU has: what their twin says, the same
bits in any company, and nothing hidden that is no number."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.models.linear.quantised_products import NativeInt4ByteProduct, NativeInt8ByteProduct, NativeProduct
from foretoken.models.linear.quantised_weights import Int4Weight, Int8Weight
from foretoken.models.native import compiling, integers8, library, why_not

HALF_STEP = 2.0**-8
needs_it = pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(bits: int, out: int, inner: int, group: int) -> tuple[NativeProduct, Tensor]:
    """The product, and the weight [out, in] in float64 that it stands for."""
    weight = numbers(out, inner).float() * torch.linspace(0.1, 3, out)[:, None]
    if bits == 8:
        eight = Int8Weight.of(weight)
        return NativeInt8ByteProduct(eight, None), eight.dequantised().double()
    four = Int4Weight.of(weight, group)
    return NativeInt4ByteProduct(four, None), four.dequantised().double()


def extreme(bits: int, group: int) -> NativeProduct:
    """The largest sums of integers that there are."""
    if bits == 8:
        return NativeInt8ByteProduct(
            Int8Weight(torch.full((32, 64), 127).to(torch.int8), torch.ones(32).bfloat16()), None
        )
    ones = torch.ones(32, 64 // group).bfloat16()
    return NativeInt4ByteProduct(Int4Weight(torch.full((32, 64), 15, dtype=torch.int32), ones, ones, group), None)


CASES = [(8, out, inner, 0) for out in (1, 31, 32, 33, 96) for inner in (8, 40, 512)]
CASES += [(4, out, inner, group) for out in (16, 96) for inner in (128, 512) for group in (32, 64, 128)]


@needs_it
@pytest.mark.parametrize(("bits", "out", "inner", "group"), CASES)
def test_a_product_is_that_of_rounded_activations(level: str, bits: int, out: int, inner: int, group: int) -> None:
    kernel, weight = stored(bits, out, inner, group)
    assert torch.equal(kernel.dense().double(), weight)
    x = numbers(17, inner, seed=2) * torch.logspace(-3, 3, 17, dtype=torch.bfloat16)[:, None]
    x[4] = 0
    rounded = integers8.rounded(x)
    assert ((rounded - x.double()).abs() <= 0.501 / 127 * x.double().abs().amax(1, keepdim=True)).all()
    expected = rounded @ weight.T
    # Sums in float32 of what the kernel adds up: weights without sign are at most twice the largest one.
    room = inner * 2.0**-22 * x.double().abs().sum(1, keepdim=True) * 2 * weight.abs().amax(1)
    alone = torch.cat([kernel.product(row[None]) for row in x])
    assert alone.dtype == torch.bfloat16
    assert ((alone.double() - expected).abs() <= HALF_STEP * expected.abs() + room).all()
    for rows in range(1, 18):
        assert torch.equal(kernel.product(x[:rows]), alone[:rows])


@needs_it
@pytest.mark.parametrize("rows", [33, 64, 65, 97, 150])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 32), (4, 64)])
def test_rows_of_several_tiles_have_the_bits_of_one(level: str, bits: int, group: int, rows: int) -> None:
    kernel, _ = stored(bits, 80, 128, group)
    x = numbers(rows, 128, seed=2)
    assert torch.equal(kernel.product(x), torch.cat([kernel.product(row[None]) for row in x]))


FAILING = """
#include <cstdlib>
extern "C" {
int full = 0;
void *aligned_alloc(std::size_t alignment, std::size_t size) {
    void *memory = nullptr;
    return full || posix_memalign(&memory, alignment, size) ? nullptr : memory;
}
}
"""
WITHOUT_MEMORY = """
import ctypes, os, sys
import torch
from foretoken.models.linear.quantised_products import NativeInt8ByteProduct
from foretoken.models.linear.quantised_weights import Int8Weight
from foretoken.models.native import library, linear

library.ALLOWED["native"] = (sys.argv[1],)
inner, rows = 512, 70
kernel = NativeInt8ByteProduct(Int8Weight.of(torch.randn(96, inner)), None)
x = torch.randn(rows, inner).bfloat16()
alone = torch.cat([kernel.product(row[None]) for row in x])
linear.product(x, linear.Linear(linear.BYTES, inner, 0, inner))  # keeps memory for the rows in bytes, and no more
full = ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "full")
full.value = 1
product = kernel.product(x)
try:
    linear.product(x.repeat(9, 1), linear.Linear(linear.BYTES, inner, 0, inner))
except MemoryError:
    print(torch.equal(product, alone))
"""


@needs_it
@pytest.mark.skipif(
    sys.platform != "linux" or compiling.compiler() is None, reason="needs Linux and a C++ compiler for a full memory"
)
def test_a_product_without_memory_for_its_tiles_has_the_same_bits(level: str, tmp_path: Path) -> None:
    """It wrote to address 0."""
    source, failing = tmp_path / "failing.cpp", tmp_path / "failing.so"
    source.write_text(FAILING)
    subprocess.run([str(compiling.compiler()), "-shared", "-fPIC", str(source), "-o", str(failing)], check=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(failing)}
    command = [sys.executable, "-c", WITHOUT_MEMORY, level]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


@needs_it
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 32), (4, 64)])
def test_the_largest_sums_fit(level: str, bits: int, group: int) -> None:
    kernel, x = extreme(bits, group), torch.ones(5, 64).bfloat16()
    weight = kernel.dense()
    assert torch.equal(kernel.product(x), (x.float() @ weight.T).bfloat16())
    assert torch.equal(kernel.product(-x), (-x.float() @ weight.T).bfloat16())


@needs_it
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(level: str, bits: int, value: float) -> None:
    kernel, _ = stored(bits, 48, 64, 32)
    x = numbers(3, 64, seed=2)
    x[1, 5] = value
    output = kernel.product(x)
    assert not output[1].isfinite().any() and output[[0, 2]].isfinite().all()


@needs_it
@pytest.mark.parametrize("bits", [8, 4])
def test_tiny_activations_are_zero(level: str, bits: int) -> None:
    kernel, _ = stored(bits, 48, 64, 32)
    tiny = torch.tensor([2.0**-112, 1e-40]).bfloat16()[:, None].expand(2, 64)
    assert torch.equal(kernel.product(tiny), torch.zeros(2, 48).bfloat16())


@needs_it
@pytest.mark.parametrize("rows", [9, 50])  # few rows become integers on every core, many on one
def test_rows_may_lie_anywhere_and_fill_the_cpu(rows: int) -> None:
    kernel, _ = stored(8, 640, 256, 0)
    wide = numbers(rows, 515, seed=2)
    for x in (wide[:, :256], wide[:, 3:259], wide[::2, :256], numbers(256, rows, seed=4).T, wide[:0, :256]):
        assert torch.equal(kernel.product(x), kernel.product(x.contiguous()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = kernel.product(wide[:, :256])
        torch.set_num_threads(1)
        assert torch.equal(several, kernel.product(wide[:, :256]))
    finally:
        torch.set_num_threads(before)


# -- which instruction set ---------------------------------------------------------------------------------------------


def has(monkeypatch: pytest.MonkeyPatch, *names: str, flags: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(library, "_cpu_has", lambda question: question in {f"_is_{name}_supported" for name in names})
    monkeypatch.setattr(library, "_cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(library, "_has_amx", cache(library._has_amx.__wrapped__))


@pytest.mark.parametrize(
    ("names", "flags", "switch", "expected"),
    [
        ((), (), None, None),
        (("avx2",), (), None, "avx2"),
        (("avx2",), ("avx_vnni",), None, "avx2-vnni"),
        (("avx2", "avx512"), (), None, "avx512"),
        (("avx2", "avx512", "vnni"), (), None, "avx512-vnni"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), (), "native", "avx512-bf16"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), ("amx_bf16",), "native", "avx512-bf16"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), ("amx_bf16", "amx_int8"), "native", "amx"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), ("amx_bf16", "amx_int8"), "avx512", "avx512-vnni"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), (), "avx512", "avx512-vnni"),
        (("avx2", "avx512", "vnni", "avx512_bf16"), (), "avx2", "avx2"),
    ],
)
def test_the_highest_level_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    flags: tuple[str, ...],
    switch: str | None,
    expected: str | None,
) -> None:
    has(monkeypatch, *names, flags=flags)
    monkeypatch.setattr(library, "_system_call", lambda *numbers: 0)
    if switch is None:
        monkeypatch.delenv(library.SWITCH, raising=False)
    else:
        monkeypatch.setenv(library.SWITCH, switch)
    assert library.level() == expected


@pytest.mark.parametrize("answer", [0, -1])
def test_amx_is_used_where_the_system_permits_it(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    has(monkeypatch, "avx2", "avx512", "vnni", "avx512_bf16", flags=("amx_bf16", "amx_int8"))
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(library, "_system_call", lambda *numbers: calls.append(numbers) or answer)
    monkeypatch.delenv(library.SWITCH, raising=False)
    assert [library.level() for _ in range(2)] == 2 * ["avx512-bf16" if answer else "amx"]
    assert calls == [(158, 0x1023, 18)]  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), once


def test_an_empty_switch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "avx2", "avx512")
    monkeypatch.setenv(library.SWITCH, "")
    assert library.level() == "avx512"


def test_a_switch_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "avx2")
    monkeypatch.setenv(library.SWITCH, "sse")
    with pytest.raises(ValueError, match="one of avx2, avx512, native, portable, not 'sse'"):
        library.level()
    monkeypatch.setenv(library.SWITCH, "avx512")
    with pytest.raises(ValueError, match="this CPU has no AVX512: leave it out"):
        library.level()
