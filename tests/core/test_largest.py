"""The largest entries of rows."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.largest import BLOCK, FEWEST, largest

WIDE = FEWEST + BLOCK + 5
"""Entries that are not a whole number of blocks."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(WIDE,), (1, WIDE), (3, WIDE), (2, 3, WIDE), (4, 100)])
@pytest.mark.parametrize("count", [1, 8, 60])
def test_values_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    rows = torch.randn(shape).to(dtype)
    values, places = largest(rows, count)
    assert torch.equal(values, rows.topk(count, -1).values) and torch.equal(values, rows.gather(-1, places))
    assert all(len(set(row)) == count for row in places.reshape(-1, count).tolist())
    assert [part.shape for part in largest(rows, 0)] == [(*shape[:-1], 0)] * 2


@pytest.mark.parametrize(
    "at", [[0, 1, 2], [BLOCK - 1, BLOCK, 5 * BLOCK], [WIDE - 1, WIDE - 5, WIDE - 6], [7, WIDE - 1, 70]]
)
def test_places_wherever_they_are(at: list[int]) -> None:
    rows = torch.randn(2, WIDE).clamp(-3, 3)
    rows[:, at] = torch.tensor([6.0, 5.0, 4.0])
    assert largest(rows, 3)[1].tolist() == [at, at]


def test_what_is_impossible_comes_last_and_nan_first() -> None:
    rows = torch.full((WIDE,), -torch.inf)
    rows[[5, WIDE - 2]] = torch.tensor([1.0, 2.0])
    values, places = largest(rows, 4)
    assert places[:2].tolist() == [WIDE - 2, 5] and values[2:].tolist() == [-torch.inf] * 2
    rows[40] = torch.nan
    assert int(largest(rows, 2)[1][0]) == 40


def test_equal_entries_do_not_depend_on_the_number_of_rows() -> None:
    rows = torch.randint(0, 4, (6, WIDE)).float()
    together = largest(rows, 20)[1]
    assert all(torch.equal(together[i : i + 1], largest(rows[i : i + 1], 20)[1]) for i in range(6))
