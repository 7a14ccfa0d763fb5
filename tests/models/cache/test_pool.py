"""Caches in bands: whatever moves, every row keeps what a fresh prefill makes, and memory follows the tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.models.base import Feed, Rows, SequenceState
from foretoken.models.cache.fixed import FixedCache
from foretoken.models.cache.pool import SHORT, SLACK, CachePool, by_cache
from foretoken.models.cache.rectangle import CHUNK
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from toys import llama

CONTEXT = 4096
TAPS = ["layer:0", "layer:1", "last"]
both_forwards = pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])


def model(lean: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(llama(context=CONTEXT), lean=lean)


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32) for _ in range(length)]


def stored(sequence: SequenceState) -> list[Tensor]:
    """Keys and values [H, n, D] of the committed tokens, by layer."""
    count = len(sequence.tokens)
    stores = (sequence.cache.keys, sequence.cache.values)
    return [buffer[sequence.row, :, :count] for store in stores for buffer in store]


@cache
def fresh(tokens: tuple[int, ...], lean: bool) -> tuple[Tensor, ...]:
    """By the same forward: Transformers' own computes rotary embeddings in float32."""
    alone = model(lean)
    sequence = alone.open()
    alone.prefill(sequence, tokens)
    return tuple(part.clone() for part in stored(sequence))


def check(target: HuggingFaceModel) -> None:
    """Every text's row is its own, and holds what reading the text alone gives."""
    for band in target.pool.caches:
        assert [sequence.row for sequence in band.sequences] == list(range(len(band.sequences)))
        assert all(sequence.cache is band for sequence in band.sequences)
        assert len(band.sequences) <= band.num_rows
    for sequence in target.pool.sequences:
        assert sequence.num_slots <= sequence.cache.num_slots
        if sequence.tokens:
            for cached, expected in zip(stored(sequence), fresh(tuple(sequence.tokens), target.is_lean), strict=True):
                torch.testing.assert_close(cached, expected, rtol=0, atol=1e-11)


def tree(rng: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree below the last committed token."""
    return [rng.randrange(32) for _ in range(nodes)], [rng.randrange(-1, i) for i in range(nodes)]


def path(rng: random.Random, sequence: SequenceState) -> list[int]:
    """A random path of the scratch, from the last committed token down."""
    nodes: list[int] = []
    while True:
        above = nodes[-1] if nodes else -1
        children = [i for i, parent in enumerate(sequence.scratch_parents) if parent == above]
        if not children or rng.random() < 0.2:
            return nodes
        nodes.append(rng.choice(children))


# -- contents --------------------------------------------------------------------------------------------------------


@both_forwards
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_equal_fresh_prefills_whatever_comes_grows_and_goes(lean: bool, seed: int) -> None:
    rng = random.Random(seed)
    target = model(lean)
    texts: list[SequenceState] = []
    seen: set[int] = set()
    for step in range(60):
        choice = rng.random()
        if len(texts) < 2 or (choice < 0.25 and len(texts) < 9):
            opened = target.open()
            target.prefill(opened, text(rng.choice([0, 1, 3, 40, 63, 64, 65, 200, 500, 900]), rng.randrange(40)))
            texts.append(opened)
        elif choice < 0.4:
            target.release(texts.pop(rng.randrange(len(texts))))
        else:
            chosen = rng.sample(texts, rng.randint(1, len(texts)))
            target.forward([Feed(sequence, *tree(rng, rng.choice([1, 2, 9, 70]))) for sequence in chosen])
            for sequence in chosen:
                target.commit(sequence, path(rng, sequence))
        seen.add(len(target.pool.caches))
        if step % 6 == 5:
            check(target)
    check(target)
    assert max(seen) > 1, "no text ever had to move"
    for sequence in texts:
        target.release(sequence)
    assert target.kv_bytes == 0 and len(target.pool.caches) == 1


def in_two_bands(lean: bool) -> tuple[HuggingFaceModel, list[SequenceState]]:
    """Five short texts and two long ones, the short ones not in the order of their rows."""
    target = model(lean)
    texts = [target.open() for _ in range(8)]
    for seed, (sequence, length) in enumerate(zip(texts, (5, 700, 33, 1, 60, 900, 12, 20), strict=True)):
        target.prefill(sequence, text(length, seed))
    target.release(texts.pop(2))
    assert len(by_cache(texts)) > 1
    return target, texts


def nearly_equal(left: Rows, right: Rows) -> None:
    torch.testing.assert_close(left.logits, right.logits, rtol=0, atol=1e-10)
    assert left.taps.keys() == right.taps.keys()
    for name, rows in left.taps.items():
        torch.testing.assert_close(rows, right.taps[name], rtol=0, atol=1e-10)


@both_forwards
@pytest.mark.parametrize("idle", [(), (0,), (2, 3), (0, 1, 4)], ids=["all", "first", "middle", "several"])
def test_one_forward_over_several_bands_equals_separate_ones(lean: bool, idle: Sequence[int]) -> None:
    """Trees of different sizes, taps, and rows between them that take no part."""
    rng = random.Random(7)
    trees = [tree(rng, nodes) for nodes in (4, 1, 9, 2, 6, 3, 30)]
    together, texts = in_two_bands(lean)
    chosen = [i for i in range(len(texts)) if i not in idle]
    rng.shuffle(chosen)
    outputs = together.forward([Feed(texts[i], *trees[i]) for i in chosen], TAPS)
    separate, others = in_two_bands(lean)
    for i, rows in zip(chosen, outputs, strict=True):
        nearly_equal(rows, separate.forward([Feed(others[i], *trees[i])], TAPS)[0])
    for i in chosen:
        keep = path(random.Random(i), texts[i])
        together.commit(texts[i], keep)
        separate.commit(others[i], keep)
    check(together)
    check(separate)


@both_forwards
def test_parts_of_the_logits_and_growing_scratch_survive_a_move(lean: bool) -> None:
    """A scratch tree that is continued, and so takes its text to another rectangle, means what it meant."""
    target, texts = in_two_bands(lean)
    short, alone = texts[0], model(lean)
    other = alone.open()
    alone.prefill(other, short.tokens)
    for nodes, parents, wanted in ((tree(random.Random(1), 8)[0], None, None), (text(300, 1), None, 2), ([5], [3], 1)):
        moved = target.forward([Feed(short, nodes, parents, wanted), Feed(texts[4], [7], [0] * 0 or None)], TAPS)[0]
        nearly_equal(moved, alone.forward([Feed(other, nodes, parents, wanted)], TAPS)[0])
        assert short.scratch_tokens == other.scratch_tokens
    keep = [0, 1, 2, 3, len(short.scratch_tokens) - 1]
    target.commit(short, keep)
    target.commit(texts[4], [])
    check(target)


def test_a_text_that_outgrows_its_band_moves_and_takes_its_tokens_along() -> None:
    target = model()
    growing, *others = (target.open() for _ in range(6))
    for seed, sequence in enumerate(others):
        target.prefill(sequence, text(50, seed))
    first, bands = growing.cache, {id(growing.cache)}
    rng = random.Random(3)
    while len(growing.tokens) < 1_000:
        target.forward(
            [Feed(growing, text(17, len(growing.tokens))), *(Feed(sequence, [1], wanted=0) for sequence in others)]
        )
        target.commit(growing, range(rng.randint(8, 17)))
        for sequence in others:
            target.commit(sequence, [])
        bands.add(id(growing.cache))
    assert growing.cache is not first and all(sequence.cache is first for sequence in others)
    assert first.num_slots <= SHORT
    check(target)


def test_new_texts_stay_out_of_a_long_rectangle() -> None:
    target = model()
    long = target.open()
    target.prefill(long, text(1_500, 0))
    short = target.open()
    target.prefill(short, text(20, 1))
    assert short.cache is not long.cache and short.cache.num_slots == CHUNK
    check(target)


def test_texts_of_like_length_share_a_rectangle() -> None:
    target = model()
    texts = [target.open() for _ in range(4)]
    for seed, sequence in enumerate(texts):
        target.prefill(sequence, text(700 + 10 * seed, seed))
    needed = sum(len(sequence.tokens) for sequence in texts) * target.kv_bytes_per_token
    assert target.kv_bytes <= SLACK * needed
    assert len({id(sequence.cache) for sequence in texts}) <= 2
    check(target)


def test_a_forward_that_fails_leaves_every_band_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target, texts = in_two_bands(lean=True)
    before = [(list(sequence.tokens), list(sequence.scratch_tokens)) for sequence in texts]

    def failing(calls: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(target.forwards, "run_all", failing)
        with pytest.raises(MemoryError, match="planted"):
            target.forward([Feed(sequence, text(200, i)) for i, sequence in enumerate(texts)])
    assert [(sequence.tokens, sequence.scratch_tokens) for sequence in texts] == before
    check(target)
    target.forward([Feed(sequence, [3, 4]) for sequence in texts])
    for sequence in texts:
        target.commit(sequence, [0])
    check(target)


# -- memory ----------------------------------------------------------------------------------------------------------


@both_forwards
@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_long_text_among_short_ones_costs_what_its_tokens_need(lean: bool, place: int) -> None:
    target = model(lean)
    texts = [target.open() for _ in range(16)]
    for i, sequence in enumerate(texts):
        target.prefill(sequence, text(3_000 if i == place else 100, i))
    needed = (3_000 + 15 * 100) * target.kv_bytes_per_token
    assert needed <= target.kv_bytes <= target.kv_peak_bytes <= 1.5 * needed
    for sequence in texts[::2]:
        target.release(sequence)
    check(target)
    for sequence in texts[1::2]:
        target.release(sequence)
    assert target.kv_bytes == 0


def test_what_a_long_text_held_is_given_back_when_it_ends() -> None:
    target = model()
    texts = [target.open() for _ in range(4)]
    for i, sequence in enumerate(texts):
        target.prefill(sequence, text(2_000 if i == 1 else 60, i))
    target.release(texts.pop(1))
    needed = sum(len(sequence.tokens) for sequence in texts) * target.kv_bytes_per_token
    assert target.kv_bytes <= 4 * needed  # a rectangle grows by chunks of 64 slots, and a text has 60 tokens
    check(target)


def test_memory_follows_a_crowd_that_comes_and_goes() -> None:
    target = model()
    texts = [target.open() for _ in range(40)]
    for i, sequence in enumerate(texts):
        target.prefill(sequence, text(90, i % 5))
    full = target.kv_bytes
    while len(texts) > 4:
        target.release(texts.pop(len(texts) // 2))
    assert target.kv_bytes <= full / 4
    check(target)


# -- networks over hidden states -------------------------------------------------------------------------------------


def test_networks_over_hidden_states_run_over_several_bands() -> None:
    target = HuggingFaceModel(llama(dtype=torch.float32, context=CONTEXT))
    parts = TargetParts(target)
    net = EagleNet(EagleConfig(**dataclasses.asdict(LayerConfig.of_target(parts.config))))
    together, alone = FeatureModel(net, parts, target), FeatureModel(net, parts, target)
    states = torch.randn(700, parts.hidden_size, generator=torch.Generator().manual_seed(0))
    feeds, expected = [], []
    for seed, length in enumerate((700, 5, 40)):
        first, second = together.open(), alone.open()
        for model_, sequence in ((together, first), (alone, second)):
            model_.forward([Feed(sequence, text(length, seed), wanted=0, states=states[:length])])
            model_.commit(sequence, range(length))
        feeds.append(Feed(first, [3, 4], states=states[:2]))
        expected += alone.forward([Feed(second, [3, 4], states=states[:2])])
    assert len(together.pool.caches) > 1
    for rows, right in zip(together.forward(feeds), expected, strict=True):
        torch.testing.assert_close(rows.logits, right.logits)


@both_forwards
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_numbers_that_are_not_finite_leave_with_their_text(lean: bool, leaves: int) -> None:
    """Attention multiplies the slots that a mask hides by 0: what was there must be no NaN, or the next text has it."""
    shared = model(lean)
    texts = [shared.open() for _ in range(3)]
    for index, sequence in enumerate(texts):
        shared.prefill(sequence, text(40, index))
    gone = texts.pop(leaves)
    with torch.inference_mode():
        for buffer in (*gone.cache.keys, *gone.cache.values):
            buffer[gone.row, :, 20:] = torch.nan
    shared.release(gone)
    fresh_one = shared.open()
    shared.prefill(fresh_one, text(5, 9))
    for row in shared.forward([Feed(sequence, [3]) for sequence in (*texts, fresh_one)]):
        assert row.logits.isfinite().all()


def test_the_row_of_a_cache_that_keeps_its_place_is_cleared_too() -> None:
    cache = FixedCache(2, 600)
    pool = CachePool(cache)
    first = pool.open(SequenceState(row=0))
    cache.load(0, 0, torch.full((2, 5, 4), torch.nan), torch.full((2, 5, 4), torch.inf))
    pool.release(first)
    assert all(part.isfinite().all() for part in cache._parts())
