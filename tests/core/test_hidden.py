"""Hidden states are references until they are read, and keep no more in memory than is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foretoken.core import HiddenStates, HiddenText, hidden
from foretoken.core.hidden import HELD, RECENT

TAPS = ("last", "layer:2")


def forward(rows: int, width: int = 1, size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """What a forward hands out for a batch: [rows, width, size] by tap."""
    generator = torch.Generator().manual_seed(seed)
    return {tap: torch.randn(rows, width, size, generator=generator) for tap in TAPS}


def is_view_of(rows: Tensor, states: Tensor) -> bool:
    return rows.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 3], []])
def test_rows_are_those_of_the_forward(path: list[int]) -> None:
    """The second text of three, and a path of its nodes; neighbours are not even copied when they are read."""
    states = forward(3, 4)
    second = HiddenStates(states, range(4, 8))
    assert torch.equal(second["last"], states["last"][1])
    kept = second.at(path)
    assert kept.num_rows == len(path) and torch.equal(kept["layer:2"], states["layer:2"][1][path])
    assert is_view_of(kept["last"], states["last"]) == (path != [0, 2, 3])


def test_some_of_some_rows() -> None:
    states = forward(2, 6)
    some = HiddenStates(states, range(6, 12)).at([0, 2, 3, 5])
    assert torch.equal(some.at(slice(1, None))["last"], states["last"][1][[2, 3, 5]])
    assert torch.equal(some.at([1, 3])["last"], states["last"][1][[2, 5]])
    assert set(some) == set(TAPS) and set(some.only(["last"])) == {"last"}
    assert "last" in some and "layer:9" not in some


def test_tensors_of_one_text_are_all_its_rows() -> None:
    rows = {"last": torch.arange(6.0).view(3, 2)}
    whole = HiddenStates.of(rows)
    assert torch.equal(whole["last"], rows["last"]) and whole.num_rows == whole.num_held == 3
    assert HiddenStates.of(whole) is whole and HiddenStates.of({}).num_rows == 0


@pytest.mark.parametrize("sizes", [[5, 1, 1, 3, 1], [1] * (2 * RECENT + 3)])
@pytest.mark.parametrize("batch", [1, 4, 4 * HELD])
def test_a_text_is_its_parts_one_after_the_other(sizes: list[int], batch: int) -> None:
    """The text may be cut anywhere, and parts of it may have been copied meanwhile."""
    text, whole = HiddenText(), []
    for number, size in enumerate(sizes):
        states = forward(batch, size, seed=number)
        text.add(HiddenStates(states, range(size)))
        whole.append(states["last"][0])
    expected = torch.cat(whole)
    assert text.count == len(expected)
    assert torch.equal(text.copied()["last"], expected)
    text.drop(2)
    assert torch.equal(text.first(4)["last"], expected[2:6])
    text.drop(3)
    assert torch.equal(text.first(text.count)["last"], expected[5:])
    text.add(HiddenStates.of({tap: torch.ones(1, 3) for tap in TAPS}))
    assert torch.equal(text.copied()["last"], torch.cat([expected[5:], torch.ones(1, 3)]))
    text.drop(1 << 30)
    assert text.count == 0 and text.copied() == {} and text.first(0) == {}


def test_a_text_in_a_large_batch_does_not_keep_the_others() -> None:
    """One row in each of many rounds of 32 texts: all but the last rounds are copied out."""
    text, batch = HiddenText(), 4 * HELD
    for number in range(10 * RECENT):
        text.add(HiddenStates(forward(batch, seed=number), [number % batch]))
    assert text.count == 10 * RECENT
    assert sum(part.num_held for part in text.parts) <= text.count + RECENT * batch


def test_a_text_in_a_small_batch_is_never_copied() -> None:
    rounds = [forward(HELD, seed=number) for number in range(3 * RECENT)]
    text = HiddenText()
    for states in rounds:
        text.add(HiddenStates(states, range(2, 3)))
    assert all(is_view_of(part["last"], states["last"]) for part, states in zip(text.parts, rounds, strict=True))
    copies = text.copied()
    assert copies["last"].untyped_storage().nbytes() == copies["last"].nbytes


def test_a_text_read_in_pieces_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter catches up 256 positions a round, while every round adds some: not all that waits is copied again."""
    copied, joined = 0, hidden._joined

    def counted(parts: Sequence[HiddenStates]) -> dict[str, Tensor]:
        nonlocal copied
        copied += sum(part.num_rows for part in parts)
        return joined(parts)

    monkeypatch.setattr(hidden, "_joined", counted)
    text, whole, read = HiddenText(), [], []
    sizes = [512] * 16 + [3] * 40
    for number, size in enumerate(sizes):
        states = forward(1, size, seed=number)
        text.add(HiddenStates(states, range(size)))
        whole.append(states["last"][0])
        if number >= 15:
            piece = min(256 if number > 15 else 255, text.count)  # never where a part begins
            read.append(text.first(piece)["last"])
            assert len(read[-1]) == piece
            text.drop(piece)
    assert torch.equal(torch.cat(read), torch.cat(whole)) and text.count == 0
    assert 0 < copied < 2 * sum(sizes)
