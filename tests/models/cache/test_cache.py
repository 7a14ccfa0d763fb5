"""The preallocated cache by itself: where it writes, what a commit moves, what growing keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.models.cache.rectangle import CHUNK, TreeCache

HEADS, K_DIM, V_DIM = 2, 3, 5
LAYERS = 2


def numbered(rows: int, slots: int, dim: int, base: float = 0.0) -> Tensor:
    """[rows, H, slots, dim] where every slot of a row holds its own number."""
    number = base + 1000.0 * torch.arange(rows)[:, None, None, None] + torch.arange(slots)[None, None, :, None]
    return number.expand(rows, HEADS, slots, dim).clone()


def filled(rows: int, slots: int) -> TreeCache:
    cache = TreeCache(LAYERS, 4 * CHUNK)
    cache.plan(0, rows, [0] * rows, slots, slots)
    for layer in range(LAYERS):
        cache.update(numbered(rows, slots, K_DIM), numbered(rows, slots, V_DIM, 0.5), layer)
    return cache


def slots_of(cache: TreeCache, row: int, count: int) -> list[float]:
    """The numbers in a row's first slots, the same in both stores of every layer and head."""
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert keys is not None
        assert values is not None
        assert torch.equal(keys[row, :, :count, :1], values[row, :, :count, :1] - 0.5)
        assert (keys[row] == keys[row, :1, :, :1]).all()
    assert cache.keys[0] is not None
    return cache.keys[0][row, 0, :count, 0].tolist()


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ([], []),
        ([0, 1, 2], [3, 4, 5]),
        ([2], [5]),
        ([1, 2, 3], [4, 5, 6]),  # every move overlaps the next
        ([0, 2, 3, 6], [3, 5, 6, 9]),
        ([0, 1, 6], [3, 4, 9]),
    ],
)
def test_keep_gathers_a_path(path: list[int], moved: list[float]) -> None:
    cache = filled(2, 10)
    cache.keep(1, 3, path)
    assert slots_of(cache, 0, 10) == [float(i) for i in range(10)]
    assert slots_of(cache, 1, 3 + len(path)) == [1000.0, 1001.0, 1002.0, *(1000.0 + slot for slot in moved)]


def test_growing_keeps_contents_and_fills_with_zeros() -> None:
    cache = filled(2, 10)
    cache.reserve(5, CHUNK + 1)
    assert (cache.num_rows, cache.num_slots) == (5, 2 * CHUNK)
    assert cache.keys[0] is not None
    assert cache.keys[0].shape == (5, HEADS, 2 * CHUNK, K_DIM)
    for store, dim, base in ((cache.keys, K_DIM, 0.0), (cache.values, V_DIM, 0.5)):
        for buffer in store:
            assert buffer is not None
            assert torch.equal(buffer[:2, :, :10], numbered(2, 10, dim, base))
            assert not buffer[2:].any()
            assert not buffer[:, :, 10:].any()


def test_growing_doubles_towards_the_limit_and_never_shrinks() -> None:
    cache = TreeCache(1, max_slots=3 * CHUNK)
    sizes = []
    for slots in (1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 5, 4 * CHUNK):
        cache.reserve(1, slots)
        sizes.append(cache.num_slots // CHUNK)
    assert sizes == [1, 1, 2, 3, 3, 4]


def test_ragged_writes_go_behind_each_rows_own_text() -> None:
    cache = filled(3, 4)
    cache.plan(0, 3, [4, 1, 2], 2, 6)
    new = numbered(3, 2, K_DIM, 50.0)
    keys, _ = cache.update(new, numbered(3, 2, V_DIM, 50.5), 0)
    assert keys.shape == (3, HEADS, 6, K_DIM)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 50, 51]
    assert keys[1, 0, :, 0].tolist() == [1000, 1050, 1051, 1003, 0, 0]
    assert keys[2, 0, :, 0].tolist() == [2000, 2001, 2050, 2051, 0, 0]


def test_writing_some_rows_leaves_the_others_alone() -> None:
    cache = filled(4, 4)
    cache.plan(1, 3, [2, 4], 1, 5)
    keys, _ = cache.update(numbered(2, 1, K_DIM, 70.0), numbered(2, 1, V_DIM, 70.5), 1)
    assert keys[:, 0, :, 0].tolist() == [[1000, 1001, 70, 1003, 0], [2000, 2001, 2002, 2003, 1070]]
    whole = cache.keys[1]
    assert whole is not None
    assert whole[0, 0, :5, 0].tolist() == [0, 1, 2, 3, 0]
    assert whole[3, 0, :5, 0].tolist() == [3000, 3001, 3002, 3003, 0]


def test_a_row_moves_with_its_slots() -> None:
    cache = filled(3, 6)
    cache.move_row(2, 0, 4)
    assert slots_of(cache, 0, 6) == [2000.0, 2001.0, 2002.0, 2003.0, 4.0, 5.0]
    assert slots_of(cache, 1, 6) == [1000.0 + i for i in range(6)]


def test_size_in_bytes() -> None:
    cache = TreeCache(LAYERS, CHUNK)
    assert cache.num_bytes() == 0
    cache = filled(2, 3)
    assert cache.num_bytes() == LAYERS * 2 * HEADS * CHUNK * (K_DIM + V_DIM) * 4
