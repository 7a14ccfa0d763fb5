"""Masks against their definition, slot by slot."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foretoken.models.cache.masks import LayerMask, RowPlan, additive_mask, ancestor_matrix, row_allowed, unseen

LAYERS = [
    LayerMask(),
    LayerMask("sliding", 3),
    LayerMask("sliding", 1),
    LayerMask("chunked", 4),
    LayerMask("sliding", 99),
]


def plan(rng: random.Random, committed: int, size: int, new: int, chain: bool = False) -> RowPlan:
    parents = [i - 1 if chain else rng.randrange(-1, i) for i in range(size)]
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return RowPlan(committed, parents, depths, new)


def may_see(row: RowPlan, node: int, slot: int, layer: LayerMask) -> bool:
    """The definition: committed tokens, ancestors and oneself, unless the layer forgets that position."""
    ancestors = {node}
    while (node_above := row.parents[min(ancestors)]) >= 0:
        ancestors.add(node_above)
    if slot < row.committed:
        key = slot
    elif slot - row.committed in ancestors:
        key = row.committed + row.depths[slot - row.committed]
    else:
        return False
    query = row.committed + row.depths[node]
    if layer.kind == "sliding":
        return query - key < layer.size
    return layer.kind == "full" or query // layer.size == key // layer.size


def brute_force(rows: list[RowPlan], layer: LayerMask, width: int, used: int) -> Tensor:
    """[b, width, used] what every *real* node may see; padding rows are left out by the caller."""
    table = torch.zeros(len(rows), width, used, dtype=torch.bool)
    for b, row in enumerate(rows):
        for i in range(row.new):
            node = len(row.parents) - row.new + i
            for slot in range(used):
                table[b, i, slot] = may_see(row, node, slot, layer)
    return table


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("chain", [False, True])
def test_one_row(layer: LayerMask, chain: bool) -> None:
    rng = random.Random(0)
    for _ in range(30):
        size = rng.randrange(1, 9)
        row = plan(rng, rng.randrange(0, 9), size, rng.randrange(1, size + 1), chain)
        used = row.committed + size
        mask = additive_mask([row], layer, row.new, used, torch.float32, torch.device("cpu"))
        expected = brute_force([row], layer, row.new, used)
        if mask is None:
            assert expected.all()
        else:
            assert mask.shape == (1, 1, row.new, used)
            assert torch.equal(mask[0] == 0, expected)
            assert mask[0][~expected].eq(unseen(torch.float32)).all()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_ragged_rows(layer: LayerMask) -> None:
    rng = random.Random(1)
    for _ in range(20):
        rows = [plan(rng, rng.randrange(0, 7), size, rng.randrange(0, size + 1)) for size in (5, 1, 8, 3)]
        width = max(row.new for row in rows) + rng.randrange(2)
        if width == 0:
            continue
        used = max(row.committed + len(row.parents) - row.new for row in rows) + width
        mask = additive_mask(rows, layer, width, used, torch.bfloat16, torch.device("cpu"))
        assert mask is not None
        expected = brute_force(rows, layer, width, used)
        for b, row in enumerate(rows):
            assert torch.equal(mask[b, 0, : row.new] == 0, expected[b, : row.new])
            # Padding must see something, or its softmax is NaN and spreads through the batch.
            assert (mask[b, 0] == 0).any(-1).all()
            assert row.new == 0 or torch.equal(torch.from_numpy(row_allowed(row, layer, used)), expected[b, : row.new])


def test_no_mask_for_one_plain_token() -> None:
    row = RowPlan(7, (-1,), (0,), 1)
    assert additive_mask([row], LayerMask(), 1, 8, torch.float32, torch.device("cpu")) is None
    assert additive_mask([row], LayerMask("sliding", 4), 1, 8, torch.float32, torch.device("cpu")) is not None


def test_ancestors() -> None:
    seen = ancestor_matrix([-1, 0, 0, 1, -1])
    assert seen.tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [True, True, False, True, False],
        [False, False, False, False, True],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_hidden_slot_has_a_finite_score_and_no_weight(dtype: torch.dtype) -> None:
    """Whatever a layer adds: a block of nothing but -inf is NaN in kernels that take a row in blocks."""
    row = RowPlan(3, [-1, -1], [0, 0], 2)
    mask = additive_mask([row], LayerMask(), 2, 5, dtype, torch.device("cpu"))
    assert mask is not None
    scores = torch.full_like(mask, torch.finfo(dtype).min / 4) + mask
    assert bool(torch.isfinite(scores).all())
    seen = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.softmax((seen + mask).float(), -1)
    assert bool((weights[mask < 0] == 0).all())
    lowest = torch.softmax((seen + mask.masked_fill(mask < 0, torch.finfo(dtype).min)).float(), -1)
    assert torch.equal(weights, lowest)


def test_a_part_of_a_text_is_its_end() -> None:
    """Ten slots of forty tokens hold the last ten: windows and chunks are counted in positions."""
    row = RowPlan(10, [-1, 0], [0, 1], 2, base=40)
    sliding = row_allowed(row, LayerMask("sliding", 5), 12)
    assert [seen.nonzero()[0].tolist() for seen in sliding] == [[6, 7, 8, 9, 10], [7, 8, 9, 10, 11]]
    chunked = row_allowed(row, LayerMask("chunked", 7), 12)  # 40 and 41 are in the chunk that begins at 35
    assert [seen.nonzero()[0].tolist() for seen in chunked] == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11]]
    assert row_allowed(row, LayerMask(), 12).sum() == 11 + 12
