"""The same calls to a model with ordinary forwards and to one with fixed steps, compared one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from fake_graphs import Recordings
from foretoken.models.base import Feed, SequenceState
from foretoken.models.forward.capture import Recorder
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel


def graphed(model: Any, recorder: Recorder | None = None) -> HuggingFaceModel:
    """``model`` with fixed steps."""
    result = with_graphs(HuggingFaceModel(model), True, recorder or Recordings())
    assert isinstance(result, HuggingFaceModel) and result.graphs_off == ""
    return result


class Pair:
    """The same texts in an ordinary model and in one with fixed steps; every call is made to both and compared."""

    def __init__(self, model: Any, recorder: Recorder | None = None, atol: float = 1e-9) -> None:
        self.atol = atol
        self.models = (HuggingFaceModel(model), graphed(model, recorder))
        self.texts: list[tuple[SequenceState, SequenceState]] = []
        self.fixed = self.forwards = 0
        score = self.models[1].graphs.score

        def counted(*args: Any) -> Any:
            scores = score(*args)
            self.fixed += scores is not None
            return scores

        self.models[1].graphs.score = counted

    def open(self, prompt: Sequence[int]) -> None:
        self.texts.append((self.models[0].open(), self.models[1].open()))
        for model, sequence in zip(self.models, self.texts[-1], strict=True):
            model.prefill(sequence, prompt)

    def release(self, index: int) -> None:
        for model, sequence in zip(self.models, self.texts.pop(index), strict=True):
            model.release(sequence)

    def forward(self, feeds: Sequence[tuple[int, Sequence[int], Sequence[int] | None, int | None]], *taps: str) -> None:
        """Each of ``feeds``: text, tokens, parents, wanted."""
        self.forwards += 1
        rows = [
            model.forward(
                [Feed(self.texts[i][m], tokens, parents, wanted) for i, tokens, parents, wanted in feeds], taps
            )
            for m, model in enumerate(self.models)
        ]
        for plain, fixed in zip(*rows, strict=True):
            torch.testing.assert_close(plain.logits, fixed.logits, rtol=0, atol=self.atol)
            assert plain.taps.keys() == fixed.taps.keys()
            for name, states in plain.taps.items():
                torch.testing.assert_close(states, fixed.taps[name], rtol=0, atol=self.atol)

    def commit(self, index: int, path: Sequence[int]) -> None:
        for model, sequence in zip(self.models, self.texts[index], strict=True):
            model.commit(sequence, path)

    def check_cache(self) -> None:
        """Committed slots hold the same."""
        for a, b in self.texts:
            n = len(a.tokens)
            assert a.tokens == b.tokens
            for stores in zip(*((text.cache.keys, text.cache.values) for text in (a, b)), strict=True):
                for plain, fixed in zip(*stores, strict=True):
                    torch.testing.assert_close(plain[a.row, :, :n], fixed[b.row, :, :n], rtol=0, atol=self.atol)


def random_path(rng: random.Random, sequence: SequenceState) -> list[int]:
    node, path = rng.randrange(-1, len(sequence.scratch_tokens)), []
    while node >= 0:
        path.append(node)
        node = sequence.scratch_parents[node]
    return path[::-1]


def any_session(pair: Pair, rounds: int, seed: int) -> None:
    """Texts join and leave, grow chains and trees, some or all at a time, keep any path, and take tokens back."""
    rng = random.Random(seed)
    for _ in range(rounds):
        if len(pair.texts) < 2 or (len(pair.texts) < 5 and rng.random() < 0.2):
            pair.open([rng.randrange(3, 30) for _ in range(rng.randrange(1, 30))])
        some = rng.sample(range(len(pair.texts)), rng.randrange(1, len(pair.texts) + 1))
        feeds = []
        for i in some:
            old, new = len(pair.texts[i][0].scratch_tokens), rng.choice([1, 1, 2, 3, 5, 9])
            chain = rng.random() < 0.4
            parents = None if chain else [rng.randrange(-1, old + k) for k in range(new)]
            wanted = rng.choice([None, 1, new])
            feeds.append((i, [rng.randrange(3, 30) for _ in range(new)], parents, wanted))
        pair.forward(feeds, *rng.choice([(), (), ("last", "layer:1")]))
        for i in some:
            if rng.random() < 0.7:
                pair.commit(i, random_path(rng, pair.texts[i][0]))
        if rng.random() < 0.15:
            i = rng.randrange(len(pair.texts))
            for model, sequence in zip(pair.models, pair.texts[i], strict=True):
                model.rewind(sequence, max(1, len(sequence.tokens) - 2))
        if len(pair.texts) > 1 and (rng.random() < 0.2 or max(len(a.tokens) for a, _ in pair.texts) > 80):
            pair.release(max(range(len(pair.texts)), key=lambda i: len(pair.texts[i][0].tokens)))
        if rng.random() < 0.2:
            pair.check_cache()
    pair.check_cache()
    assert pair.fixed == pair.forwards  # none fell back


def growing_session(pair: Pair) -> None:
    """A text outgrows the cache twice, and one row is added: buffers move, and graphs are captured anew."""
    graphs = pair.models[1].graphs
    pair.open([3, 4, 5] * 80)
    pair.forward([(0, [7, 8, 9], [-1, -1, 1], None)])
    pair.commit(0, [1, 2])
    assert {bucket.slots for bucket in graphs.buckets} == {256}
    rounds = [pair.models[1].cache.generation]
    for _ in range(30):  # past 256 slots, with a path to move at every turn
        pair.forward([(0, list(range(3, 14)), [-1, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9], None)])
        pair.commit(0, range(1, 11))
        rounds.append(pair.models[1].cache.generation)
    assert len(set(rounds)) == 3 and len(pair.texts[0][0].tokens) == 542  # two growths: 512 and 1024 slots
    assert {bucket.slots for bucket in graphs.buckets} == {1024}  # the graphs of the old buffers are gone
    for token in (5, 6):
        pair.open([token])  # a third row: buffers move once more
    pair.forward([(2, [6, 7], None, None), (0, [3], None, None)])
    pair.commit(2, [0])
    pair.forward([(2, [6, 7], None, None)])
    assert {(bucket.batch, bucket.slots) for bucket in graphs.buckets} == {(4, 1024), (4, 256)}
    assert pair.fixed == pair.forwards
    pair.check_cache()
