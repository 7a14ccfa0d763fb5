"""REST: the suffix array, the trie, and datastore files."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from test_ngram_cache import Words

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import LoadingContext
from foretoken.methods.drafters import datastore as module
from foretoken.methods.drafters.datastore import DEPTH, SEPARATOR, Datastore, build_datastore, joined, suffix_order
from foretoken.methods.drafters.retrieval import RetrievalDrafter, most_frequent
from toys import engine, llamas, outputs, tables

BUDGET = Budget(max_depth=10, max_nodes=64)


def texts(seed: int, vocabulary: int = 3, count: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def context(tokens: list[int]) -> Context:
    return Context(0, tokens, len(tokens), Sampler(SamplingParams(), len(tokens)), Rng(0))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}


# -- the suffix array --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_suffixes_are_sorted(seed: int) -> None:
    tokens = joined([*texts(seed), [1] * 150, [0], [1] * 150])  # repeats longer than the sorted depth
    order = suffix_order(tokens)
    unsigned = tokens.astype(np.uint32).tolist()  # the separator is the largest
    plain = sorted(
        (i for i in range(len(unsigned)) if tokens[i] != SEPARATOR), key=lambda i: (unsigned[i : i + DEPTH], i)
    )
    assert order.tolist() == plain


@pytest.mark.parametrize("seed", range(4))
def test_find_and_longest(seed: int) -> None:
    documents = texts(seed)
    store = Datastore.from_documents(documents)
    flat = store.tokens.tolist()
    rng = random.Random(seed)
    lengths = Counter[int]()
    for _ in range(150):
        pattern = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        low, high = store.find(pattern)
        places = [i for i in range(len(flat)) if flat[i : i + len(pattern)] == pattern]
        assert sorted(store.order[low:high].tolist()) == places
        best = max(
            (n for n in range(2, len(pattern) + 1) if store.find(pattern[-n:])[1] > store.find(pattern[-n:])[0]),
            default=0,
        )
        length, low, high = store.longest(pattern, max_n=6, min_n=2)
        assert length == min(best, 6)
        assert (low, high) == (store.find(pattern[-length:]) if length else (0, 0))
        lengths[length] += 1
    assert len(lengths) > 3


def test_nothing_matches_across_documents() -> None:
    store = Datastore.from_documents([[1, 2], [3, 4]])
    assert store.longest([2, 3], 2, 1)[0] == 1
    assert store.find([2, 3]) == (len(store), len(store)) or store.find([2, 3])[0] == store.find([2, 3])[1]


# -- the trie ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_trie_holds_the_most_frequent_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    rows = sorted([[rng.choice([0, 1, 2, 9]) for _ in range(5)] for _ in range(60)])
    cut = [row[: row.index(9)] if 9 in row else row for row in rows]
    truth = Counter(tuple(row[:n]) for row in cut for n in range(1, len(row) + 1))
    guess = most_frequent(np.where(np.array(rows) == 9, SEPARATOR, np.array(rows)).astype(np.int32), 20)
    tree = guess.tree(0)
    scores = {tuple(tree.tokens[n] for n in tree.path(n)[1:]): guess.scores[n - 1] for n in range(1, len(tree))}
    assert len(scores) == len(tree) - 1 == min(20, len(truth))
    for path, score in scores.items():
        assert score == pytest.approx(truth[path] / 60)
    assert sorted(truth.values(), reverse=True)[:20] == sorted((truth[p] for p in scores), reverse=True)


def test_a_draft_with_words() -> None:
    words = ["import", "numpy", "as", "np", "the", "cat", "sat", "ran"]
    ids = {word: i for i, word in enumerate(words)}
    corpus = ["import numpy as np", "import numpy as np", "import numpy", "the cat sat", "the cat ran", "the cat sat"]
    store = Datastore.from_documents([[ids[w] for w in line.split()] for line in corpus])
    drafter = RetrievalDrafter(store)
    assert paths(drafter.propose(context([ids["cat"], ids["import"], ids["numpy"]]), BUDGET)) == {(2,), (2, 3)}
    guess = drafter.draft(context([ids["the"], ids["cat"]]), BUDGET)
    assert dict(zip(guess.tokens, guess.scores, strict=True)) == {
        ids["sat"]: pytest.approx(2 / 3),
        ids["ran"]: pytest.approx(1 / 3),
    }
    assert guess.match == 2
    assert len(drafter.propose(context([ids["cat"], ids["numpy"]]), BUDGET)) == 1  # one token is no match
    assert len(drafter.propose(context([ids["the"]]), BUDGET)) == 1


def test_budget_hits_and_confidence() -> None:
    store = Datastore.from_documents(texts(1, 3, 200))
    request = context([0, 1, 2, 0, 1])
    drafter = RetrievalDrafter(store, n=2)
    whole = drafter.propose(request, BUDGET)
    assert whole.num_drafts == 64
    small = drafter.propose(request, Budget(max_depth=2, max_nodes=9))
    assert small.num_drafts <= 9 and max(small.depths) == 2
    sampled = RetrievalDrafter(store, n=2, hits=30).propose(request, BUDGET)
    assert 1 < len(sampled) <= 65
    sure = drafter.propose(request, Budget(max_depth=10, max_nodes=64, min_confidence=0.9))
    assert max(sure.depths) == 1
    for tree in (whole, small, sampled):
        assert len(paths(tree)) == len(tree) - 1  # siblings are different


# -- files -------------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "one.txt").write_text("a b c d a b c e")
    (folder / "text" / "two.jsonl").write_text('{"text": "a b c d"}\n\n{"prompt": "e e"}\n{"other": 1}\n')
    return folder / "text"


def build(path: Path | None, tokenizer: Any = None, vocab: int = 5, **options: Any) -> RetrievalDrafter:
    target, _ = tables(vocab)
    return RetrievalDrafter.build(
        None if path is None else str(path),
        LoadingContext(target, "", tokenizer),
        **options,
    )


def test_a_file_answers_as_memory_does(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int | None]] = []
    report = build_datastore([write(tmp_path)], Words(), tmp_path / "new" / "store", lambda *step: steps.append(step))
    assert (report["documents"], report["tokens"]) == (3, 14)
    assert report["bytes"] == (tmp_path / "new" / "store").stat().st_size
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["store"]
    assert {stage for stage, _, _ in steps} == {"encoding documents", "sorting", "writing"}
    memory = Datastore.from_documents([[0, 1, 2, 3, 0, 1, 2, 4], [0, 1, 2, 3], [4, 4]])
    file = build(tmp_path / "new" / "store", Words())
    for tokens in ([0, 1], [1, 2], [4, 0, 1, 2], [3, 3]):
        assert paths(file.propose(context(tokens), BUDGET)) == paths(
            RetrievalDrafter(memory).propose(context(tokens), BUDGET)
        )
    assert paths(file.propose(context([0, 1]), BUDGET)) >= {(2,), (2, 3), (2, 4)}


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_datastore([write(tmp_path)], Words(), path)
    good = path.read_bytes()
    build(path, Words())
    with pytest.raises(ValueError, match="another tokenizer"):
        build(path, Words("a b c d f"))
    with pytest.raises(ValueError, match="another tokenizer"):
        build(path, None, vocab=4)
    with pytest.raises(ValueError, match="No such file"):
        build(tmp_path / "missing", Words())
    with pytest.raises(ValueError, match="directory"):
        build(tmp_path, Words())
    for damaged, message in (
        (good[:-1], "truncated"),
        (good[:70], "truncated"),
        (good + b"x", "truncated"),
        (good[:12], "truncated"),
        (b"", "truncated"),
        (b"PK\x03\x04" * 40, "not a foretoken file of this version: build it again"),
        (b"FORETOKN\x01\0\0\0" + b" " * 500, "not a foretoken file of this version: build it again"),
        (save({"tokens": np.zeros(3, np.uint8)}), "not a foretoken file"),
        (good[:-3] + bytes([good[-3] ^ 4]) + good[-2:], "corrupt"),
        *((good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :], "corrupt|truncated") for i in range(len(good))),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message) as error:
            build(path, Words())
        assert "\n" not in str(error.value)


def test_another_kind_of_file(tmp_path: Path) -> None:
    module.write_arrays(tmp_path / "cache", "ngram_cache", {}, {"keys": np.zeros(3, np.uint64)})
    with pytest.raises(ValueError, match="of kind 'ngram_cache', not 'datastore'"):
        build(tmp_path / "cache")


@pytest.mark.parametrize("stage", ["encoding documents", "sorting", "writing"])
def test_an_interrupted_build_leaves_the_old_file(tmp_path: Path, stage: str) -> None:
    build_datastore([write(tmp_path)], Words(), tmp_path / "store")
    before = (tmp_path / "store").read_bytes()

    def interrupt(step: str, done: int, total: int | None) -> None:
        if step == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_datastore([tmp_path / "text" / "one.txt"], Words(), tmp_path / "store", interrupt)
    assert (tmp_path / "store").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "text"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_datastore([write(tmp_path)], Words(), tmp_path / "store")
    before = (tmp_path / "store").read_bytes()

    def full(path: Path, data: bytes) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        build_datastore([tmp_path / "text" / "one.txt"], Words(), tmp_path / "store")
    assert (tmp_path / "store").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "text"]


def test_empty_corpora(tmp_path: Path) -> None:
    for corpus in ([], [[]]):
        with pytest.raises(ValueError, match="empty"):
            Datastore.from_documents(corpus)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").write_text("")
    (tmp_path / "empty" / "image.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="no text in"):
        build_datastore([tmp_path / "empty"], Words(), tmp_path / "store")
    with pytest.raises(ValueError, match="no such file"):
        build_datastore([tmp_path / "missing"], Words(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "options", [{"n": 0}, {"min_n": 0}, {"n": 2, "min_n": 3}, {"k": 0}, {"n": 60, "k": 10}, {"nodes": 0}, {"hits": 0}]
)
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="retrieval needs"):
        RetrievalDrafter(Datastore.from_documents([[1]]), **options)


def test_without_a_path() -> None:
    class Bytes(Words):
        def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
            return {"input_ids": [list(text.encode()) for text in texts]}

    drafter = build(None, Bytes(), vocab=256)
    tree = drafter.propose(context(list(b"from __future__ im")), BUDGET)
    assert tuple(b"port ") in paths(tree)
    with pytest.raises(ValueError, match="needs a file"):
        build(None)


def test_greedy_with_its_own_output_as_corpus() -> None:
    target, _ = llamas()
    requests = [Request(p, max_new_tokens=30) for p in ([5, 6, 7], [3])]
    plain = outputs(engine(target), requests)
    store = Datastore.from_documents([[5, 6, 7, *plain[0]], [3, *plain[1][:9], 1, 2]])
    assert outputs(engine(target, RetrievalDrafter(store)), requests) == plain
