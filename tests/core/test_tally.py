"""The tokens of texts that grow, branch and go back, counted as if each were counted by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

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
