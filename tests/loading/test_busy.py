"""One thread against all of them on a busy machine: by a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import load
from foretoken.loading.measured import busy
from foretoken.loading.measured.busy import settle_threads
from foretoken.models import machine
from foretoken.models.base import Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.machine import is_busy
from toys import fixed_tables, llama


class Timed(HuggingFaceModel):
    """A model whose steps take made-up seconds, by the number of threads."""

    seconds: dict[int, float]
    now = 0.0
    steps = 0

    def forward(self, feeds: Sequence[Feed], *more: Any) -> Any:
        """Run, and let the time pass."""
        Timed.now += self.seconds[torch.get_num_threads()]
        Timed.steps += 1
        return super().forward(feeds, *more)


def timed(all_s: float, one_s: float) -> Timed:
    target = Timed(llama())
    target.seconds = {2: all_s, 1: one_s}
    Timed.now, Timed.steps = 0.0, 0
    return target


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, and nobody has chosen."""
    before = torch.get_num_threads()
    for name in busy.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def settled(target: Any, is_it: bool = True) -> str | None:
    return settle_threads(target, lambda: is_it, lambda: Timed.now)


def test_one_thread_is_used_where_it_is_faster() -> None:
    line = settled(timed(0.712, 0.093))
    assert torch.get_num_threads() == 1
    assert line is not None and "2 threads take 712 ms" in line and "one takes 93" in line and "\n" not in line
    assert "OMP_NUM_THREADS=2" in line and Timed.now < 3.0  # steps as slow as that are few


@pytest.mark.parametrize(("all_s", "one_s"), [(0.010, 0.018), (0.010, 0.009)])
def test_all_threads_stay_where_they_are_as_good(all_s: float, one_s: float) -> None:
    assert settled(timed(all_s, one_s)) is None and torch.get_num_threads() == 2


@pytest.mark.parametrize("name", busy.VARIABLES)
def test_the_user_has_the_last_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    assert settled(timed(0.7, 0.1)) is None and torch.get_num_threads() == 2 and Timed.steps == 0


def test_nothing_is_measured_on_a_quiet_machine_or_without_a_network() -> None:
    assert settled(timed(0.7, 0.1), False) is None and Timed.steps == 0
    assert settled(fixed_tables([0.5, 0.5], [0.5, 0.5])[0]) is None
    torch.set_num_threads(1)
    assert settled(timed(0.7, 0.1)) is None and Timed.steps == 0


def test_texts_stay_the_same_and_nothing_is_left_behind() -> None:
    target = timed(0.7, 0.1)
    expected = load(HuggingFaceModel(llama()), drafter=None).generate([1, 2, 3], max_new_tokens=8).token_ids
    assert settled(target) is not None and target.kv_bytes == 0
    assert load(target, drafter=None).generate([1, 2, 3], max_new_tokens=8).token_ids == expected


@pytest.mark.parametrize(
    ("text", "load_of_a_minute", "expected"),
    [
        ("some avg10=61.20 avg60=1.00 avg300=0.10 total=1\nfull avg10=0.00 total=0\n", 0.0, True),
        ("some avg10=3.00 avg60=90.00 avg300=0.10 total=1\n", 99.0, False),
        ("odd\n", 99.0, True),
        (None, 99.0, True),
        (None, 0.1, False),
    ],
)
def test_what_counts_as_busy(
    text: str | None, load_of_a_minute: float, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "PRESSURE", file)
    monkeypatch.setattr("os.getloadavg", lambda: (load_of_a_minute, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert is_busy() is expected


def test_a_thread_that_is_started_later_takes_over_the_choice() -> None:
    """A server settles it in one thread, and the engine runs in another."""
    counts: list[int] = []

    def settle() -> None:
        settled(timed(0.7, 0.1))

    for work in (settle, lambda: counts.append(torch.get_num_threads())):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert counts == [1]
