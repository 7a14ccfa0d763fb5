"""The exact toy model."""

from __future__ import annotations

import pytest
import torch

import foretoken as ft
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.other.table import TableModel


def counting(prefix: tuple[int, ...]) -> list[float]:
    """A distribution that depends on the whole prefix (unnormalised)."""
    return [1.0 + len(prefix), 2.0 + sum(prefix), 1.0]


def test_logits_are_the_tables_logs_on_every_nodes_own_prefix() -> None:
    model = TableModel(counting, vocab_size=3)
    sequence = model.open()
    assert model.prefill(sequence, [1, 2]) == {}
    tokens, parents = [2, 0, 0, 1], [-1, 0, -1, 1]
    (rows,) = model.forward([Feed(sequence, tokens, parents)])
    for prefix, row in zip(([1, 2, 2], [1, 2, 2, 0], [1, 2, 0], [1, 2, 2, 0, 1]), rows.logits, strict=True):
        weights = torch.tensor(counting(tuple(prefix)), dtype=torch.float64)
        assert torch.equal(row, (weights / weights.sum()).log())
        assert torch.equal(model.distribution(prefix), weights / weights.sum())


def test_it_keeps_the_protocol() -> None:
    model = TableModel.random(5, seed=3)
    assert isinstance(model, LanguageModel)
    sequence = model.open()
    model.forward([Feed(sequence, [1, 2, 3], [-1, 0, 0])])
    (grown,) = model.forward([Feed(sequence, [4, 4], [1, 2], wanted=1)])
    assert torch.equal(grown.logits[0], model.distribution([1, 3, 4]).log())
    model.commit(sequence, [0, 2, 4])
    assert (sequence.tokens, sequence.scratch_tokens) == ([1, 3, 4], [])
    (chain,) = model.forward([Feed(sequence, [0, 1])])
    assert torch.equal(chain.logits[1], model.distribution([1, 3, 4, 0, 1]).log())
    model.commit(sequence, ())
    assert sequence.tokens == [1, 3, 4]
    (none,) = model.forward([Feed(sequence, [0], wanted=0)])
    assert none.logits.shape == (0, 5)


def test_a_random_table_is_a_fixed_distribution_of_its_order() -> None:
    table, same, other = (TableModel.random(6, seed=seed, order=2) for seed in (1, 1, 2))
    assert torch.equal(table.distribution([3, 4, 5]), same.distribution([3, 4, 5]))
    assert torch.equal(table.distribution([3, 4, 5]), table.distribution([0, 4, 5]))
    assert not torch.equal(table.distribution([3, 4, 5]), table.distribution([3, 5, 5]))
    assert not torch.equal(table.distribution([3, 4, 5]), other.distribution([3, 4, 5]))
    assert not torch.equal(table.distribution([0]), table.distribution([0, 0]))
    assert float(table.distribution([]).sum()) == pytest.approx(1.0, abs=1e-12)
    flat, sharp = TableModel.random(6, sharpness=0.1), TableModel.random(6, sharpness=10.0)
    assert float(flat.distribution([1]).max()) < float(sharp.distribution([1]).max())
    assert torch.equal(
        TableModel.random(6, order=0).distribution([1, 2]), TableModel.random(6, order=0).distribution([])
    )


def test_it_generates() -> None:
    always_next = TableModel(lambda prefix: torch.eye(5)[(prefix[-1] + 1) % 5], vocab_size=5, eos_token_ids=[4])
    output = ft.load(always_next, drafter=None).generate([1], max_new_tokens=10)
    assert (output.token_ids, output.finish_reason) == ([2, 3, 4], "eos")
    llm = ft.load(always_next, drafter="ngram", controller="constant")
    guessed = llm.generate([0, 1, 2, 3, 0], max_new_tokens=9, ignore_eos=True)
    assert guessed.token_ids == [1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert guessed.stats.num_accepted_tokens > 0


def test_impossible_tokens_have_no_weight() -> None:
    model = TableModel(lambda prefix: [0.0, 1.0, 0.0], vocab_size=3)
    sequence = model.open()
    (rows,) = model.forward([Feed(sequence, [0])])
    assert rows.logits[0].tolist() == [-torch.inf, 0.0, -torch.inf]
    assert ft.load(model, drafter=None).generate([0], max_new_tokens=3, temperature=1.0, seed=0).token_ids == [1, 1, 1]
