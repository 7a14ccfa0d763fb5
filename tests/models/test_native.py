"""Our own bfloat16 products: right to one rounding for every shape, the same bits in any company, and never in the way
of a machine that cannot have them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.models import layouts, native
from foretoken.models.layouts import usable_layouts

needs_it = pytest.mark.skipif(native.why_not() is not None, reason=f"no products of our own: {native.why_not()}")
HALF_STEP = 2.0**-8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that has not compiled anything yet, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (native._loaded, layouts._has_native)
    for found in caches:
        found.cache_clear()
    yield tmp_path
    for found in caches:
        found.cache_clear()


# -- numbers -----------------------------------------------------------------------------------------------------------


@needs_it
@pytest.mark.parametrize("out", [1, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("inner", [2, 30, 64, 512, 2048])
def test_products_are_rounded_once(out: int, inner: int) -> None:
    weight, bias = numbers(out, inner), numbers(out, seed=1)
    packed = native.laid_out(weight)
    assert torch.equal(native.in_rows(packed, out), weight)
    for rows in (1, 2, 7, 8, 9, 14, 15, 29):
        x, residual = numbers(rows, inner, seed=2), numbers(rows, out, seed=3)
        for offset in (None, bias):
            for added in (None, residual):
                wanted = x.double() @ weight.double().T
                room = inner * 2.0**-23 * (x.double().abs() @ weight.double().abs().T)  # of float32 sums
                for term in (offset, added):
                    wanted = wanted if term is None else wanted + term.double()
                found = native.product(x, packed, out, offset, added)
                assert found.shape == (rows, out) and found.dtype == torch.bfloat16
                assert ((found.double() - wanted).abs() <= HALF_STEP * wanted.abs() + room).all()


@needs_it
@pytest.mark.parametrize("inner", [96, 512, 2048])
def test_a_rows_bits_do_not_depend_on_the_others(inner: int) -> None:
    packed, x, residual = native.laid_out(numbers(70, inner)), numbers(40, inner, seed=2), numbers(40, 70, seed=3)
    alone = torch.cat([native.product(x[i : i + 1], packed, 70, None, residual[i : i + 1]) for i in range(40)])
    for rows in range(1, 41):
        assert torch.equal(native.product(x[:rows], packed, 70, None, residual[:rows]), alone[:rows])
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(native.product(x, packed, 70, None, residual), alone)
        finally:
            torch.set_num_threads(before)


@needs_it
def test_rows_may_lie_anywhere() -> None:
    weight = numbers(40, 64)
    packed, wide = native.laid_out(weight), numbers(9, 131, seed=2)
    for x in (wide[:, :64], wide[:, 3:67], wide[::2, :64], numbers(64, 9, seed=4).T, wide[:0, :64]):
        residual = numbers(80, len(x), seed=5).T[:, ::2]
        assert torch.equal(
            native.product(x, packed, 40, None, residual),
            native.product(x.contiguous(), packed, 40, None, residual.contiguous()),
        )


@needs_it
def test_what_is_not_a_number_stays_in_its_row_or_output() -> None:
    weight, x = numbers(33, 64), numbers(3, 64, seed=2)
    weight[5, 7], x[1, 3] = float("inf"), float("nan")
    found = native.product(x, native.laid_out(weight), 33, None)
    assert found[1].isnan().all() and found[[0, 2]][:, 5].isinf().all()
    rest = found[[0, 2]][:, torch.arange(33) != 5]
    assert rest.isfinite().all()


@needs_it
def test_a_large_product_by_several_threads_is_the_small_ones_side_by_side() -> None:
    """What one thread does alone (below ``ONE_THREAD`` weights) and what several share."""
    weight, x = numbers(640, 256), numbers(5, 256, seed=2)
    parts = [native.product(x, native.laid_out(weight[i : i + 64]), 64, None) for i in range(0, 640, 64)]
    assert torch.equal(native.product(x, native.laid_out(weight), 640, None), torch.cat(parts, 1))


def test_pairs_need_an_even_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="not of 63"):
        native.laid_out(numbers(8, 63))


# -- machines ----------------------------------------------------------------------------------------------------------


@needs_it
def test_the_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.why_not() is None and "native" in usable_layouts(torch.bfloat16)
    (file,) = (fresh / "foretoken").glob("native-*.so")
    native._loaded.cache_clear()
    monkeypatch.setattr(native, "_run", lambda *_: pytest.fail("compiled twice"))
    assert native.why_not() is None and file.exists()


@needs_it
def test_a_cache_that_cannot_be_written_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert native.why_not() is None


@needs_it
@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_made_again(fresh: Path, content: bytes) -> None:
    file = native._file()
    file.parent.mkdir()
    file.write_bytes(content)
    assert native.why_not() is None and len(file.read_bytes()) > 1000


def test_a_compiler_that_fails_leaves_pytorchs_products(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu_has", lambda question: "bf16" in question)
    monkeypatch.setattr(native.platform, "system", lambda: "Linux")
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CXX", "false")
    assert native._compiler() is not None
    assert (native.why_not() or "").startswith("the kernel could not be compiled: ")
    assert "native" not in usable_layouts(torch.bfloat16) and not list(fresh.rglob("*.so"))


@pytest.mark.parametrize(
    ("system", "flags", "compiler", "reason"),
    [
        ("Darwin", ("_is_avx512_bf16_supported",), "g++", "made for Linux"),
        ("Linux", (), "g++", "no AVX512-BF16"),
        ("Linux", ("_is_avx512_bf16_supported", "_is_amx_tile_supported"), "g++", "CPUs with AMX"),
        ("Linux", ("_is_avx512_bf16_supported",), None, "no C++ compiler"),
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
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_cpu_has", lambda question: question in flags)
    monkeypatch.setattr(native, "_compiler", lambda: compiler)
    assert reason in (native.why_not() or "")
    assert "native" not in usable_layouts(torch.bfloat16)


@needs_it
def test_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "from foretoken.models import native; raise SystemExit(native.why_not() is not None)"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    assert [file.name for file in (tmp_path / "foretoken").iterdir()] == [native._file().name]
