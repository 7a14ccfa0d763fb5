"""Chains in one call: the tokens, scratch nodes, keys and values of as many forwards of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import prompt_of
from test_native_forward import _always_native, both, network
from torch import Tensor

from foretoken.core import Budget, Context, Rng, TokenTree
from foretoken.core.noise import Noise
from foretoken.core.sampling import Sampler, SamplingParams
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.models.base import Feed
from foretoken.models.cache.window import Window
from foretoken.models.forward.heads.draft_head import DraftHead
from foretoken.models.forward.native_chain import ChainEnd, Pick
from foretoken.models.forward.parts import TargetParts
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.native import library
from foretoken.models.variants.second_weights import OwnWeightsModel, Scheme

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"no kernels: {library.why_not()}")

FAMILIES = ["llama", "qwen3", "gemma", "granite", "olmo2"]
LENGTHS, COUNTS = (9, 3, 21), (5, 1, 4)


@pytest.fixture(autouse=True)
def native_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", _always_native)


def model_of(name: str, **changes: Any) -> HuggingFaceModel:
    return both(network(name, **changes))[0]


def texts_of(model: HuggingFaceModel) -> list[Any]:
    """Three texts, between whose rows is one that takes no part."""
    sequences = [model.open() for _ in (*LENGTHS, 0)]
    aside = sequences.pop(1)
    model.prefill(aside, prompt_of(12, seed=9))
    for seed, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        model.prefill(sequence, prompt_of(length, seed=seed))
    return sequences


def feeds_of(sequences: Sequence[Any]) -> list[Feed]:
    """Some of them are fed more than one token."""
    return [Feed(sequence, prompt_of(1 + i, seed=5 + i), wanted=1) for i, sequence in enumerate(sequences)]


def by_steps(model: Any, feeds: Sequence[Feed], counts: Sequence[int]) -> list[list[int]]:
    """The same, a forward for each token."""
    chains: list[list[int]] = [[] for _ in feeds]
    waiting = list(feeds)
    for step in range(max(counts)):
        active = [i for i, count in enumerate(counts) if count > step]
        rows = model.forward([waiting[i] for i in active])
        for i, row in zip(active, rows, strict=True):
            chains[i].append(int(row.logits[-1].argmax()))
            waiting[i] = Feed(feeds[i].sequence, chains[i][-1:])
    return chains


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_are_steps(level: str, name: str) -> None:
    """Tokens, scratch nodes, and what is stored: a token behind them has the same bits."""
    model = model_of(name)
    chained, stepped = texts_of(model), texts_of(model)
    chains = model.chains(feeds_of(chained), COUNTS)
    assert chains == by_steps(model, feeds_of(stepped), COUNTS) and [len(chain) for chain in chains] == list(COUNTS)
    for sequence, other in zip(chained, stepped, strict=True):
        assert sequence.scratch_tokens == other.scratch_tokens and sequence.scratch_parents == other.scratch_parents
        assert sequence.scratch_depths == other.scratch_depths
        model.commit(sequence, range(len(sequence.scratch_tokens)))
        model.commit(other, range(len(other.scratch_tokens)))
    rows = [model.forward([Feed(text, [7]) for text in texts]) for texts in (chained, stepped)]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(*rows, strict=True))


def test_texts_of_several_caches() -> None:
    model = model_of("llama")
    long, short = model.open(), model.open()
    model.prefill(short, prompt_of(3))
    model.prefill(long, prompt_of(400, seed=1))
    assert long.cache is not short.cache
    chains = model.chains([Feed(long, [5], wanted=1), Feed(short, [6], wanted=1)], (4, 3))
    for sequence in (long, short):
        model.commit(sequence, ())
    assert chains == by_steps(model, [Feed(long, [5], wanted=1), Feed(short, [6], wanted=1)], (4, 3))


def test_chains_of_second_weights_on_the_targets_own_texts() -> None:
    """The nodes are provisional; the target's next forward states them anew."""
    target = model_of("llama")
    draft = OwnWeightsModel(target, Scheme(bits="8"))
    chained, stepped = texts_of(target), texts_of(target)
    chains = draft.chains(feeds_of(chained), COUNTS)
    assert chains == by_steps(draft, feeds_of(stepped), COUNTS)
    assert all(text.provisional for text in chained)
    rows = target.forward([Feed(text, [4, *chain]) for text, chain in zip(chained, chains, strict=True)])
    fresh = [target.open() for _ in chained]
    for seed, (text, chain, row) in enumerate(zip(fresh, chains, rows, strict=True)):
        target.prefill(text, prompt_of(LENGTHS[seed], seed=seed))
        (expected,) = target.forward([Feed(text, [4, *chain])])
        assert torch.equal(row.logits, expected.logits)


@pytest.mark.parametrize("states", [False, True])
def test_whoever_chooses_gets_logits_or_states(states: bool) -> None:
    model = model_of("gemma")
    calls: list[tuple[list[int], int, Tensor]] = []

    def second_best(active: Sequence[int], at: int, rows: Tensor) -> list[int]:
        calls.append((list(active), at, rows))
        logits = model.forwards.fast._logits(rows) if states else rows  # type: ignore[union-attr]
        return logits.topk(2).indices[:, 1].tolist()  # type: ignore[no-any-return]

    chains = model.chains(feeds_of(texts_of(model)), COUNTS, Pick(second_best, states))
    assert chains is not None and [len(chain) for chain in chains] == list(COUNTS)
    assert [(sorted(active), at) for active, at, _ in calls] == [
        ([i for i, count in enumerate(COUNTS) if count > at], at) for at in range(max(COUNTS))
    ]
    tokens = [list(chain) for chain in chains]
    for i, text in enumerate(others := texts_of(model)):
        feed = feeds_of(others)[i]
        (rows,) = model.forward([Feed(text, [*feed.tokens, *tokens[i][:-1]], wanted=len(tokens[i]))])
        assert rows.logits.topk(2).indices[:, 1].tolist() == tokens[i]


def test_what_a_choice_that_fails_leaves_behind() -> None:
    model = model_of("llama")
    texts = texts_of(model)

    def fails(active: Sequence[int], at: int, rows: Tensor) -> list[int]:
        if at == 2:
            raise RuntimeError("no choice")
        return [1] * len(active)

    with pytest.raises(RuntimeError, match="no choice"):
        model.chains(feeds_of(texts), COUNTS, Pick(fails))
    assert [len(text.scratch_tokens) for text in texts] == [1, 2, 3]


def test_a_chain_at_another_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    model = model_of("llama")
    right = model.chains(feeds_of(texts_of(model)), (8, 8, 8))

    def wrong(cache: Any, row: int, slot: int, position: int, steps: int) -> ChainEnd:
        return ChainEnd(cache, row, slot, 0, steps)

    monkeypatch.setattr("foretoken.models.huggingface.ChainEnd", wrong)
    assert model.chains(feeds_of(texts_of(model)), (8, 8, 8)) != right


def test_where_there_is_no_such_way_nothing_happens() -> None:
    short = model_of("mistral", sliding_window=16)
    windowed = model_of("llama")
    windowed.window = Window(4)
    lean = both(network("llama"))[1]
    dynamic = model_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for model in (short, windowed, lean, dynamic):
        texts = texts_of(model)
        assert model.chains(feeds_of(texts), COUNTS) is None
        assert not any(text.scratch_tokens for text in texts)
    branching = model_of("llama")
    text = texts_of(branching)[0]
    branching.forward([Feed(text, [1, 2], [-1, -1])])
    assert branching.chains([Feed(text, [3], wanted=1)], (2,)) is None


def test_a_window_that_a_text_does_not_reach_is_none() -> None:
    model = model_of("mistral", sliding_window=64)
    texts = texts_of(model)
    assert model.chains(feeds_of(texts), COUNTS) == by_steps(model, feeds_of(texts_of(model)), COUNTS)


# -- drafts ------------------------------------------------------------------------------------------------------------


def contexts_of(modes: Sequence[str], sequences: Sequence[Any], drafter: Any) -> list[Context]:
    """Requests whose prompts the target has read."""
    contexts = []
    for i, (mode, sequence) in enumerate(zip(modes, sequences, strict=True)):
        kind, _, penalty = mode.partition("+")
        temperature, top_p = 0.0 if kind == "greedy" else 0.9, 0.8 if kind == "top_p" else 1.0
        params = SamplingParams(temperature, top_p=top_p, repetition_penalty=1.7 if penalty else 1.0)
        tokens = [*sequence.tokens, 3 + i]
        sampler = Sampler(params, len(tokens) - 2, None if kind in ("greedy", "drawn") else Noise(i))
        context = Context(i, tokens, len(tokens) - 2, sampler, Rng(i))
        context.sequence = sequence
        drafter.start(context)
        contexts.append(context)
    return contexts


@pytest.mark.parametrize(
    "modes",
    [("greedy",) * 3, ("seeded",) * 3, ("greedy", "top_p", "seeded"), ("drawn",) * 3, ("greedy", "drawn", "drawn")],
    ids="-".join,
)
@pytest.mark.parametrize("kind", ["quantized", "quantized,vocab", "model"])
def test_drafts_are_those_of_steps(kind: str, modes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = model_of("llama")
    budgets = [Budget(6, 64), Budget(2, 64), Budget(64, 3)]

    def drafts(use: bool) -> list[TokenTree]:
        with monkeypatch.context() as patched:
            if not use:
                patched.setattr(HuggingFaceModel, "chains", lambda *_: None)
            if kind == "model":
                drafter: Any = ModelDrafter(model_of("llama", num_hidden_layers=2), 6, target=target)
            else:
                head = None
                if "vocab" in kind:
                    head = DraftHead(TargetParts(target), torch.arange(3, 80, 2))
                drafter = QuantizedDrafter(target, bits="8", k=6, head=head)
            return drafter.propose_batch(contexts_of(modes, texts_of(target), drafter), budgets)  # type: ignore[no-any-return]

    calls: list[bool] = []

    def counted(*arguments: Any) -> list[list[int]] | None:
        chains = by_calls(*arguments)
        calls.append(chains is not None)
        return chains

    by_calls = HuggingFaceModel.chains
    monkeypatch.setattr(HuggingFaceModel, "chains", counted)
    chains, steps = drafts(True), drafts(False)
    assert calls == [True]
    assert [len(tree) for tree in chains] == [7, 3, 4]
    for chain, step, mode in zip(chains, steps, modes, strict=True):
        assert (chain.tokens, chain.q_rows) == (step.tokens, step.q_rows)
        assert (chain.q is not None) == mode.startswith("drawn") and (chain.q is None or torch.equal(chain.q, step.q))


@pytest.mark.parametrize("mode", ["greedy", "drawn", "seeded"])
def test_a_draft_ends_where_the_request_lets_nothing_follow(mode: str) -> None:
    """The rules are not asked about tokens that they have ruled out."""
    target = model_of("llama")
    (text, *_) = texts_of(target)
    lengths: list[int] = []

    def two_more(ids: Tensor, scores: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        assert ids.shape[1] <= length + 2
        return torch.full_like(scores, -torch.inf) if ids.shape[1] == length + 2 else scores

    drafter = QuantizedDrafter(target, bits="8", k=6)
    (context,) = contexts_of([mode], [text], drafter)
    length = len(context.tokens)
    params = SamplingParams(context.sampler.params.temperature, processors=(two_more,))
    context.sampler = Sampler(params, length - 2, context.sampler.noise)
    (tree,) = drafter.propose_batch([context], [Budget(6, 64)])
    assert len(tree) == 3 and lengths == [length, length + 1, length + 2]


def test_whoever_has_states_beside_its_tokens_or_is_cut_has_no_such_way() -> None:
    model = model_of("llama")
    text = texts_of(model)[0]
    assert model.chains([Feed(text, [3], wanted=1, states=torch.zeros(1, 96))], (2,)) is None
    assert not text.scratch_tokens
