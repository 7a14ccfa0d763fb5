"""The three caches: golden drafts, thresholds, saving, and damaged files."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import LoadingContext
from foretoken.methods.drafters import ngram_cache, ngram_counts
from foretoken.methods.drafters.datastore import joined
from foretoken.methods.drafters.ngram_cache import (
    LAX,
    STRICT,
    NgramCacheDrafter,
    best_follower,
    build_static_cache,
)
from foretoken.methods.drafters.ngram_counts import CountTable, NgramCache, key_of
from foretoken.methods.verifiers.base import Verifier
from foretoken.methods.verifiers.match import MatchVerifier
from toys import FALSE_ALARM, engine, joint_distribution, llamas, outputs, sampled_p_value, tables

GOLDEN = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7, 8, 5, 6]


class Words:
    """A tokenizer of single words, enough for files."""

    def __init__(self, words: str = "a b c d e") -> None:
        self.vocab = {word: i for i, word in enumerate(words.split())}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self.vocab[word] for word in text.split()] for text in texts]}


def context(tokens: list[int]) -> Context:
    return Context(0, tokens, len(tokens), Sampler(SamplingParams(), len(tokens)), Rng(0))


def draft(drafter: NgramCacheDrafter, tokens: list[int], **budget: Any) -> list[int]:
    return list(drafter.propose(context(tokens), Budget(**{"max_depth": 8, **budget})).tokens[1:])


def test_golden_draft() -> None:
    assert draft(NgramCacheDrafter(k=4), GOLDEN) == [7, 9, 5, 6]


def test_counts_grow_with_the_text_as_if_made_at_once() -> None:
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(200)]
    whole, grown = NgramCache(), NgramCache()
    whole.count(text)
    for end in range(0, 201, 7):
        grown.count(text[:end], max(0, end - 7))
    grown.count(text, 196)
    assert {k: (r.total, r.most, r.counts) for k, r in whole.new.items()} == {
        k: (r.total, r.most, r.counts) for k, r in grown.new.items()
    }
    truth = Counter(tuple(text[i : i + 4]) for i in range(len(text) - 3))
    for gram, count in truth.items():
        followers = whole.followers(gram[:3])
        assert followers is not None and followers.by_token()[gram[3]] == count == followers.of(gram[3])


def test_table_of_a_text_equals_counting_it() -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(3) for _ in range(n)] for n in (40, 1, 2, 25)]
    cache = NgramCache()
    for document in documents:
        cache.count(document)
    table = CountTable.of_text(joined(documents), range(1, 5))
    frozen = cache.frozen()
    for name in ("keys", "tokens", "counts"):
        assert np.array_equal(getattr(table, name), getattr(frozen, name)), name
    assert int(key_of([2, 0, 1])) in table.keys.tolist()


@pytest.mark.parametrize(
    ("followers", "thresholds", "expected"),
    [
        ([1, 1], LAX, 1),  # n = 1: two samples, all the same
        ([1], LAX, None),  # too few samples for n = 1
        ([1, 2, 1], LAX, 1),  # 67 % of at least 66 %
        ([1, 2], LAX, None),
        ([1, 1, 1], STRICT, None),  # four samples wanted
        ([1, 1, 1, 2], STRICT, 1),  # 75 % of at least 75 %
        ([1, 1, 1, 2, 2], STRICT, None),
    ],
)
def test_thresholds(followers: list[int], thresholds: Any, expected: int | None) -> None:
    cache = NgramCache(range(1, 2))
    for token in followers:
        cache.count([7, token])
    follower = best_follower(cache, [7], thresholds, None)
    assert (None if follower is None else follower[0]) == expected


def test_the_static_cache_weighs_candidates_and_ties_go_to_the_smaller_id() -> None:
    cache = NgramCache(range(2, 3))
    for token in (4, 3):
        cache.count([8, 9, token])
    follower = best_follower(cache, [8, 9], LAX, None)
    assert follower == (3, 0.5)
    static = NgramCache(range(2, 3))
    static.count([8, 9, 4])
    assert best_follower(cache, [8, 9], LAX, static.followers([8, 9])) == (4, 0.5)


def test_context_before_dynamic_before_static(tmp_path: Path) -> None:
    tokenizer = Words("0 1 2 3 4 5 6 7 8 9")
    build_static_cache(["8 9 3", "8 9 3", "8 9 2"], tokenizer, tmp_path / "static")
    drafter = NgramCacheDrafter(k=1, static=str(tmp_path / "static"))
    assert draft(drafter, [8, 9]) == [3]
    for _ in range(3):
        drafter.remember([8, 9, 5])
    assert draft(drafter, [8, 9]) == [5]
    assert draft(drafter, [7, 8, 9, 6, 7, 8, 9]) == [6]


def test_requests_feed_the_dynamic_cache_only_when_sharing() -> None:
    for share, expected in ((True, [3, 4]), (False, [])):
        drafter = NgramCacheDrafter(k=2, share=share)
        for _ in range(4):
            request = context([1, 2, 3, 4])
            drafter.start(request)
            drafter.finish(request)
            assert not request.state
        assert draft(drafter, [1, 2]) == expected
        assert drafter.traits.shares_state is share


def test_a_text_is_counted_once_and_not_before_its_first_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = NgramCache.count

    def watched(self: NgramCache, tokens: list[int], start: int = 0) -> None:
        counted.extend([len(tokens) - start] if start < len(tokens) else [])
        count(self, tokens, start)

    monkeypatch.setattr(NgramCache, "count", watched)
    drafter, plain = NgramCacheDrafter(k=2), NgramCacheDrafter(k=2)
    texts = [random.Random(seed).choices(range(4), k=40) for seed in range(3)]
    for text in texts:
        request = context(text[:30])
        drafter.start(request)
        assert not counted
        drafter.propose(request, Budget(2))
        request.tokens += text[30:35]
        drafter.propose(request, Budget(2))
        request.tokens += text[35:]
        drafter.finish(request)
        assert counted == [30, 5, 5]
        counted.clear()
        plain.remember(text)
        counted.clear()
    rows, others = drafter.dynamic.new, plain.dynamic.new
    assert rows == others and drafter.dynamic.size == plain.dynamic.size == 120
    request = context(texts[0])
    drafter.start(request)
    drafter.finish(request)
    assert counted == [40]


def test_counts_of_other_lengths_are_made_anew() -> None:
    cache, own = NgramCache(range(1, 3)), NgramCache()
    own.count(GOLDEN)
    cache.remember(GOLDEN, own)
    plain = NgramCache(range(1, 3))
    plain.remember(GOLDEN)
    assert cache.new == plain.new != own.new


def test_old_texts_are_forgotten_and_what_was_loaded_is_not(tmp_path: Path) -> None:
    first = NgramCacheDrafter(k=2)
    for _ in range(4):
        first.remember([1, 2, 3, 4])
    first.save(tmp_path / "cache")
    drafter = NgramCacheDrafter(k=2, tokens=64)
    drafter.load(tmp_path / "cache")
    for start in range(100, 4_000, 10):
        for _ in range(2):
            drafter.remember(list(range(start, start + 8)))
    assert 32 <= drafter.dynamic.size <= 64
    assert len(drafter.dynamic.new) + len(drafter.dynamic.old) <= 4 * 64
    assert draft(drafter, [3_990, 3_991, 3_992]) == [3_993, 3_994]
    assert draft(drafter, [100, 101, 102]) == [] and draft(drafter, [1, 2]) == [3, 4]


def test_counts_of_two_generations_are_added_up() -> None:
    texts = [[1, 2, 3, 1, 2, 4], [1, 2, 3, 1, 2, 5]]
    whole, parted = NgramCache(), NgramCache(most=14)
    for cache in (whole, parted):
        for text in texts:
            cache.remember(text)
    assert parted.old and parted.new
    for gram in ([1], [2], [1, 2], [3, 1, 2]):
        first, second = whole.followers(gram), parted.followers(gram)
        assert first is not None and second is not None
        assert (first.total, first.by_token(), first.best()) == (second.total, second.by_token(), second.best())
    first, second = whole.frozen(), parted.frozen()
    assert all((a == b).all() for a, b in zip(vars(first).values(), vars(second).values(), strict=True))


def test_budget_and_confidence() -> None:
    drafter = NgramCacheDrafter(k=8)
    assert len(draft(drafter, GOLDEN, max_depth=2)) == 2
    assert len(draft(drafter, GOLDEN, max_nodes=3)) == 3
    unsure = [1, 2, 3, 1, 2, 4, 1, 2]  # 1 2 -> 3 or 4
    assert len(draft(drafter, unsure)) > 1
    assert len(draft(drafter, unsure, min_confidence=0.6)) == 1


# -- files -----------------------------------------------------------------------------------------------------------


def build(path: Path | str | None, tokenizer: Any = None, **options: Any) -> NgramCacheDrafter:
    target, _ = tables()
    return NgramCacheDrafter.build(
        path if path is None else str(path),
        LoadingContext(target, "", tokenizer),
        **options,
    )


def saved(path: Path) -> NgramCacheDrafter:
    drafter = build(path, Words(), save=True)
    for _ in range(3):
        drafter.remember([0, 1, 2, 3, 4])
    return drafter


def test_a_saved_cache_drafts_the_same_and_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    first = saved(path)
    assert draft(first, [0, 1]) == [2, 3, 4]
    second = build(path, Words(), save=True)
    assert not second.dynamic.new and draft(second, [0, 1]) == [2, 3, 4]
    for _ in range(7):
        second.remember([0, 1, 4])
    assert draft(second, [0, 1])[0] == 4  # 7 of 10 samples, over two files
    third = build(path, Words())
    assert draft(third, [0, 1])[0] == 4
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_a_cache_is_written_once_a_minute_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = 100.0, []
    monkeypatch.setattr(ngram_cache, "monotonic", lambda: clock, raising=False)
    save = NgramCache.save
    monkeypatch.setattr(NgramCache, "save", lambda *args: (written.append(clock), save(*args)))
    drafter = build(tmp_path / "cache", Words(), save=True)
    for _ in range(12):
        clock += 13.0
        drafter.remember([0, 1, 2, 3, 4])
        drafter.remember([0, 1, 2], salt="theirs")
    assert len(written) == 2 and written[1] - written[0] >= 60
    del drafter
    gc.collect()
    assert len(written) == 3
    assert draft(build(tmp_path / "cache", Words()), [0, 1]) == [2, 3, 4]


def counts_in(path: Path, tokens: list[int]) -> dict[int, int]:
    """What follows the tokens by the file."""
    gc.collect()
    followers = build(path, Words()).dynamic.followers(tokens)
    return {} if followers is None else followers.by_token()


@pytest.mark.parametrize("exists", [False, True])
def test_drafters_with_one_file_add_to_it(tmp_path: Path, exists: bool) -> None:
    """Whoever writes, learns or ends last, and whatever was written before it was built."""
    path = tmp_path / "cache"
    if exists:
        first = build(path, Words(), save=True)
        first.remember([0, 1])
        del first
        assert counts_in(path, [0]) == {1: 1}
    idle, second, third = (build(path, Words(), save=True) for _ in range(3))
    second.remember([0, 2])
    third.remember([0, 3])
    before = {1: 1} if exists else {}
    assert counts_in(path, [0]) == before | {2: 1, 3: 1}
    second.remember([0, 2])
    del third
    assert counts_in(path, [0]) == before | {2: 2, 3: 1}
    fourth = build(path, Words(), save=True)
    fourth.remember([0, 4])
    second.remember([0, 2])
    del second, fourth
    assert counts_in(path, [0]) == before | {2: 3, 3: 1, 4: 1}
    idle.remember([0, 0])
    idle.load(path)
    idle.remember([0, 0])
    assert counts_in(path, [0]) == before | {0: 2, 2: 3, 3: 1, 4: 1}


def test_a_file_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    first = saved(path)
    assert counts_in(path, [0]) == {1: 3}
    path.unlink()
    second = build(path, Words(), save=True)
    second.remember([0, 2])
    del first
    assert counts_in(path, [0]) == {2: 1}


def test_one_file_for_two_tokenizers_is_refused(tmp_path: Path) -> None:
    first = build(tmp_path / "cache", Words(), save=True)
    with pytest.raises(ValueError, match=r"already saves to .*cache for another tokenizer") as error:
        build(tmp_path / "cache", Words("a b c d f"), save=True)
    assert "\n" not in str(error.value) and first.path is not None


def test_a_process_that_ends_has_written_its_cache(tmp_path: Path) -> None:
    script = f"""
        import sys
        from foretoken.methods.drafters.ngram_cache import NgramCacheDrafter
        from pathlib import Path
        drafter = NgramCacheDrafter(save=True)
        drafter.path = Path({str(tmp_path / "cache")!r})
        for _ in range(3):
            drafter.remember([0, 1, 2, 3, 4])
        sys.exit(3)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert ended.returncode == 3 and draft(build(tmp_path / "cache"), [0, 1]) == [2, 3, 4]


def test_keys_of_arrays_and_of_lists_agree() -> None:
    text = np.array([0, 5, 2**31 - 2, 7, 7], np.int32)
    for n in (1, 2, 4):
        assert ngram_counts._keys(text, n).tolist() == [
            key_of(text[i : i + n].tolist()) for i in range(len(text) - n + 1)
        ]


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    saved(path)
    gc.collect()
    good = path.read_bytes()
    with pytest.raises(ValueError, match="another tokenizer"):
        build(path, Words("a b c d f"))
    for damaged, message in (
        (good[:-9], "truncated"),
        (good[:60], "truncated"),
        (good[:20], "truncated"),
        (b"", "truncated"),
        (b"x" * 100, "not a foretoken file"),
        (good[:-70] + bytes([good[-70] ^ 1]) + good[-69:], "corrupt"),
        (good.replace(b"sizes", b"siezs"), "corrupt"),
        (b"FORETOKN\x01\0\0\0" + b" " * 500, "of this version: build it again"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message) as error:
            build(path, Words())
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=message):
            build(None, Words(), static=str(path))


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        NgramCacheDrafter(k=0)
    with pytest.raises(ValueError, match="tokens >= 1"):
        NgramCacheDrafter(tokens=0)
    with pytest.raises(ValueError, match="No such file"):
        build(tmp_path / "missing")
    with pytest.raises(ValueError, match="a file to save to"):
        build(None, save=True)
    with pytest.raises(ValueError, match="share=false learns nothing that could be saved"):
        build(tmp_path / "new", save=True, share=False)
    with pytest.raises(ValueError, match="there is no folder"):
        build(tmp_path / "missing" / "new", save=True)
    with pytest.raises(ValueError, match="empty"):
        build_static_cache([""], Words(), tmp_path / "static")


# -- exactness with a cache that other requests fill -------------------------------------------------------------------


def test_greedy_with_a_shared_cache() -> None:
    target, _ = llamas()
    requests = [Request(p, max_new_tokens=30) for p in ([5, 6, 7], [3], [5, 6, 7], [5, 6, 7, 8], [3])]
    drafter = NgramCacheDrafter(k=4)
    plain = outputs(engine(target), requests)
    assert outputs(engine(target, drafter, max_batch=2), requests) == plain
    assert drafter.dynamic.new


def test_sampled_distribution_with_a_shared_cache() -> None:
    target, _ = tables()
    modes = {"T=1": SamplingParams(temperature=1.0)}
    prompt = [0, 1, 2, 3, 0, 1]
    distributions = {mode: joint_distribution(target, params, prompt, 3) for mode, params in modes.items()}
    speculative = engine(target, NgramCacheDrafter(k=3), max_batch=4)
    assert sampled_p_value(speculative, modes, distributions, prompt, 3, 400) > FALSE_ALARM


@pytest.mark.parametrize("rule", [None, MatchVerifier()], ids=["auto", "match"])
def test_a_seed_fixes_the_output_whatever_was_shared(rule: Verifier | None) -> None:
    target, _ = tables()
    requests = [Request([0, 1, 2, 0, 1], SamplingParams(temperature=1.0), 12, seed=seed) for seed in range(6)]
    plain = outputs(engine(target, verifier=rule), requests)
    for size in (1, 4):
        speculative = engine(target, NgramCacheDrafter(k=3), rule, max_batch=size)
        assert outputs(speculative, requests) == plain
        assert outputs(speculative, requests[::-1]) == plain[::-1]  # by now it has learnt these texts
