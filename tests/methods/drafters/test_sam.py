"""The suffix automaton: brute-force checks, golden drafts, and the corpus."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_ngram_cache import Words

from foretoken.core import Budget, Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import LoadingContext
from foretoken.methods.drafters.datastore import Datastore, build_datastore
from foretoken.methods.drafters.sam import DatastoreCorpus, SamDrafter
from foretoken.methods.drafters.sources import Automaton
from toys import engine, llamas, outputs, tables

GOLDEN = [1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3, 4, 7, 1, 2, 3]


def draft(drafter: SamDrafter, tokens: list[int], **budget: Any) -> list[int]:
    context = Context(0, tokens, len(tokens), Sampler(SamplingParams(), len(tokens)), Rng(0))
    return list(drafter.propose(context, Budget(**{"max_depth": 16, **budget})).tokens[1:])


def occurs(text: list[int], part: list[int]) -> int | None:
    """End of the first occurrence."""
    for start in range(len(text) - len(part) + 1):
        if text[start : start + len(part)] == part:
            return start + len(part) - 1
    return None


def plain_match(text: list[int]) -> tuple[int, int]:
    """Length and first end of the longest suffix of ``text`` that ends earlier too."""
    for length in range(len(text) - 1, 0, -1):
        end = occurs(text[:-1], text[-length:])
        if end is not None:
            return length, end
    return 0, -1


def test_golden_draft() -> None:
    assert draft(SamDrafter(k=4), list(GOLDEN)) == [4, 5, 1, 2]
    guess = SamDrafter(k=4).draft(
        Context(0, list(GOLDEN), 17, Sampler(SamplingParams(), 17), Rng(0)), Budget(max_depth=16)
    )
    assert guess.match == 3


@pytest.mark.parametrize("seed", range(5))
def test_the_match_is_the_longest_earlier_suffix_and_its_first_place(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(2 + seed) for _ in range(90)] + [0] * 12
    automaton, end = Automaton(), 0
    for place, token in enumerate(text):
        end = automaton.append(end, token)
        state = automaton.link[end]
        length, first = plain_match(text[: place + 1])
        assert (automaton.length[state] if state > 0 else 0) == length
        if length:
            assert automaton.first_end[state] == first
    assert len(automaton.length) <= 2 * len(text)


def corpus_of(*texts: list[int]) -> DatastoreCorpus:
    return DatastoreCorpus(Datastore.from_documents(texts))


@pytest.mark.parametrize("seed", range(4))
def test_the_corpus_gives_the_first_place_of_the_longest_suffix(seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    corpus, hits = corpus_of(*texts), 0
    for _ in range(100):
        context = [rng.randrange(4) for _ in range(rng.randrange(1, 15))]
        answer: tuple[int, list[int]] = (0, [])
        for length in range(1, len(context) + 1):
            places = [(text, occurs(text, context[-length:])) for text in texts]
            first = next(((text, end) for text, end in places if end is not None), None)
            if first is not None:
                answer = length, first[0][first[1] + 1 :][:6]
        assert corpus.after(context, 6) == answer
        hits += bool(answer[1])
    assert hits > 20


def test_a_match_at_the_end_of_a_text_copies_nothing_of_the_next() -> None:
    assert corpus_of([1, 2, 3], [4, 5]).after([2, 3], 4) == (2, [])
    assert corpus_of([1, 2, 3, 6], [4, 5]).after([2, 3], 4) == (2, [6])


def test_the_suffix_link_gives_more_tokens() -> None:
    text = [1, 2, 9, 9, 9, 5, 2, 5, 2]  # "5 2" ends two tokens before the end; "2" at the beginning has five after it
    assert draft(SamDrafter(k=5), text) == [9, 9, 9, 5, 2]
    assert draft(SamDrafter(k=2), text) == [5, 2]


def test_no_match_no_draft() -> None:
    assert draft(SamDrafter(), [1, 2, 3, 4]) == []
    assert draft(SamDrafter(), [7]) == []
    assert draft(SamDrafter(min_match=4), list(GOLDEN)) == []
    assert draft(SamDrafter(alpha=0.5), list(GOLDEN)) == [4]
    assert len(draft(SamDrafter(), list(GOLDEN), max_depth=2)) == 2


def test_own_text_or_corpus_by_match_length() -> None:
    corpus = [[8, 7, 1, 2, 3, 6, 6, 6]]
    text = [1, 2, 3, 4, 0, 8, 7, 1, 2, 3]  # three tokens match above, five in the corpus
    assert draft(SamDrafter(k=2, bias=1, corpus=corpus), list(text)) == [6, 6]
    assert draft(SamDrafter(k=2, bias=2, corpus=corpus), list(text)) == [4, 0]
    assert draft(SamDrafter(k=2, bias=0, corpus=corpus), [9, 3]) == [6, 6]


def test_from_a_datastore_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e a b")
    build_datastore([tmp_path / "text.txt"], Words(), tmp_path / "store")
    target, _ = tables(5)
    drafter = SamDrafter.build(str(tmp_path / "store"), LoadingContext(target, "", Words()), bias=0)
    assert draft(drafter, [3, 1, 2]) == [3, 4, 0, 1]
    assert SamDrafter.build(None, LoadingContext(target, "")).corpus is None
    with pytest.raises(ValueError, match="another tokenizer"):
        SamDrafter.build(str(tmp_path / "store"), LoadingContext(target, "", Words("x y z v w")))
    small, _ = tables(3)
    with pytest.raises(ValueError, match="vocabulary has 3"):
        SamDrafter.build(str(tmp_path / "store"), LoadingContext(small, ""))


def test_bad_options() -> None:
    for options in ({"k": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"alpha": float("inf")}, {"min_match": 0}):
        with pytest.raises(ValueError, match="sam needs"):
            SamDrafter(**options)  # type: ignore[arg-type]
    for corpus in ([], [[]]):
        with pytest.raises(ValueError, match="empty"):
            SamDrafter(corpus=corpus)


def test_greedy_with_a_corpus() -> None:
    target, _ = llamas()
    requests = [Request(p, max_new_tokens=30) for p in ([5, 6, 7], [3])]
    plain = outputs(engine(target), requests)
    running = engine(target, SamDrafter(bias=0, corpus=[[5, 6, 7, *plain[0]], [3, *plain[1][:9], 1, 2]]))
    assert outputs(running, requests) == plain
