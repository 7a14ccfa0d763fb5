"""One timer and one file of results: what is timed, what is kept, and what is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from foretoken.models import machine
from foretoken.models.machine import KeptResults, timed


def test_copies_do_not_fit_into_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Twice the largest cache that Linux tells of, within bounds."""
    for index, size in enumerate(("48K", "2048K", "65536K", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.cache_bytes.__wrapped__() == 128 * 2**20
    (tmp_path / "index3" / "size").write_text("999999K")
    assert machine.cache_bytes.__wrapped__() == machine.MOST_COPIES_BYTES
    monkeypatch.setattr(machine, "CACHES", tmp_path / "nowhere")
    assert machine.cache_bytes.__wrapped__() == machine.COPIES_BYTES


def test_other_processes_are_not_counted() -> None:
    """One thread is timed by its own clock where that is fine enough: waiting for a processor takes none of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = timed({"waits": [lambda: time.sleep(0.05)]}, 1)["waits"]
    finally:
        torch.set_num_threads(before)
    assert machine._THREAD_CLOCK is time.perf_counter or seconds < 0.04


@pytest.mark.parametrize(("quick", "expected"), [((2, 5, 9), 1.0), ((1, 2, 5), 9.0), ((2, 5), 9.0)])
def test_a_time_is_that_of_the_quickest_quarter(
    quick: tuple[int, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of eight calls counts, and the one that warms up does not; a clock of our own."""
    clock, calls = [0.0], [0]

    def work() -> None:
        calls[0] += 1
        clock[0] += 1.0 if calls[0] in quick else 9.0

    monkeypatch.setattr(machine, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(machine, "_THREAD_CLOCK", lambda: clock[0])
    assert timed({"work": [work], "nothing": [lambda: None]}, 8) == {"work": expected, "nothing": 0.0}


def kept(tmp_path: Path, kind: str = "one", stamp: str = "") -> KeptResults:
    return KeptResults(kind, lambda: stamp, lambda: tmp_path / "machine.json")


def test_results_of_several_kinds_are_in_one_file(tmp_path: Path) -> None:
    kept(tmp_path).keep("a", [1])
    kept(tmp_path, "two").keep("a", {"b": 2})
    kept(tmp_path).keep("c", 3)
    assert kept(tmp_path).stored() == {"a": [1], "c": 3} and kept(tmp_path, "two").read("a") == {"b": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]


def test_what_is_small_is_known_to_this_process_alone(tmp_path: Path) -> None:
    results = kept(tmp_path)
    results.keep("a", [1], in_file=False)
    assert results.read("a") == [1] and kept(tmp_path).read("a") is None and not list(tmp_path.iterdir())


def test_results_of_other_stamps_are_kept_apart_as_long_as_they_are_few(tmp_path: Path) -> None:
    """Two installations take turns; what an old one has left does not stay forever."""
    kept(tmp_path, "two").keep("a", 0)
    for stamp in "abcde":
        kept(tmp_path, stamp=stamp).keep("name", stamp)
    kept(tmp_path, stamp="b").keep("other", 1)
    results = [kept(tmp_path, stamp=stamp).stored() for stamp in "abcde"]
    assert results == [{}, {"name": "b", "other": 1}, {"name": "c"}, {"name": "d"}, {"name": "e"}]
    assert kept(tmp_path, "two").stored() == {"a": 0}


def test_the_oldest_results_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_KEPT", 2)
    for name in "abc":
        kept(tmp_path).keep(name, name)
    assert kept(tmp_path).stored() == {"b": "b", "c": "c"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"one": 1}', '{"one": []}'])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    assert kept(tmp_path).stored() == {}
    kept(tmp_path).keep("a", 1)
    assert kept(tmp_path).stored() == {"a": 1}
