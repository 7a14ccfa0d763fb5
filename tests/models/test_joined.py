"""Texts of a hybrid that share a forward: logits and states are those of texts that run alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, plain_logits, prompt_of
from hybrids import hybrid, unclamped, whole_float64
from test_stateful import ABLE, TOLERANCE, worst
from transformers.cache_utils import LinearAttentionLayer

import foretoken as ft
from foretoken.models import wrap
from foretoken.models.base import Feed
from foretoken.models.cache.joined import JoinedCache
from foretoken.models.stateful import PADDED, StatefulModel

LENGTHS = (13, 5, 9)
ROUNDS = [
    *[((4, 4, 4), (1, 1, 1)), ((4, 4, 4), (4, 4, 4)), ((1, 1, 1), (1, 1, 1))],
    *[((3, 3, 3), (1, 3, 2)), ((3, 1, 3), (2, 1, 1))],
]
"""Rows of each text, and how many are kept."""


@pytest.fixture(scope="module", params=ABLE)
def network(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = unclamped(hybrid(request.param))
    with whole_float64(model):
        yield model


@pytest.fixture(scope="module")
def qwen() -> Iterator[Any]:
    model = hybrid("qwen3_5_text")
    with whole_float64(model):
        yield model


def test_blocks_in_float64_end_in_any_order() -> None:
    """A fixture per model and one per file overlap; what either left behind reached all later tests."""
    numbers = torch.ones(1)
    before = numbers.float().dtype
    outer, inner = whole_float64(model := hybrid("qwen3_5_text")), whole_float64(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert numbers.float().dtype == torch.float64
    inner.__exit__(None, None, None)
    assert numbers.float().dtype == before


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of self-tests are not remembered."""
    monkeypatch.setattr("foretoken.models.stateful._JOINED", {})


def texts_of(model: StatefulModel) -> list[Any]:
    sequences = [model.open() for _ in LENGTHS]
    for seed, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        model.prefill(sequence, prompt_of(length, seed=seed))
    return sequences


def round_of(model: StatefulModel, sequences: Any, counts: Any, kept: Any, step: int) -> tuple[float, int]:
    """Chains of some lengths of which some tokens are kept; the largest difference of logits, and the forwards."""
    chains = [prompt_of(count, seed=10 * step + i) for i, count in enumerate(counts)]
    before = model.num_forwards
    rows = model.forward([Feed(s, chain) for s, chain in zip(sequences, chains, strict=True)])
    forwards, off = model.num_forwards - before, 0.0
    for sequence, chain, row, count in zip(sequences, chains, rows, kept, strict=True):
        expected = plain_logits(model.model, [*sequence.tokens, *chain])[-len(chain) :]
        off = max(off, float((row.logits - expected).abs().max()))
        model.commit(sequence, range(count))
    return off, forwards


def test_rounds_of_several_texts(network: Any) -> None:
    """All, some and none of the drafts are kept; then one token each, and chains of two lengths."""
    model = StatefulModel(network)
    assert model.joined_off == ""
    sequences = texts_of(model)
    for step, (counts, kept) in enumerate(ROUNDS):
        off, forwards = round_of(model, sequences, counts, kept, step)
        assert off < TOLERANCE
        assert forwards <= (1 if step < 4 else 3), "lazily replayed texts lag behind by different tokens"
        for sequence in sequences:
            assert worst(model, sequence) < TOLERANCE
    for sequence in sequences:
        model.settle(sequence)
        assert worst(model, sequence) < TOLERANCE
        model.release(sequence)


def test_lazily_only_texts_with_equally_many_rows_share(qwen: Any) -> None:
    model = StatefulModel(qwen, replay="lazy")
    sequences = texts_of(model)
    assert round_of(model, sequences, (3, 1, 3), (3, 1, 3), 0)[1] == 2
    fresh = model.open()  # has read nothing
    assert round_of(model, [*sequences, fresh], (2, 2, 2, 2), (2, 1, 2, 1), 1)[1] == 2


RAGGED = [((3, 1, 5), (1, 1, 2)), ((1, 9, 2), (1, 9, 1)), ((4, 1, 1), (4, 1, 1)), ((1, 1, 1), (1, 1, 1))]


def test_chains_of_all_lengths_share_a_forward(qwen: Any) -> None:
    """Padding behind the shorter ones changes no state, window or key; behind a lone root there is no checkpoint."""
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    for step, (counts, kept) in enumerate(RAGGED):
        off, forwards = round_of(model, sequences, counts, kept, step)
        assert off < TOLERANCE and forwards == 1
        for sequence in sequences:
            assert worst(model, sequence) < TOLERANCE
    before = model.run_rows
    round_of(model, sequences, (3, 1, 5), (1, 1, 1), 4)
    assert model.run_rows == before + 3 * 5
    fresh = model.open()  # has read nothing
    assert round_of(model, [*sequences, fresh], (2, 1, 2, 2), (2, 1, 2, 1), 5)[1] == 2
    off, forwards = round_of(model, sequences, (2, PADDED + 1, 1), (1, 3, 1), 6)
    assert off < TOLERANCE and forwards == 2, "a long piece of text runs alone"


def test_padding_that_recurrences_read_is_seen(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    monkeypatch.setattr("foretoken.models.stateful.padding_of", lambda *_: None)
    assert round_of(model, sequences, (3, 1, 5), (3, 1, 5), 0)[0] < TOLERANCE
    assert [worst(model, sequence) < TOLERANCE for sequence in sequences] == [False, False, True]


def test_shorter_chains_keep_their_hidden_states(qwen: Any) -> None:
    together, alone = StatefulModel(qwen), StatefulModel(qwen, joined=False)
    for row, other in zip(
        *(
            model.forward([Feed(s, prompt_of(1 + 2 * i, seed=i)) for i, s in enumerate(texts_of(model))], ("last",))
            for model in (together, alone)
        ),
        strict=True,
    ):
        assert row.taps["last"].shape == other.taps["last"].shape
        assert float((row.taps["last"] - other.taps["last"]).abs().max()) < TOLERANCE


def test_a_text_that_grows_token_by_token_as_drafts_do(qwen: Any) -> None:
    """Their windows keep the inputs of several forwards."""
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    chains = [prompt_of(4, seed=i) for i in range(3)]
    before = model.num_forwards
    for step in range(4):
        parents = [step - 1] if step else None
        rows = model.forward([Feed(s, [chain[step]], parents) for s, chain in zip(sequences, chains, strict=True)])
        for sequence, chain, row in zip(sequences, chains, rows, strict=True):
            expected = plain_logits(model.model, [*sequence.tokens, *chain[: step + 1]])[-1:]
            assert float((row.logits - expected).abs().max()) < TOLERANCE
    assert model.num_forwards == before + 4
    for kept, sequence in enumerate(sequences):
        model.commit(sequence, range(kept + 1))
        model.settle(sequence)
        assert worst(model, sequence) < TOLERANCE


def test_hidden_states_are_those_of_each_text(qwen: Any) -> None:
    together, alone = StatefulModel(qwen), StatefulModel(qwen, joined=False)
    rows = [
        model.forward([Feed(s, prompt_of(2, seed=i)) for i, s in enumerate(texts_of(model))], ("last", "layer:2"))
        for model in (together, alone)
    ]
    for row, other in zip(*rows, strict=True):
        for name in ("last", "layer:2"):
            assert row.taps[name].shape == other.taps[name].shape == (2, 48)
            assert float((row.taps[name] - other.taps[name]).abs().max()) < TOLERANCE


def test_logits_that_nobody_wants(qwen: Any) -> None:
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    feeds = [Feed(s, prompt_of(3), wanted=count) for s, count in zip(sequences, (0, 1, 3), strict=True)]
    before = model.num_forwards
    assert [len(rows.logits) for rows in model.forward(feeds)] == [0, 1, 3]
    assert model.num_forwards == before + 1


def test_a_forward_that_breaks_off_leaves_texts_that_can_be_read_again(qwen: Any) -> None:
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    layer = qwen.model.layers[-1]

    def fails(*_: Any) -> None:
        raise RuntimeError("no more memory")

    handle = layer.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no more memory"):
        model.forward([Feed(s, [1, 2]) for s in sequences])
    handle.remove()
    for step in range(2):
        assert round_of(model, sequences, (3, 3, 3), (1, 3, 2), step)[0] < TOLERANCE


def test_a_text_whose_neighbour_has_left(qwen: Any) -> None:
    model = StatefulModel(qwen)
    sequences = texts_of(model)
    round_of(model, sequences, (3, 3, 3), (1, 2, 3), 0)
    model.release(sequences.pop(1))
    assert round_of(model, sequences, (3, 3), (2, 1), 1)[0] < TOLERANCE


@pytest.mark.parametrize("drafter", [None, "ngram,k=3", "suffix,k=4"])
def test_texts_of_a_batch_are_those_of_texts_alone(qwen: Any, drafter: Any) -> None:
    """Greedy and seeded, of different lengths, so that they end and are joined in changing company."""
    prompts = [prompt_of(length, seed=i) * 2 for i, length in enumerate((6, 3, 9, 4))]
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        batched, separate = (  # a drafter that has seen the texts would guess them
            ft.load(StatefulModel(qwen), drafter=drafter, prefix_cache=False, controller="constant") for _ in range(2)
        )
        together = batched.generate(prompts, max_new_tokens=16, **options)  # type: ignore[arg-type]
        alone = [separate.generate(prompt, max_new_tokens=16, **options) for prompt in prompts]  # type: ignore[arg-type]
        assert [out.token_ids for out in together] == [out.token_ids for out in alone]
        assert batched.target.num_forwards < 0.7 * separate.target.num_forwards  # type: ignore[attr-defined]


# -- the self-test -----------------------------------------------------------------------------------------------------


def wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinedCache, "mask", lambda self, rows: None)


def old_states(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_back = JoinedCache.hand_back

    def windows_alone(self: JoinedCache) -> None:
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.recurrent_states = {}
        hand_back(self)

    monkeypatch.setattr(JoinedCache, "hand_back", windows_alone)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    init = JoinedCache.__init__
    monkeypatch.setattr(JoinedCache, "__init__", lambda self, caches, pads: init(self, caches[::-1], pads))


def read_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.stateful.padding_of", lambda *_: None)


def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.cache.joined.JOINED", {})


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (wrong_mask, "differ"),
        (old_states, "differ"),
        (swapped, "differ"),
        (read_padding, "differ"),
        (unknown, "cannot be batched"),
    ],
)
def test_what_goes_wrong_is_found_at_load(
    qwen: Any, untried: None, fault: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    model = StatefulModel(qwen)
    assert reason in model.joined_off and model.refused[0].why == model.joined_off
    monkeypatch.undo()
    sequences, before = texts_of(model), model.num_forwards
    model.forward([Feed(s, [1]) for s in sequences])
    assert model.num_forwards == before + len(sequences), "one by one"


def test_a_recurrence_that_is_replaced_is_tried_again(
    qwen: Any, untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StatefulModel(qwen).joined_off == ""
    kind = next(type(module) for module in qwen.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    plain, tried = kind.forward, []
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: plain(self, *args, **kwargs))
    monkeypatch.setattr("foretoken.models.stateful.joined_fault", lambda model: tried.append(model) or "it differs")
    assert StatefulModel(qwen).joined_off == StatefulModel(qwen).joined_off == "it differs"
    assert len(tried) == 1


def test_texts_run_alone_where_they_must_not_depend_on_others(qwen: Any) -> None:
    model: Any = wrap(qwen, exact="bitwise")
    assert isinstance(model, StatefulModel) and "one by one" in model.joined_off
    assert [refused.path for refused in model.refused] == ["bitwise"], "that it was not tested is all that is said"
    assert wrap(qwen).joined_off == ""  # type: ignore[attr-defined]
    assert model.vocab_size == VOCAB
    assert torch.float64 == model.dtype
