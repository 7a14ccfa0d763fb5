"""Rotary embeddings that change with the length of the text: the tokens of `generate`, whatever is read beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from checkpoints import PLAIN_ROPE, new_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretoken.core.sampling import SamplingParams
from foretoken.engine.loop import Engine
from foretoken.engine.request import Request, Running
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.cascade import CascadeDrafter
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.lookahead import LookaheadDrafter
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.ngram import NgramDrafter
from foretoken.methods.drafters.sparse_kv import SparseKvDrafter
from foretoken.methods.verifiers.compatibility import inner_rule
from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.forward.graphed import with_graphs
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.rotary import ChangingRotary, context_of, rule_of
from foretoken.models.sequential import SequentialModel
from toys import engine, outputs, serve

BORDER, LONGEST, NEW = 64, 256, 12
LENGTHS = (20, 56, BORDER - 2, BORDER - 1, BORDER, BORDER + 1, 80)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": BORDER,
}
DYNAMIC = {**PLAIN_ROPE, "rope_type": "dynamic", "factor": 4.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}),
    "phimoe": (
        "phimoe",
        {
            "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
            "original_max_position_embeddings": BORDER,
            **EXPERTS,
        },
    ),
    "llama_longrope": ("llama", {"rope_parameters": LONGROPE}),
    "llama_dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "gemma3_by_layer": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": {**LONGROPE, "factor": 4.0}}},
    ),
}


@cache
def network(family: str, noise: float = 0.0, **changes: Any) -> Any:
    """A random model in float64 (experts in float32: their kernel has no wider one), or one near it."""
    name, values = FAMILIES[family]
    size = {"head_dim": 12} if name == "gemma3" else {}
    sizes = {"max_position_embeddings": LONGEST, "eos_token_id": None, **size, **values, **changes}
    sizes = copy.deepcopy(sizes)  # a configuration completes the parameters that it is given
    dtype = torch.float32 if name == "phimoe" else torch.float64
    model = new_model(name, **sizes).to(dtype)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            change = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_((noise * weight.std() * change).to(dtype))
    return model


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@cache
def answer(family: str, prompt: tuple[int, ...], new: int = NEW) -> list[int]:
    """The tokens that `generate` gives with a model that has not seen a text before."""
    fresh = copy.deepcopy(network(family))
    ids = torch.tensor([prompt])
    tokens: list[int] = fresh.generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
    return tokens


def target_of(family: str, lean: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(copy.deepcopy(network(family)), lean=lean)


def draft_of(family: str) -> HuggingFaceModel:
    """A model near the target, on the public forward."""
    return HuggingFaceModel(copy.deepcopy(network(family, 0.05)), lean=False)


DRAFTERS: dict[str, Callable[[HuggingFaceModel, str], Drafter | None]] = {
    "plain": lambda target, family: None,
    "chain": lambda target, family: ModelDrafter(draft_of(family), k=4),
    "tree": lambda target, family: ModelDrafter(draft_of(family), tree="3x2x1"),
}


def check(serving: Engine, family: str, lengths: Sequence[int], new: int = NEW) -> list[Running]:
    prompts = [prompt_of(length) for length in lengths]
    runs = serve(serving, [Request(prompt, max_new_tokens=new) for prompt in prompts])
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.output == answer(family, tuple(prompt), new), f"a prompt of {len(prompt)} tokens"
    return runs


# -- as generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_on_both_sides_of_the_border_in_one_batch_read_in_chunks(family: str, drafter: str) -> None:
    target = target_of(family)
    check(engine(target, DRAFTERS[drafter](target, family), prefill_chunk=24), family, LENGTHS)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [BORDER - 6, BORDER - 1, BORDER, BORDER + 1])
def test_alone_on_the_public_forward(length: int, drafter: str) -> None:
    target = target_of("phi3", lean=False)
    runs = check(engine(target, DRAFTERS[drafter](target, "phi3")), "phi3", [length])
    assert drafter == "plain" or runs[0].stats.num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["phi3", "llama_longrope", "llama_dynamic", "gemma3_by_layer"])
def test_the_lean_forward_covers_it(family: str) -> None:
    assert target_of(family).is_lean


def test_a_prompt_of_many_chunks_has_the_long_factors_from_its_first_one_on() -> None:
    target = target_of("phi3")
    check(engine(target, prefill_chunk=32), "phi3", [150], 6)


SELF_DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter]] = {
    "ngram": lambda target: NgramDrafter(k=6),
    "lookahead": lambda target: LookaheadDrafter(w=4, n=4, g=4, context_length=target.context_length),
    "layer_skip": lambda target: LayerSkipDrafter(target, attention="1", k=3, adaptive=False),
    "sparse_kv": lambda target: SparseKvDrafter(target, k=3, budget=32, chunk=4, rebuild=8),
    "cascade": lambda target: CascadeDrafter(draft_of("phi3"), NgramDrafter(k=3), inner_rule, k=4),
}


@pytest.mark.parametrize("name", SELF_DRAFTERS)
def test_drafters_that_share_the_cache_or_have_texts_of_their_own(name: str) -> None:
    target = target_of("phi3")
    check(engine(target, SELF_DRAFTERS[name](target)), "phi3", [52, 80], 24)


def test_a_draft_model_with_a_border_of_its_own() -> None:
    target = target_of("phi3")
    rope = {**LONGROPE, "original_max_position_embeddings": 40}
    draft = HuggingFaceModel(new_model("phi3", rope_parameters=rope, original_max_position_embeddings=40).double())
    check(engine(target, ModelDrafter(draft, k=3)), "phi3", [30, 38, 60])


def test_a_draft_model_reads_its_text_again_as_a_long_one() -> None:
    draft, text = draft_of("phi3"), prompt_of(BORDER + 1)
    sequence = draft.open()
    draft.prefill(sequence, text[: BORDER - 2])
    draft.forward([Feed(sequence, draft.catch_up(sequence, text[: BORDER - 1]))])
    row = draft.forward([Feed(sequence, draft.catch_up(sequence, text), wanted=1)])[0].logits
    expected = draft.model(torch.tensor([text])).logits[:, -1]
    assert torch.allclose(row, expected, atol=1e-5)
    draft.rewind(sequence, BORDER - 4)
    row = draft.forward([Feed(sequence, draft.catch_up(sequence, text[: BORDER - 2]), wanted=1)])[0].logits
    assert torch.allclose(row, draft.model(torch.tensor([text[: BORDER - 2]])).logits[:, -1], atol=1e-5)


# -- kept texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_over_the_border_takes_over_nothing_of_a_short_one(family: str) -> None:
    target = target_of(family)
    serving = engine(target, prefix_bytes=2**24)
    (first,) = check(serving, family, [44], 4)
    second = [*prompt_of(44), *first.output, *prompt_of(30)]
    (run,) = serve(serving, [Request(second, max_new_tokens=NEW)])
    assert run.output == answer(family, tuple(second))
    assert run.stats.num_prompt_tokens_computed == len(second)


def test_turns_on_one_side_of_the_border_are_still_taken_over() -> None:
    target = target_of("phi3")
    serving = engine(target, prefix_bytes=2**24)
    for length in (30, 90):
        (run,) = check(serving, "phi3", [length], 4)
        following = [*prompt_of(length), *run.output, 5, 6, 7]
        (run,) = serve(serving, [Request(following, max_new_tokens=4)])
        assert run.output == answer("phi3", tuple(following), 4)
        assert run.stats.num_prompt_tokens_computed < 10


def test_a_text_that_was_read_in_another_way_is_not_restored() -> None:
    target = target_of("phi3")
    short, long = target.open(), target.open()
    target.prefill(short, prompt_of(20))
    kept = target.snapshot(short, 20)
    target.expect(long, BORDER + 1)
    assert kept is not None
    with pytest.raises(ValueError, match="another length"):
        target.restore(long, kept, 20)


# -- planted mistakes ------------------------------------------------------------------------------------------------


@contextmanager
def planted(mistake: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if mistake == "the longest row decides":
            patch.setattr(
                ChangingRotary, "lengths", staticmethod(lambda p, regimes: torch.full_like(p, int(p.max()) + 1))
            )
        elif mistake == "rounds straddle the border":
            patch.setattr(ChangingRotary, "room", lambda self, sequence: None)
        elif mistake == "nothing is read again":
            patch.setattr(ChangingRotary, "_reread", staticmethod(lambda model, sequence, regime: None))
        else:
            patch.setattr(HuggingFaceModel, "expect", lambda self, sequence, length: None)
        yield


@pytest.mark.parametrize(
    "mistake", ["the longest row decides", "rounds straddle the border", "nothing is read again", "prompts are unknown"]
)
def test_planted_mistakes_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(mistake, monkeypatch):
        target = target_of("phi3")
        drafter = ModelDrafter(HuggingFaceModel(target.model, lean=False), k=4)
        requests = [Request(prompt_of(length), max_new_tokens=NEW) for length in LENGTHS]
        texts = outputs(engine(target, drafter, prefill_chunk=24), requests)
    assert texts != [answer("phi3", tuple(request.prompt)) for request in requests]


# -- which kinds there are -------------------------------------------------------------------------------------------

MORE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": BORDER},
    "longrope": LONGROPE,
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": BORDER,
    },
    "proportional": {"factor": 2.0},
}
RULES = {"dynamic": "each", "longrope": "two"}


@pytest.mark.parametrize("kind", sorted({"default", *ROPE_INIT_FUNCTIONS}))
def test_every_type_of_transformers_is_in_the_class_that_it_behaves_as(kind: str) -> None:
    parameters = {**PLAIN_ROPE, **MORE.get(kind, {}), "rope_type": kind}
    model = new_model("llama", rope_parameters=parameters, max_position_embeddings=BORDER)
    x = torch.zeros(1)

    def first_turn(longest: int) -> Any:
        module = copy.deepcopy(model.model.rotary_emb)
        return module(x, torch.tensor([[5, longest - 1]]))[0][0, 0]

    assert rule_of(kind, parameters) == RULES.get(kind, "static")
    turns = [first_turn(length) for length in (BORDER, BORDER + 1, BORDER + 40)]
    same = [torch.equal(turns[0], turns[1]), torch.equal(turns[1], turns[2])]
    assert same == {"static": [True, True], "two": [False, True], "each": [False, False]}[rule_of(kind, parameters)]
    assert torch.equal(first_turn(9), turns[0])
    assert (ChangingRotary.of(model) is None) == (kind not in RULES)


def test_a_dynamic_embedding_stretches_the_context_by_its_factor() -> None:
    assert target_of("llama_dynamic").context_length == 4 * BORDER


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_forward_that_does_not_follow_the_length_ends_at_the_border() -> None:
    model = SequentialModel(copy.deepcopy(network("phi3")))
    assert model.context_length == BORDER
    with pytest.raises(ValueError, match=rf"context is {BORDER} \(its rotary embeddings change beyond {BORDER} tokens"):
        engine(model).add(Request(prompt_of(BORDER + 1)))
    with pytest.raises(ValueError, match="rotary embeddings change"):
        engine(model).add(Request(prompt_of(BORDER - 4), max_new_tokens=5))


def test_two_borders_of_one_model_end_its_context() -> None:
    model = copy.deepcopy(network("phi3"))
    model.config.original_max_position_embeddings = 50
    wrapped = wrap(model)
    assert wrapped.context_length == 50
    with pytest.raises(ValueError, match="prefills a sequence again at 50 tokens"):
        engine(wrapped).add(Request(prompt_of(60)))


def test_graphs_are_refused_by_name() -> None:
    target = target_of("phi3")
    with pytest.raises((CapabilityError, ValueError), match="rotary embeddings change with the length"):
        with_graphs(target, True, recorder=object())  # type: ignore[arg-type]


# -- what is left behind ---------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model = copy.deepcopy(network("llama_dynamic"))
    module = model.model.rotary_emb
    before, names = module.inv_freq.clone(), set(vars(module))
    check(engine(HuggingFaceModel(model, lean=False)), "llama_dynamic", [BORDER + 3])
    assert torch.equal(module.inv_freq, before) and set(vars(module)) == names
    assert module.max_seq_len_cached == BORDER


def test_long_texts_before_it_was_loaded_do_not_matter() -> None:
    for family in ("phi3", "llama_dynamic"):
        model = copy.deepcopy(network(family))
        model(torch.tensor([prompt_of(100)]))
        check(engine(HuggingFaceModel(model)), family, [20, BORDER + 1])


def test_a_text_whose_second_reading_fails_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prefill, failures = target_of("phi3"), HuggingFaceModel.prefill, [1]

    def fail_once(self: HuggingFaceModel, sequence: Any, tokens: Sequence[int], taps: Sequence[str] = ()) -> Any:
        if len(tokens) == BORDER and failures:
            failures.pop()
            prefill(self, sequence, tokens[:30])
            raise RuntimeError("planted")
        return prefill(self, sequence, tokens, taps)

    sequence, text = target.open(), prompt_of(BORDER + 1)
    target.prefill(sequence, text[:BORDER])
    monkeypatch.setattr(HuggingFaceModel, "prefill", fail_once)
    with pytest.raises(RuntimeError, match="planted"):
        target.forward([Feed(sequence, text[BORDER:])])
    row = target.forward([Feed(sequence, text[BORDER:])])[0].logits
    assert torch.allclose(row, target.model(torch.tensor([text])).logits[:, -1], atol=1e-5)


def test_seeded_requests_write_the_same_alone_and_in_company() -> None:
    target = target_of("phi3")
    requests = [
        Request(prompt_of(length), SamplingParams(temperature=1.0), NEW, seed=length) for length in (56, 62, 70)
    ]
    together = outputs(engine(target, ModelDrafter(draft_of("phi3"), k=4), prefill_chunk=24), requests)
    assert together == [outputs(engine(target), [request])[0] for request in requests]


def test_what_limits_a_context_is_said_once() -> None:
    assert context_of(new_model("llama"), 128) == (128, "")
