"""Random sequences of everything that happens to a cache: logits remain those of Transformers' forward on the whole
text, with windows and without."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from checkpoints import HALF, VOCAB, new_model, plain_logits
from forwards import path_to
from torch import Tensor

from foretoken.models.base import Feed, SequenceState
from foretoken.models.cache.rectangle import TreeCache
from foretoken.models.huggingface import HuggingFaceModel

SEEDS, OPERATIONS = 20, 12
CONTEXT, LONG = 1024, 250
ROUNDING = 1e-4
"""Of float32, as a fraction of the largest logit."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {**HALF, "head_dim": 16, "use_sliding_window": True},
    "gemma3": {},
}


@cache
def network(name: str) -> Any:
    return new_model(name, **MODELS[name], max_position_embeddings=CONTEXT)


class RandomSequence:
    """Texts of one model, changed at random.

    Attributes:
        worst: largest difference of logits so far, as a fraction of the largest logit.
        counts: operations so far by name.
        num_bands: largest number of rectangles that held the texts.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.rng, self.network = random.Random(seed), network(name)
        self.model = HuggingFaceModel(self.network)
        self.texts: list[SequenceState] = []
        self.worst, self.num_bands = 0.0, 1
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        self.open()
        for _ in range(operations):
            names = ["open", "rewind", "share", *["forward"] * 4, *["release"] * (len(self.texts) > 1)]
            name = self.rng.choice(names)
            getattr(self, name)()
            self.counts[name] += 1
            self.num_bands = max(self.num_bands, len(self.model.pool.caches))
        self.forward(self.texts)
        for sequence in self.texts:
            self.model.release(sequence)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def open(self) -> None:
        self.texts.append(self.model.open())
        self.model.prefill(self.texts[-1], self.tokens(self.rng.choice([1, 3, 9, 30, 70, LONG])))

    def release(self) -> None:
        self.model.release(self.texts.pop(self.rng.randrange(len(self.texts))))

    def rewind(self) -> None:
        sequence = self.rng.choice(self.texts)
        self.model.rewind(sequence, self.rng.randint(0, len(sequence.tokens)))

    def share(self) -> None:
        """A new text begins as another one does."""
        source = self.rng.choice(self.texts)
        if not source.tokens:
            return
        length = self.rng.randint(1, len(source.tokens))
        snapshot = self.model.snapshot(source, length)
        assert snapshot is not None
        sequence = self.model.open()
        self.model.restore(sequence, snapshot, self.rng.randint(1, length))
        self.texts.append(sequence)

    def forward(self, texts: list[SequenceState] | None = None) -> None:
        """Two trees, or chains, below some texts in one call each; then a path is committed."""
        texts = texts or self.rng.sample(self.texts, self.rng.randint(1, len(self.texts)))
        for _ in range(2):
            feeds = [self.feed(sequence) for sequence in texts]
            for sequence, rows in zip(texts, self.model.forward(feeds), strict=True):
                self.check(sequence, rows.logits)
        for sequence in texts:
            node = self.rng.randrange(-1, len(sequence.scratch_tokens))
            self.model.commit(sequence, path_to(sequence, node))

    def feed(self, sequence: SequenceState) -> Feed:
        old, count = len(sequence.scratch_tokens), self.rng.randint(1, 9)
        if self.rng.random() < 0.3:
            return Feed(sequence, self.tokens(count), [*range(old - 1, old + count - 1)])
        return Feed(sequence, self.tokens(count), [self.rng.randrange(-1, old + i) for i in range(count)])

    def check(self, sequence: SequenceState, logits: Tensor) -> None:
        """Compare the last node of a call, and a random one."""
        first = len(sequence.scratch_tokens) - len(logits)
        for row in (len(logits) - 1, self.rng.randrange(len(logits))):
            path = [sequence.scratch_tokens[node] for node in path_to(sequence, first + row)]
            expected = plain_logits(self.network, [*sequence.tokens, *path])[-1]
            self.worst = max(self.worst, float((logits[row] - expected).abs().max() / expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_whole_text(name: str) -> None:
    counts: Counter[str] = Counter()
    bands = 0
    for seed in range(SEEDS):
        sequence = RandomSequence(name, seed)
        sequence.run(OPERATIONS)
        assert sequence.worst < ROUNDING, f"seed {seed}"
        counts += sequence.counts
        bands = max(bands, sequence.num_bands)
    assert bands > 1, "no text ever had to move"
    assert min(counts[name] for name in ("open", "rewind", "share", "forward", "release")) > 10


@pytest.mark.parametrize("name", MODELS)
def test_a_commit_that_moves_nothing_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The control: the keys and values of a path stay where the tree had them."""
    monkeypatch.setattr(TreeCache, "keep", lambda *_: None)
    sequence = RandomSequence(name, 0)
    sequence.run(OPERATIONS)
    assert sequence.worst > 0.01


def test_windows_are_mixed() -> None:
    for name in ("qwen3", "gemma3"):
        assert set(network(name).config.layer_types) == {"sliding_attention", "full_attention"}
        assert network(name).config.sliding_window == 8
        assert HuggingFaceModel(network(name)).dtype == torch.float32
