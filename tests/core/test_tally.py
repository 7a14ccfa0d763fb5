"""The tokens of texts that grow, branch and go back, counted as if each were counted by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from foretoken.core import Scores, TokenTree
from foretoken.core.committed import CommittedTokens, NodePrefix
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.core.tally import AHEAD, TokenTally


@pytest.mark.parametrize("begin", [0, 3, 150])
def test_every_text_is_counted_as_by_itself(begin: int) -> None:
    rng = random.Random(begin)
    tally, text = TokenTally(begin), [rng.randrange(9) for _ in range(5)]
    for _ in range(300):
        path = [rng.randrange(12) for _ in range(rng.choice([0, 1, 5, 3 * AHEAD]))]
        whole = rng.choice([list, tuple])([*text, *path])
        assert tally.ids(whole).tolist() == list(whole)
        tokens, counts = tally.counts(whole)
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == Counter(whole[begin:])
        assert len(set(tokens.tolist())) == len(tokens)
        text = [*text, *path[: rng.randint(0, len(path))]] if rng.random() < 0.95 else text[: len(text) // 2]


def test_what_is_counted_grows_with_the_text() -> None:
    tally = TokenTally(0)
    for length in range(500):
        tally.counts(list(range(length)))
    assert 500 - 2 * AHEAD - 1 <= len(tally._text) <= 500 - AHEAD


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_gives_the_counts_of_a_fresh_tally(seed: int) -> None:
    """Rounds that are rejected, prefixes of earlier rounds, texts that are cut back, copies, and a tally that several
    requests share, whose texts begin alike and differ early, in one token."""
    rng = random.Random(seed)
    begin = rng.choice([0, 3, 150])
    tally, start = TokenTally(begin), [rng.randrange(9) for _ in range(rng.choice([5, 200]))]
    texts = [CommittedTokens(start), CommittedTokens([start[0] + 1, *start[1:]]), CommittedTokens(start)]
    for _ in range(500):
        which = rng.choice([0, 0, 0, 0, 1, 2])
        text = texts[which]
        if rng.random() < 0.02:
            text = texts[which] = CommittedTokens(text[: rng.randint(1, len(text))])
        path = [rng.randrange(12) for _ in range(rng.choice([0, 1, 5, 3 * AHEAD]))]
        length = len(text) if rng.random() < 0.8 else rng.randint(1, len(text))
        prefix = NodePrefix(text, length, path)
        whole = [*text[:length], *path]
        assert list(prefix) == whole and prefix[begin:] == whole[begin:] and len(prefix) == len(whole)
        sequence = rng.choice([prefix, prefix, prefix, whole, tuple(whole), NodePrefix(whole, len(whole))])
        assert tally.ids(sequence).tolist() == whole
        tokens, counts = tally.counts(sequence)
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == Counter(whole[begin:])
        if length == len(text):
            list.extend(text, [*path[: rng.randint(0, len(path))], rng.randrange(9)])


def test_a_prefix_is_the_list_of_its_tokens() -> None:
    text = CommittedTokens(range(7))
    for length in range(8):
        for path in ([], [7], [7, 8, 9]):
            prefix, whole = NodePrefix(text, length, path), [*text[:length], *path]
            assert [prefix[i] for i in range(-len(whole), len(whole))] == whole + whole
            for cut in (
                slice(a, b, c) for a in (None, *range(-4, 11)) for b in (None, *range(-4, 11)) for c in (1, -2)
            ):
                assert prefix[cut] == whole[cut]
            inner = NodePrefix(prefix, len(whole), [1, 2])
            assert [*inner] == [*whole, 1, 2] and inner.committed is text
            assert [*NodePrefix(prefix, max(length - 1, 0), [1])] == [*text[: max(length - 1, 0)], 1]
            with pytest.raises(IndexError):
                prefix[len(whole)]


class Read(CommittedTokens):
    """A request's tokens, which count how many of them are read."""

    read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.read += len(self)
        return super().__iter__()


def test_penalties_read_only_the_end_of_a_text_for_a_node() -> None:
    """All of it was copied and compared for every node: 44 ms for a chain of five after 128,000 tokens."""
    sampler = Sampler(SamplingParams(repetition_penalty=1.2, presence_penalty=0.5), prompt_length=2000)
    text = Read(i % 50 for i in range(5000))
    for step in range(2 * AHEAD):
        scores = Scores(torch.zeros(6, 60), TokenTree.chain(text[-1], [1, 2, 3, 4, 5]), text, sampler)
        text.read = 0
        for node in range(6):
            scores.choice(node)
        if step:
            assert text.read <= 6 * 2 * 4 * AHEAD
        list.extend(text, [1, 2])
