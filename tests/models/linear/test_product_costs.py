"""Which layout is fastest is measured once, remembered, and chosen with a margin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foretoken.models import machine
from foretoken.models.linear import product_costs
from foretoken.models.linear.layouts import LAYOUTS, usable_layouts
from foretoken.models.linear.packing import Projection
from foretoken.models.linear.product_costs import (
    fastest_layout,
    known_times,
    least_rows,
    product_times,
    size_class,
    step_s,
)
from foretoken.models.machine import results_file
from foretoken.models.native import compiling, library

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_costs.KEPT, "results", {})
    product_costs._times.cache_clear()
    yield
    product_costs._times.cache_clear()


def times(monkeypatch: pytest.MonkeyPatch, table: dict[str, tuple[float, float, float, float]]) -> None:
    """A machine on which 1, 2, 5 and 8 rows take so long."""
    by_maker = {LAYOUTS[name]: dict(zip(product_costs.ROWS, row, strict=True)) for name, row in table.items()}
    monkeypatch.setattr(product_costs, "_measure", lambda make, *_: by_maker[make])


def test_the_fastest_is_chosen_and_ties_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("plain", "onednn", "half")
    times(monkeypatch, {"plain": (10, 10, 10, 10), "onednn": (9.8, 9.8, 9.8, 9.8), "half": (9.7, 9.7, 9.7, 9.7)})
    assert fastest_layout(BF16, [(512, 512)], names) == "plain"  # 3 % are noise
    product_costs._times.cache_clear()
    results_file().unlink()
    times(monkeypatch, {"plain": (10, 19, 38, 76), "onednn": (12, 13, 17, 20), "half": (6, 6, 7, 13)})
    assert fastest_layout(BF16, [(512, 512)], names) == "half"
    assert fastest_layout(BF16, [(512, 512)], names[:2]) == "onednn"
    assert fastest_layout(BF16, [(512, 512)], names[:1]) == fastest_layout(BF16, [], names) == "plain"


def test_kernels_of_our_own_are_chosen_unless_they_cost_much_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole forward in one call needs all of its products there."""
    names = ("plain", "onednn", "native")
    times(monkeypatch, {"plain": (10, 10, 10, 10), "onednn": (6, 6, 6, 6), "native": (11, 11, 11, 11)})
    assert fastest_layout(BF16, [(512, 512)], names) == "native"
    product_costs._times.cache_clear()
    results_file().unlink()
    times(monkeypatch, {"plain": (10, 10, 10, 10), "onednn": (6, 6, 6, 6), "native": (13, 13, 13, 13)})
    assert fastest_layout(BF16, [(512, 512)], names) == "onednn"


def test_few_rows_are_filled_up_where_more_are_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX512-BF16 five rows of a stock model were seen to cost 83 ms where one cost 117."""
    times(monkeypatch, {"plain": (143, 133, 171, 189), "onednn": (117, 121, 83, 105), "half": (60, 59, 58, 90)})
    assert least_rows("onednn", BF16, 512, 512) == 5
    assert least_rows("plain", BF16, 512, 512) == 2 and least_rows("half", BF16, 512, 512) == 5  # by a hair is enough
    product_costs._times.cache_clear()
    results_file().unlink()
    times(monkeypatch, {"onednn": (30e-6, 31e-6, 25e-6, 40e-6), "half": (60e-6, 60e-6, 50e-6, 90e-6)})
    assert least_rows("onednn", BF16, 512, 512) == 1  # filling up takes longer than is gained
    assert least_rows("half", BF16, 512, 512) == 5


def test_a_plain_step_may_cost_what_more_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"onednn": (117, 121, 83, 105)})
    assert product_costs._cost("onednn", BF16, 512, 512) == 83 + 105


def test_filled_up_rows_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [name for name in usable_layouts(BF16) if name != "native"][-1]
    if layout == "plain":
        pytest.skip("this machine has the plain layout alone")
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr("foretoken.models.linear.packing.least_rows", lambda *_: 5)
    seen: list[int] = []
    projection = Projection(weight, None, layout)
    real = projection.layout.__class__.__call__
    monkeypatch.setattr(
        projection.layout.__class__, "__call__", lambda self, x, bias: seen.append(len(x)) or real(self, x, bias)
    )
    x, residual = torch.randn(1, 16).bfloat16(), torch.zeros(1, 32, dtype=BF16)
    expected = x.float() @ weight.float().T
    for output in (projection(x), projection.plus(x, residual)):
        assert output.shape == (1, 32) and torch.allclose(output.float(), expected, rtol=2**-7, atol=2**-7)
    assert seen == [5, 5]
    projection(torch.zeros(7, 16, dtype=BF16))
    assert seen[-1] == 7


def test_sizes_share_measurements() -> None:
    assert size_class(1000, 3000) == (1024, 2048) or size_class(1000, 3000) == (1024, 4096)
    assert size_class(3, 10**6) == (product_costs.SMALLEST, product_costs.LARGEST)


def test_each_instruction_set_has_measurements_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    files = set()
    for level in library.LEVELS:
        machine.machine_key.cache_clear()
        monkeypatch.setattr(library, "level", lambda level=level: level)
        files.add(results_file())
    machine.machine_key.cache_clear()
    assert len(files) == len(library.LEVELS)


def test_a_measurement_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = product_times("plain", BF16, 256, 256)
    assert set(first) == set(product_costs.ROWS) and all(0 < s < 1 for s in first.values())
    assert list(known_times(BF16, [(250, 260), (256, 256)]).values()) == [first]
    assert not known_times(torch.float32, [(256, 256)]) and not known_times(BF16, [(1024, 256)])
    product_costs._times.cache_clear()  # another process

    def again(*_: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(product_costs, "_measure", again)
    assert product_times("plain", BF16, 250, 260) == first


def test_changed_kernels_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, {"native": (4, 4, 4, 4)})
    assert product_times("native", BF16, 256, 256)[1] == 4
    product_costs._times.cache_clear()  # another process, of another release
    monkeypatch.setattr(compiling, "FLAGS", ("-O2",))
    times(monkeypatch, {"native": (2, 2, 2, 2)})
    assert product_times("native", BF16, 256, 256)[1] == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"products": 1}', '{"products": {"plain bfloat16 256x256": 3}}'])
def test_a_damaged_file_counts_as_none(text: str) -> None:
    results_file().parent.mkdir(parents=True)
    results_file().write_text(text.replace("products", product_costs.KEPT._section))
    entry = product_times("plain", BF16, 256, 256)
    assert list(known_times(BF16, [(256, 256)]).values()) == [entry]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert product_times("plain", BF16, 256, 256)
    assert not known_times(BF16, [(256, 256)])


def test_measuring_leaves_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    product_times("plain", BF16, 256, 256)
    assert torch.get_num_threads() == before


def test_a_step_takes_the_fastest_layout_of_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"plain": (10, 10, 10, 10), "onednn": (9, 4, 4, 4), "half": (6, 6, 7, 13)}
    times(monkeypatch, table)
    monkeypatch.setattr(product_costs, "usable_layouts", lambda dtype: tuple(table))
    assert step_s(BF16, [(512, 512), (512, 512), (4096, 256)]) == 3 * 4
    product_costs._times.cache_clear()
    monkeypatch.setattr(product_costs, "usable_layouts", lambda dtype: ("plain", "half"))
    assert step_s(BF16, [(512, 512)]) == 6
