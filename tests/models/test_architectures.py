"""Every supported architecture: scores of a committed prefix plus a scratch tree equal the plain forward.

The reference is always Transformers' forward on the whole text of one path: no cache, its own mask and attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, best_dtype, checkpoint, plain_logits, prompt_of
from forwards import path_to
from torch import Tensor

from foretoken.models import runner
from foretoken.models.base import Feed, SequenceState
from foretoken.models.cache.masks import LayerMask
from foretoken.models.huggingface import HuggingFaceModel

SHORT, LONG = 5, 27
"""Prompt lengths inside one window or chunk of 8, and past three of them."""

TREE = ([7, 5, 6, 5, 5, 9, 9, 6], [-1, 0, 0, 1, 2, 3, 4, 0])
"""The same token under different parents (5 below 5 and 6, 9 below both), and twice below one parent (6)."""


@dataclass
class Subject:
    """A model under test and its plain forward, remembered by text."""

    name: str
    model: HuggingFaceModel
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def after(self, text: Sequence[int]) -> Tensor:
        """[V] logits after ``text`` by the plain forward."""
        key = tuple(text)
        if key not in self.known:
            for i, row in enumerate(plain_logits(self.model.model, key)):
                self.known.setdefault(key[: i + 1], row)
        return self.known[key]

    def check(self, text: Sequence[int], logits: Tensor) -> None:
        """``logits`` [V] are those after ``text``."""
        assert self.distance(text, logits) < (1e-5 if best_dtype(self.name) == "float64" else 1e-4)

    def distance(self, text: Sequence[int], logits: Tensor) -> float:
        """Largest difference, in standard deviations of the logits."""
        expected = self.after(text)
        return float((expected - logits).abs().max() / expected.std())

    def check_nodes(self, before: Sequence[int], sequence: SequenceState, logits: Tensor) -> None:
        """``logits`` [n, V] are those of the last n scratch nodes behind the committed text ``before``."""
        nodes = range(len(sequence.scratch_tokens) - len(logits), len(sequence.scratch_tokens))
        for node, row in zip(nodes, logits, strict=True):
            self.check([*before, *path_tokens(sequence, node)], row)

    def at(self, text: Sequence[int]) -> SequenceState:
        """A sequence that has committed ``text``."""
        sequence = self.model.open()
        self.model.prefill(sequence, text)
        assert sequence.tokens == list(text)
        return sequence

    def forward(self, *feeds: Feed, **more: Any) -> list[Tensor]:
        """Logits of every feed."""
        return [rows.logits for rows in self.model.forward(feeds, **more)]


def path_tokens(sequence: SequenceState, node: int) -> list[int]:
    """Their tokens."""
    return [sequence.scratch_tokens[i] for i in path_to(sequence, node)]


def random_tree(rng: random.Random, size: int, old: int = 0) -> tuple[list[int], list[int]]:
    """``size`` nodes of few distinct tokens behind ``old`` ones; several may hang from the committed text."""
    return [rng.randrange(3, 7) for _ in range(size)], [rng.randrange(-1, old + i) for i in range(size)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    model = checkpoint(tmp_path_factory.mktemp("models"), request.param)
    assert isinstance(model, HuggingFaceModel)
    return Subject(request.param, model)


@pytest.fixture
def subject(loaded: Subject) -> Iterator[Subject]:
    yield loaded
    for sequence in list(loaded.model._sequences):
        loaded.model.release(sequence)


@pytest.mark.parametrize("length", [1, SHORT, LONG])
def test_tree_logits_are_those_of_its_paths(subject: Subject, length: int) -> None:
    rng = random.Random(length)
    prompt = prompt_of(length)
    for tokens, parents in (TREE, random_tree(rng, 3), random_tree(rng, 13)):
        sequence = subject.at(prompt[:-1])
        tokens, parents = [prompt[-1], *tokens], [-1, *(p + 1 for p in parents)]
        (logits,) = subject.forward(Feed(sequence, tokens, parents))
        assert logits.shape == (len(tokens), VOCAB)
        subject.check_nodes(prompt[:-1], sequence, logits)
        subject.model.release(sequence)


def test_a_plain_causal_mask_is_clearly_off(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: were the tree a chain to the mask, the tests above would fail."""
    real = runner.RowPlan
    monkeypatch.setattr(
        runner,
        "RowPlan",
        lambda c, parents, depths, *more: real(c, range(-1, len(parents) - 1), depths, *more),
    )
    prompt = prompt_of(LONG)
    sequence = subject.at(prompt)
    (logits,) = subject.forward(Feed(sequence, *TREE))
    texts = [[*prompt, *path_tokens(sequence, node)] for node in range(len(logits))]
    distances = [subject.distance(text, row) for text, row in zip(texts, logits, strict=True)]
    assert distances[0] < 1e-4  # the first node is a chain either way
    assert max(distances) > 0.1


def test_without_its_window_a_sliding_layer_is_clearly_off(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = subject.model.forwards.layer_masks
    if all(mask.kind == "full" for mask in masks.values()):
        pytest.skip("all layers of this architecture see the whole past")
    monkeypatch.setattr(subject.model.forwards, "layer_masks", dict.fromkeys(masks, LayerMask()))
    sequence = subject.at(prompt_of(LONG))
    (logits,) = subject.forward(Feed(sequence, [7]))
    assert subject.distance([*prompt_of(LONG), 7], logits[0]) > 0.1


def test_commit_then_continue_is_a_fresh_prefill(subject: Subject) -> None:
    rng = random.Random(1)
    text = prompt_of(4)
    sequence = subject.at(text)
    for _ in range(8):
        size = rng.randrange(1, 9)
        (logits,) = subject.forward(Feed(sequence, *random_tree(rng, size)))
        node = rng.randrange(-1, size)
        if node >= 0:
            text = [*text, *path_tokens(sequence, node)]
            subject.check(text, logits[node])
        subject.model.commit(sequence, path_to(sequence, node))
        assert sequence.tokens == text
        assert not sequence.scratch_tokens
    text = [*text, *prompt_of(12, seed=1)]  # past the window, whatever was accepted
    (logits,) = subject.forward(Feed(sequence, text[len(sequence.tokens) :]))
    subject.check(text, logits[-1])
    # The cache itself is that of a fresh prefill: slots of committed tokens hold the same keys and values.
    subject.model.commit(sequence, range(len(logits)))
    fresh = subject.at(text)
    for store in (subject.model.cache.keys, subject.model.cache.values):
        for buffer in store:
            stored, expected = buffer[sequence.row, :, : len(text)], buffer[fresh.row, :, : len(text)]
            assert float((stored - expected).abs().max() / expected.std()) < 1e-4


def test_ragged_batch_is_separate_runs(subject: Subject) -> None:
    rng = random.Random(2)
    model = subject.model
    prompts = [prompt_of(length, seed=i) for i, length in enumerate((3, 19, 10))]
    a, b, c = sequences = [subject.at(prompt) for prompt in prompts]
    results = subject.forward(*(Feed(s, *random_tree(rng, n)) for s, n in zip(sequences, (6, 2, 9), strict=True)))
    for prompt, sequence, logits in zip(prompts, sequences, results, strict=True):
        subject.check_nodes(prompt, sequence, logits)
    # The middle row sits out, with its scratch pending; the others grow theirs.
    first, last = subject.forward(Feed(a, *random_tree(rng, 2, old=6)), Feed(c, *random_tree(rng, 4, old=9)))
    subject.check_nodes(prompts[0], a, first)
    subject.check_nodes(prompts[2], c, last)
    (middle,) = subject.forward(Feed(b, [3, 4, 3], [0, 1, -1]))
    subject.check_nodes(prompts[1], b, middle)
    # The middle row leaves: the last one moves into its place together with its scratch.
    model.release(b)
    assert (a.row, c.row) == (0, 1)
    (grown,) = subject.forward(Feed(c, [5, 6], [12, 3]))
    subject.check_nodes(prompts[2], c, grown)
    texts = [prompts[0], prompts[2]]
    for i, (sequence, node) in enumerate(((a, 7), (c, 13))):
        texts[i] = [*texts[i], *path_tokens(sequence, node)]
        model.commit(sequence, path_to(sequence, node))
    # A new request takes the freed row, whose slots hold what the old one left.
    d = subject.at(prompt_of(2, seed=7))
    rows = subject.forward(Feed(d, *TREE), Feed(c, *random_tree(rng, 5)), Feed(a, [3]))
    for text, sequence, logits in zip((prompt_of(2, seed=7), texts[1], texts[0]), (d, c, a), rows, strict=True):
        subject.check_nodes(text, sequence, logits)


def test_growing_level_by_level_is_one_call(subject: Subject) -> None:
    prompt = prompt_of(11)
    whole, grown = subject.at(prompt), subject.at(prompt)
    tokens, parents = [3, 4, 5, 6, 4, 3, 4], [-1, 0, 0, 1, 1, 2, 5]
    (expected,) = subject.forward(Feed(whole, tokens, parents))
    got = []
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
        got += subject.forward(Feed(grown, tokens[start:end], parents[start:end]))
    assert float((torch.cat(got) - expected).abs().max() / expected.std()) < 1e-4
    subject.check_nodes(prompt, grown, torch.cat(got))


def test_catch_up_keeps_what_was_accepted(subject: Subject) -> None:
    """Does a draft model's round: match its scratch against the text, keep that path, feed the rest."""
    prompt = prompt_of(9)
    sequence = subject.at(prompt[:-1])
    # (tokens that became text since the last round, how many of them must be fed): the last one is always fed.
    for gained, fed in (([], 1), ([4, 6, 9], 1), ([4, 8, 9], 2), ([8, 8], 2)):
        prompt = [*prompt, *gained]
        missing = subject.model.catch_up(sequence, prompt)
        assert list(missing) == prompt[len(prompt) - fed :]
        (logits,) = subject.forward(Feed(sequence, missing, wanted=1))
        subject.check(prompt, logits[0])
        root = len(sequence.scratch_tokens) - 1
        subject.forward(Feed(sequence, [3, 4], [root, root]), Feed(sequence=subject.model.open(), tokens=[5]))
        (leaves,) = subject.forward(Feed(sequence, [5, 6], [root + 1, root + 2]))
        subject.check([*prompt, 4, 6], leaves[1])


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunked_prefill_is_one_call(subject: Subject, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.TreeRunner, "prefill_chunk", chunk)
    prompt = prompt_of(LONG)
    sequence = subject.model.open()
    taps = subject.model.prefill(sequence, prompt[:-1], ["last"])
    assert len(taps["last"]) == LONG - 1
    (logits,) = subject.forward(Feed(sequence, prompt[-1:]))
    subject.check(prompt, logits[0])


def test_logits_only_where_they_are_wanted(subject: Subject) -> None:
    prompts = [prompt_of(n, seed=n) for n in (6, 12, 4)]
    sequences = [subject.at(prompt) for prompt in prompts]
    trees = [([3, 4, 5, 6, 7], [-1, 0, 0, 1, 3]), ([4, 4], [-1, -1]), ([9, 8, 7], [-1, 0, 1])]
    for wanted in ((0, 0, 0), (1, 1, 1), (0, 1, 3), (4, 0, 2), (None, 2, 1)):
        feeds = [Feed(s, *tree, wanted=w) for s, tree, w in zip(sequences, trees, wanted, strict=True)]
        for prompt, sequence, rows, want in zip(prompts, sequences, subject.forward(*feeds), wanted, strict=True):
            assert rows.shape == (len(sequence.scratch_tokens) if want is None else want, VOCAB)
            subject.check_nodes(prompt, sequence, rows)
            subject.model.commit(sequence, ())


def test_taps_are_the_hidden_states(subject: Subject) -> None:
    prompt, chain = prompt_of(LONG), [3, 4, 5]
    layers = subject.model.config.num_hidden_layers
    names = ["last", *(f"layer:{i}" for i in range(layers))]
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *chain]])
        states = subject.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    sequence, other = subject.model.open(), subject.at(prompt_of(40))
    prefilled = subject.model.prefill(sequence, prompt, names)
    # Fed as a tree beside another row: the chain's nodes are 0, 2, 3.
    rows, _ = subject.model.forward([Feed(sequence, [3, 9, 4, 5], [-1, -1, 0, 2]), Feed(other, [5])], names)
    for name in names:
        expected = states[-1 if name == "last" else int(name[6:])][0]
        got = torch.cat([prefilled[name], rows.taps[name][[0, 2, 3]]])
        assert float((got - expected).abs().max() / expected.std()) < 1e-4, name
    before_norm = subject.model.forward([Feed(sequence, [7])], [f"layer:{layers}", "last"])[0].taps
    assert not torch.allclose(before_norm[f"layer:{layers}"], before_norm["last"])


def test_an_unknown_tap_is_refused_and_no_hook_stays(subject: Subject) -> None:
    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in subject.model.model.modules())

    sequence, before = subject.at(prompt_of(3)), hooks()
    for name in ("layer:99", "layer:x", "middle"):
        with pytest.raises(ValueError, match="unknown tap"):
            subject.model.forward([Feed(sequence, [3])], [name])
        assert sequence.scratch_tokens == []
    (rows,) = subject.model.forward([Feed(sequence, [3])], ["last", "layer:0", "layer:1"])
    assert sorted(rows.taps) == ["last", "layer:0", "layer:1"]
    subject.check([*prompt_of(3), 3], rows.logits[0])
    assert hooks() == before


def test_a_failed_forward_leaves_no_trace(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject.model
    attention = [config._attn_implementation_internal for config in model.forwards.configs]
    sequence = subject.at(prompt_of(9))
    subject.forward(Feed(sequence, [3, 4], [-1, -1]))
    with monkeypatch.context() as patch:
        patch.setattr(model.cache, "update", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            subject.forward(Feed(sequence, [5]))
        patch.setattr(model.forwards, "fast", None)
        with pytest.raises(RuntimeError, match="out of memory"):
            subject.forward(Feed(sequence, [5, 6], [1, 1]), taps=["last"])
    assert [config._attn_implementation_internal for config in model.forwards.configs] == attention
    assert sequence.scratch_tokens == [3, 4]
    (logits,) = subject.forward(Feed(sequence, [5, 6], [0, 1]))
    subject.check_nodes(prompt_of(9), sequence, logits)
    with pytest.raises(ValueError, match="two feeds"):
        subject.forward(Feed(sequence, [5]), Feed(sequence, [6]))


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of memory")
