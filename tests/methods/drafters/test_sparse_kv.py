"""The target drafts over a part of its own cache: what it finds far back, and what it keeps between rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.ensemble import EnsembleDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.sparse_kv import SparseKvDrafter
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.variants.sparse import SparseModel, SparseState
from toys import engine, llama, llamas, outputs, serve, tables

PROMPT = [(7 * i + i * i // 3) % 31 for i in range(70)]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_within_the_budget_every_draft_is_accepted(temperature: float) -> None:
    """Draft distribution and target distribution are then the same."""
    target = HuggingFaceModel(llama())
    (run,) = serve(
        engine(target, SparseKvDrafter(target, k=4)), [Request(PROMPT, SamplingParams(temperature), 40, seed=3)]
    )
    assert run.stats.num_accepted_tokens == run.stats.num_draft_tokens > 0
    assert run.stats.mean_acceptance_length == 5.0


@pytest.mark.parametrize("select", ["retrieval", "recent"])
def test_a_small_budget_drafts_worse_and_changes_no_text(select: str) -> None:
    target = HuggingFaceModel(llama())
    plain = outputs(engine(target), [Request(PROMPT, SamplingParams(), 50)])
    drafter = SparseKvDrafter(target, k=4, budget=18, chunk=2, select=select, rebuild=7)
    (run,) = serve(engine(target, drafter), [Request(PROMPT, SamplingParams(), 50)])
    assert [run.output] == plain
    assert 0 < run.stats.num_accepted_tokens < run.stats.num_draft_tokens
    assert not target._sequences and not drafter.model._sequences  # type: ignore[attr-defined]


@pytest.mark.parametrize("select", ["retrieval", "recent"])
def test_the_sparse_cache_is_what_it_should_be_after_every_round(select: str) -> None:
    """The subset of the text when it was chosen, and behind it what the same weights make of the later tokens."""
    target = HuggingFaceModel(llama())
    shape: dict[str, Any] = {"budget": 18, "chunk": 2, "select": select, "rebuild": 9}
    drafter = SparseKvDrafter(target, tree="2x2x1", **shape)
    speculative = engine(target, drafter, max_batch=3)
    for seed, length in enumerate((70, 12, 40, 55)):
        speculative.add(Request(PROMPT[:length], SamplingParams(seed % 2), 10 + 8 * seed, seed=seed))
    cut = set()
    while speculative.busy:
        speculative.step()
        for run in speculative.requests.running:
            state: SparseState = run.context.state[drafter]
            assert run.context.tokens[: len(state.tokens)] == state.tokens
            assert state.source is run.sequence
            assert len(run.sequence.tokens) - state.chosen_from < 9 + 4
            cut.add(state.num_kept < state.chosen_from)
            check_against_a_fresh_one(drafter.model, state, shape)
    assert cut == {True, False}


def check_against_a_fresh_one(model: Any, state: SparseState, shape: dict[str, Any]) -> None:
    target = HuggingFaceModel(llama())
    sparse = SparseModel(target, **shape)
    source = target.open()
    count = state.chosen_from
    target.prefill(source, state.tokens[:count])
    fresh = sparse.open_beside(source)
    roots = [*state.tokens[count:], *state.scratch_tokens]
    sparse.choose(fresh, roots[0])
    if len(state.tokens) > count:
        sparse.forward([Feed(fresh, state.tokens[count:])])
        sparse.commit(fresh, range(len(state.tokens) - count))
    slots = sparse._slots(fresh)
    assert slots == model._slots(state)
    kept, expected = ([*each.cache.keys, *each.cache.values] for each in (model, sparse))
    for cached, right in zip(kept, expected, strict=True):
        torch.testing.assert_close(cached[state.row, :, :slots], right[0, :, :slots], rtol=0, atol=1e-10)


# -- a needle --------------------------------------------------------------------------------------------------------

KEYS = 4
NEEDLES, QUERIES, ANSWERS, FILLERS = 0, 16, 20, 24  # 4 x 4 needles "key i is answered by j", 4 queries, 4 answers
VOCAB = 28


def lookup_model() -> HuggingFaceModel:
    """A llama of one layer, by hand: query i is answered by what needle (i, j) says, wherever it is in the text.

    The embedding of token t is the unit vector t.  Query i asks in dimension i of a head, needle (i, j) has its key
    there and its answer j as its value.  The slow dimensions of a rotary head hardly turn.  After answer j comes query
    j + 1 (0 after 3), after a filler the next filler.
    """
    dim, width = 16, 48
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=dim, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e12},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    layer: Any = model.model.layers[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        for token in range(VOCAB):
            model.model.embed_tokens.weight[token, token] = 1.0
        head = model.lm_head.weight
        for i in range(KEYS):
            layer.self_attn.q_proj.weight[4 + i, QUERIES + i] = 5.0  # dimensions 4 to 7 turn by 1e-6 per token at most
            for j in range(KEYS):
                needle = NEEDLES + 4 * i + j
                layer.self_attn.k_proj.weight[4 + i, needle] = 5.0
                layer.self_attn.v_proj.weight[j, needle] = 1.0
            layer.self_attn.o_proj.weight[VOCAB + i, i] = 1.0  # answers arrive in dimensions of their own
            head[ANSWERS + i, VOCAB + i] = 5.0
            head[QUERIES + (i + 1) % KEYS, ANSWERS + i] = 1.0
            head[FILLERS + (i + 1) % KEYS, FILLERS + i] = 1.0
    model.generation_config.eos_token_id = None
    return HuggingFaceModel(model)


def haystack(answers: tuple[int, ...], before: int = 100, after: int = 300) -> list[int]:
    """Fillers, four needles, many fillers, query 0."""
    fillers = [FILLERS + i % KEYS for i in range(before + after)]
    needles = [NEEDLES + 4 * i + j for i, j in enumerate(answers)]
    return [*fillers[:before], *needles, *fillers[before:], QUERIES]


def test_a_passage_far_back_is_found_and_drafted() -> None:
    """The answers stand in one chunk 300 tokens back: retrieval finds it, recent tokens do not hold it."""
    answers = (2, 0, 3, 1)  # query 0 is answered by 2, then comes query 3, answered by 1, query 2, by 3, query 0
    target = lookup_model()
    request = Request(haystack(answers), SamplingParams(), 31)
    (plain,) = outputs(engine(target), [request])
    cycle = [ANSWERS + 2, QUERIES + 3, ANSWERS + 1, QUERIES + 2, ANSWERS + 3, QUERIES]
    assert plain == (cycle * 6)[:31]
    lengths = {}
    for select in ("retrieval", "recent"):
        drafter = SparseKvDrafter(target, k=5, budget=40, chunk=8, select=select)
        (run,) = serve(engine(target, drafter, controller=ConstantController(k=5)), [request])
        assert run.output == plain
        lengths[select] = run.stats.mean_acceptance_length
    assert lengths["retrieval"] == 31 / 6  # five rounds of six and the last one of one
    assert lengths["recent"] < 3


def test_the_needle_is_lost_when_the_query_asks_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the same subset size, chosen for a filler's query, drafts no better than recent tokens."""
    target = lookup_model()
    choose = SparseModel.choose
    monkeypatch.setattr(SparseModel, "choose", lambda self, own, root: choose(self, own, FILLERS))
    drafter = SparseKvDrafter(target, k=5, budget=40, chunk=8)
    (run,) = serve(
        engine(target, drafter, controller=ConstantController(k=5)),
        [Request(haystack((2, 0, 3, 1)), SamplingParams(), 31)],
    )
    assert run.stats.mean_acceptance_length < 3


# -- with others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_another_drafter_speeds_the_drafts_up(temperature: float) -> None:
    """TriForce's hierarchy: sparse target in the middle, n-grams at the bottom."""
    target = HuggingFaceModel(llama())
    drafter = build_drafter("sparse_kv,k=6,budget=18,chunk=2,rebuild=7,inner=(ngram,n=2)", target)
    assert isinstance(drafter, CascadeDrafter) and isinstance(drafter.model, SparseModel)
    assert (drafter.k, drafter.model.budget) == (6, 18)
    requests = [Request(PROMPT[:n], SamplingParams(temperature), 40, seed=n) for n in (70, 5, 33)]
    together = outputs(engine(target, drafter, max_batch=3), requests)
    assert together == [outputs(engine(target, drafter), [request])[0] for request in requests]
    if temperature == 0.0:
        assert together == outputs(engine(target), requests)
    assert not target._sequences and not drafter.model._sequences


def test_in_an_ensemble() -> None:
    target = HuggingFaceModel(llama())
    plain = outputs(engine(target), [Request(PROMPT, SamplingParams(), 40)])
    both = EnsembleDrafter([SparseKvDrafter(target, k=3, budget=18, chunk=2), NgramDrafter(n=2, k=3)])
    assert outputs(engine(target, both), [Request(PROMPT, SamplingParams(), 40)]) == plain


# -- what is refused -------------------------------------------------------------------------------------------------


def test_the_default_budget_is_a_quarter_of_the_context_within_bounds() -> None:
    for context, budget in ((128, 256), (2048, 512), (100_000, 4096)):
        target = HuggingFaceModel(llama(context=context), lean=False)
        assert SparseKvDrafter(target).model.budget == budget  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sparse_kv:./folder", "takes no path"),
        ("sparse_kv,budget=8", "budget >= 24"),
        ("sparse_kv,budget=16,select=recent", "budget >= 17"),
        ("sparse_kv,select=oldest", "retrieval or recent"),
        ("sparse_kv,size=3", "unknown option 'size'.*budget.*inner"),
        ("sparse_kv,k=0", "k >= 1"),
        ("sparse_kv,inner=early_exit", "cannot use 'early_exit' inside"),
        ("sparse_kv,inner=sparse_kv", "cannot use 'sparse_kv' inside"),
        ("sparse_kv,inner=ngram,tree=2x2", "leave out tree=2x2"),
    ],
)
def test_wrong_specs_are_refused(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        build_drafter(spec, llamas()[0])
    assert "\n" not in str(caught.value)


def test_a_table_is_no_target() -> None:
    with pytest.raises(CapabilityError, match="cache of keys and values"):
        SparseKvDrafter(tables()[0])
