"""GGUF targets: trees against chains, state against fresh decodes, room, recurrent files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gguf_files import mamba, need_packages, toy
from toys import llama

need_packages()

import foretoken as ft  # noqa: E402
from foretoken.models.base import CapabilityError, Feed, SequenceState  # noqa: E402
from foretoken.models.other.branches import Branches, Removal  # noqa: E402
from foretoken.models.other.llama_cpp_model import LlamaCppModel  # noqa: E402

ROUNDING = 1e-4
"""Logits of one text differ by less between calls with different numbers of rows: sums are taken in another order (keys
and values are kept in float32 here, so that nothing else is rounded)."""
TREE = (-1, 0, 0, 1, 1, 2)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("gguf") / "toy.gguf", vocab=32, context=128)


@pytest.fixture
def model(file: Path) -> LlamaCppModel:
    return LlamaCppModel(file, cache_type="f32")


def test_it_is_named_after_what_runs_it(file: Path) -> None:
    report = LlamaCppModel(file, threads=3).describe()
    assert (report["forward"], report["threads"], report["exactness"]) == ("llama.cpp", 3, "rounding")


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + i).randrange(32) for i in range(count)]


def fresh(model: LlamaCppModel, text: Sequence[int]) -> Tensor:
    """[V] logits behind a text, in a sequence of its own."""
    sequence = model.open()
    model.prefill(sequence, text[:-1])
    logits = model.forward([Feed(sequence, text[-1:])])[0].logits[0]
    model.release(sequence)
    return logits


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def started(model: LlamaCppModel, text: Sequence[int]) -> SequenceState:
    sequence = model.open()
    model.prefill(sequence, text)
    return sequence


def differs(model: LlamaCppModel, sequence: SequenceState) -> float:
    """How far the logits of the next token are from those of a fresh decode."""
    logits = model.forward([Feed(sequence, [3])])[0].logits[0]
    model.commit(sequence, ())
    return float((logits - fresh(model, [*sequence.tokens, 3])).abs().max())


# -- trees -----------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_transformers(model: LlamaCppModel) -> None:
    text = tokens(20)
    expected = llama(vocab=32, context=128)(torch.tensor([text])).logits[0, -1].detach()
    assert torch.allclose(fresh(model, text), expected.float(), atol=ROUNDING, rtol=0)


def test_tree_logits_are_chain_logits(model: LlamaCppModel) -> None:
    text, nodes = tokens(30), tokens(len(TREE), seed=99)
    sequence = started(model, text)
    scored = model.forward([Feed(sequence, nodes, TREE)])[0].logits
    for leaf in (3, 4, 5):
        path = path_to(TREE, leaf)
        chain = started(model, text)
        rows = model.forward([Feed(chain, [nodes[n] for n in path])])[0].logits
        assert torch.allclose(scored[path], rows, atol=ROUNDING, rtol=0)
        model.release(chain)


def test_wanted_rows_are_the_last(model: LlamaCppModel) -> None:
    sequence = started(model, tokens(5))
    whole = model.forward([Feed(sequence, tokens(4, seed=7))])[0].logits
    model.commit(sequence, ())
    some = model.forward([Feed(sequence, tokens(4, seed=7), wanted=2)])[0].logits
    assert some.shape == (2, 32)
    assert torch.allclose(whole[2:], some, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_state_is_that_of_a_fresh_decode(model: LlamaCppModel, seed: int) -> None:
    rng = random.Random(seed)
    sequences = [started(model, tokens(rng.randrange(1, 20), seed=i)) for i in range(3)]
    for _ in range(6):
        chosen = rng.sample(sequences, 2)
        for _ in range(rng.randrange(1, 3)):  # the scratch grows step by step
            feeds = []
            for sequence in chosen:
                old, count = len(sequence.scratch_tokens), rng.randrange(1, 6)
                parents = [rng.randrange(-1, old + i) for i in range(count)]
                feeds.append(Feed(sequence, [rng.randrange(32) for _ in range(count)], parents))
            rows = model.forward(feeds)
        for sequence, feed, row in zip(chosen, feeds, rows, strict=True):
            first = len(sequence.scratch_tokens) - len(feed.tokens)
            node = rng.randrange(-1, len(sequence.scratch_tokens))
            path = path_to(sequence.scratch_parents, node)
            model.commit(sequence, path)
            assert differs(model, sequence) < ROUNDING
            if node >= first:
                assert torch.allclose(row.logits[node - first], fresh(model, sequence.tokens), atol=ROUNDING, rtol=0)
        if rng.random() < 0.5:
            sequence = rng.choice(sequences)
            model.rewind(sequence, rng.randrange(0, len(sequence.tokens) + 1))
            assert differs(model, sequence) < ROUNDING


class WrongPath(Branches):
    """Keeps another sequence than the one of the accepted path."""

    def commit(self, path: Sequence[int], committed: int) -> list[Removal]:
        if path:
            self.through[path[-1]] = self.through[0 if self.through[0] != self.through[path[-1]] else -1]
        return super().commit(path, committed)


class NothingLeaves(Branches):
    """Forgets to take the rejected nodes out."""

    def commit(self, path: Sequence[int], committed: int) -> list[Removal]:
        super().commit(path, committed)
        return []


class NoCopies(Branches):
    """Forgets to let a new id join the path that it branches off."""

    def grow(self, *args: Any) -> Any:
        return super().grow(*args)[0], []


@pytest.mark.parametrize("fault", [WrongPath, NothingLeaves, NoCopies])
def test_planted_faults_are_caught(model: LlamaCppModel, fault: type[Branches]) -> None:
    sequence = started(model, tokens(10))
    right = model._branches[sequence.row]
    model._branches[sequence.row] = fault(right.main, right.spare)
    try:
        model.forward([Feed(sequence, tokens(len(TREE), seed=50), TREE)])
        model.commit(sequence, [0, 2])
        wrong = differs(model, sequence)
    except RuntimeError:  # llama.cpp itself refuses positions that do not follow
        return
    assert wrong > 10 * ROUNDING


def test_a_failed_forward_leaves_the_text(model: LlamaCppModel) -> None:
    sequence = started(model, tokens(10))
    with pytest.raises(RuntimeError, match="could not run 2 tokens"):
        model.forward([Feed(sequence, [1, 99], [-1, -1])])
    assert not sequence.scratch_tokens
    assert differs(model, sequence) < ROUNDING


# -- room ------------------------------------------------------------------------------------------------------------


def test_the_cache_grows_with_the_texts(file: Path) -> None:
    model = LlamaCppModel(file, context_length=100, cache_type="f32")
    cells = model._context.cells
    sequences = [started(model, tokens(90, seed=i)) for i in range(8)]
    model.forward([Feed(sequences[0], [1, 2], [-1, -1])])
    sequences += [started(model, tokens(90, seed=i)) for i in range(8, 12)]
    assert model._context.cells > cells
    assert sequences[0].scratch_tokens == [1, 2]  # run again in the larger cache
    model.commit(sequences[0], [1])
    assert all(differs(model, sequence) < ROUNDING for sequence in sequences)


def test_many_leaves_and_spare_ids(file: Path) -> None:
    model = LlamaCppModel(file, cache_type="f32")
    first, second = started(model, tokens(10)), started(model, tokens(10, seed=5))
    for sequence, leaves in ((first, 20), (second, 25), (first, 60), (second, 120)):
        model.forward([Feed(sequence, tokens(leaves), [-1] * leaves)])
        model.commit(sequence, [leaves - 1])
        assert differs(model, first) < ROUNDING and differs(model, second) < ROUNDING


def test_too_many_paths_is_one_line(model: LlamaCppModel) -> None:
    sequence = started(model, tokens(10))
    with pytest.raises(CapabilityError, match=r"supports 256 paths.*draft smaller trees") as error:
        model.forward([Feed(sequence, [1] * 300, [-1] * 300)])
    assert "\n" not in str(error.value)
    assert differs(model, sequence) < ROUNDING


def test_a_full_set_of_texts_needs_no_more_ids(file: Path) -> None:
    model = LlamaCppModel(file, cache_type="f32")
    sequences = [model.open() for _ in range(32)]
    model.forward([Feed(sequence, [1, 2, 3]) for sequence in sequences])
    assert (model._context.num_ids, model._free) == (32, [])
    assert model.forward([Feed(sequences[0], [])])[0].logits.shape == (0, 32)
    extra = model.open()
    model.prefill(extra, tokens(5))
    assert model._context.num_ids > 32 and differs(model, extra) < ROUNDING


def test_released_room_is_used_again(model: LlamaCppModel) -> None:
    for i in range(100):
        sequence = started(model, tokens(100, seed=i))
        model.forward([Feed(sequence, [1, 2, 3], [-1, -1, -1])])
        model.release(sequence)
    assert model._context.num_ids == 32
    assert sorted(model._free) == list(range(32))


def test_long_prompts_are_read_in_pieces(tmp_path: Path) -> None:
    model = LlamaCppModel(toy(tmp_path / "long.gguf", vocab=32, context=2048), cache_type="f32")
    sequence = started(model, tokens(1200))
    assert differs(model, sequence) < ROUNDING
    assert model.context_length == 2048


# -- what it says of itself ------------------------------------------------------------------------------------------


def test_attributes(model: LlamaCppModel, file: Path) -> None:
    assert (model.vocab_size, model.context_length, model.dtype) == (32, 128, "all F32")
    assert 0 < model.weight_bytes < file.stat().st_size
    assert model.capabilities.tree_mask and not model.capabilities.taps and not model.capabilities.layer_windows
    with pytest.raises(CapabilityError, match="returns logits only"):
        model.forward([Feed(model.open(), [1])], taps=("last",))
    with pytest.raises(ValueError, match="context_length must be at least 1"):
        LlamaCppModel(file, context_length=0)


def test_a_context_below_the_models_says_why(model: LlamaCppModel, tmp_path: Path) -> None:
    file = toy(tmp_path / "long.gguf", context=5000)
    short = ft.load(LlamaCppModel(file), drafter=None)
    words = r"context is 4096 \(llama.cpp's cache has room for 4096 of the model's 5000 .* context_length=N\) for more"
    with pytest.raises(ValueError, match=words):
        short.generate([3] * 4200, max_new_tokens=1)
    assert LlamaCppModel(file, context_length=4500).context_why == model.context_why == ""


def test_what_counts_as_a_tie(model: LlamaCppModel, file: Path) -> None:
    assert (model.rounds_like, LlamaCppModel(file).rounds_like) == (torch.float32, torch.float16)
    with pytest.raises(ValueError, match="unknown cache_type 'f8': choose one of f16, f32, q8_0"):
        LlamaCppModel(file, cache_type="f8")


def test_time_and_rows_are_counted(model: LlamaCppModel) -> None:
    sequence = started(model, tokens(10))
    before = model.run_s, model.run_rows
    model.forward([Feed(sequence, [1, 2, 3])])
    assert model.run_s > before[0] and model.run_rows == before[1] + 3


def test_recurrent_files_decode_plainly(tmp_path: Path) -> None:
    model = LlamaCppModel(mamba(tmp_path / "mamba.gguf"))
    assert not model.capabilities.rollback and not model.capabilities.tree_mask
    assert "mamba has recurrent layers" in model.capabilities.missing["rollback"]
    text = tokens(12)
    sequence = started(model, text[:4])
    for token in text[4:]:
        rows = model.forward([Feed(sequence, [token])])[0].logits
        model.commit(sequence, [0])
    assert torch.allclose(rows[0], fresh(model, text), atol=ROUNDING)
    with pytest.raises(CapabilityError, match="only one token at a time"):
        model.forward([Feed(sequence, [1, 2])])
    model.rewind(sequence, 6)
    assert sequence.tokens == text[:6]
    again = model.forward([Feed(sequence, text[6:7])])[0].logits[0]
    assert torch.allclose(again, fresh(model, text[:7]), atol=ROUNDING)
