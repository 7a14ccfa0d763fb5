"""The order of training blocks: a function of seed and step, and one permutation per epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.training.chat import epoch_order, rows_of_step
from foretoken.training.corpus import BlockSampler

BLOCK, BATCH, SEED = 4, 3, 7


def permuted(epoch: int, count: int, index: int) -> tuple[int, int]:
    """A block, and the phase of its epoch, as checkpoints of earlier versions continue."""
    rng = np.random.default_rng((SEED, epoch))
    return int(rng.permutation(count)[index]), int(rng.integers(BLOCK))


def test_blocks_are_those_of_one_generator_per_epoch(tmp_path: Path) -> None:
    tokens = np.arange(43, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    sampler = BlockSampler(tmp_path / "tokens.bin", "uint16", BLOCK, BATCH, SEED)
    assert sampler.num_blocks == 10
    for step in range(12):
        expected, rows = [], []
        for i in range(step * BATCH, (step + 1) * BATCH):
            block, phase = permuted(i // 10, 10, i % 10)
            expected.append(min(block * BLOCK + phase, len(tokens) - BLOCK - 1))
            rows.append(block)
        assert sampler(step)[:, 0].tolist() == expected
        assert rows_of_step(step, BATCH, 10, SEED) == rows


def test_an_epoch_is_permuted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of two million blocks takes a quarter of a second, and every row made one."""
    np.arange(43, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    sampler, made = BlockSampler(tmp_path / "tokens.bin", "uint16", BLOCK, BATCH, SEED), []
    make = np.random.default_rng

    def counted(seed: Any) -> Any:
        made.append(seed)
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    for order_of in (sampler, lambda step: rows_of_step(step, BATCH, 10, SEED)):
        epoch_order.cache_clear()
        made.clear()
        for step in range(10):
            order_of(step)
        assert made == [(SEED, epoch) for epoch in range(3)]
