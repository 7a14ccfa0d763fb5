"""Models that cannot take trees: refused by name where a tree is asked for, right in everything that they can do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, new_model, plain_logits, prompt_of, save
from seq2seq import t5

import foretoken as ft
from foretoken.core import TokenTree
from foretoken.engine.loop import Engine
from foretoken.methods.controllers.constant import ConstantController
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.scripted import ScriptedDrafter
from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.network.capabilities import detect
from foretoken.models.network.taps import decoder_layers
from foretoken.models.sequential import SequentialModel

HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""A quarter of heads of 12 would be an odd number."""

# model_type: (config values, the layer type that the error names)
ROLLED_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ({"d_model": 48, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 128}, "ALiBi"),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "stablelm": ({"num_hidden_layers": 2, "rope_parameters": HALF_TURNED}, "attention layers"),
    "llama4": ({"attn_temperature_tuning": True, "floor_scale": 8}, "Llama4TextAttention"),
}
RECURRENT: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8, "num_hidden_layers": 2}, "linear_attention"),
    "jamba": (
        {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "expert_layer_period": 99,
            "expert_layer_offset": 5,
        },
        "linear_attention",
    ),
    # Keeps its state inside its modules: no cache object to hand around.
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 64, "head_dim": 12},
        "linear_attention",
    ),
    "rwkv": ({"attention_hidden_size": 48, "context_length": 128}, "recurrent"),
}
EVERY = {**ROLLED_BACK, **RECURRENT}
PROMPTS = [prompt_of(13), prompt_of(1, seed=1), prompt_of(30, seed=2)]
NEW = 16


@pytest.fixture(scope="module", params=EVERY)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SequentialModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ft.load(str(save(new_model(request.param, **EVERY[request.param][0]), folder)), drafter=None).target
    assert isinstance(model, SequentialModel)
    return model


def name_of(target: SequentialModel) -> str:
    return target.config.model_type.removesuffix("_text")


def reference(target: SequentialModel, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens of ``transformers.generate``."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[
        0, len(prompt) :
    ].tolist()


def by_hand(target: SequentialModel, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens of the plain forward on the whole text, again for every token."""
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(plain_logits(target.model, text)[-1].argmax()))
    return text[len(prompt) :]


def test_plain_decoding_is_that_of_transformers(target: SequentialModel) -> None:
    llm = ft.load(target, drafter=None)
    for prompt in PROMPTS:
        output = llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids
        assert output == by_hand(target, prompt)
        assert output == reference(target, prompt)
    together = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert [o.token_ids for o in together] == [by_hand(target, prompt) for prompt in PROMPTS]
    assert not target._caches  # released


def test_trees_are_refused_by_the_name_of_the_layer(target: SequentialModel, tmp_path: Path) -> None:
    layer = EVERY[name_of(target)][1]
    assert layer in target.capabilities.missing["tree_mask"]
    draft = save(new_model("llama"), tmp_path / "draft")
    with pytest.raises(CapabilityError, match=layer):
        ft.load(target, drafter=f"model:{draft},tree=2x2")
    tree_drafter = ScriptedDrafter(propose=lambda context, budget: TokenTree.root_only(context.root))
    with pytest.raises(CapabilityError, match=layer):
        Engine(target, tree_drafter, None, ConstantController())
    with pytest.raises(CapabilityError, match=layer):
        HuggingFaceModel(target.model)
    sequence = target.open()
    with pytest.raises(CapabilityError, match=layer):
        target.forward([Feed(sequence, [3, 4, 5], [-1, 0, 0])])
    assert sequence.scratch_tokens == []


def test_chains_run_where_the_cache_can_be_rolled_back(target: SequentialModel) -> None:
    if name_of(target) not in ROLLED_BACK:
        for drafter in ("ngram", ScriptedDrafter("3 4")):
            with pytest.raises(CapabilityError, match=EVERY[name_of(target)][1]):
                ft.load(target, drafter=drafter)
        sequence = target.open()
        with pytest.raises(CapabilityError, match="one token at a time"):
            target.forward([Feed(sequence, [3, 4])])
        target.forward([Feed(sequence, [3])])
        with pytest.raises(CapabilityError, match="rolled back"):
            target.commit(sequence, [])
        return
    for prompt in PROMPTS:
        truth = by_hand(target, prompt)
        # Right twice, wrong once: every round drops a part of its chain.
        guesses = [token if i % 3 != 2 else (token + 1) % VOCAB for i, token in enumerate(truth)]
        half_right = ScriptedDrafter(as_output=True, script=guesses)
        for drafter in (half_right, "ngram,k=4", ScriptedDrafter("3 3 3")):
            llm = ft.load(target, drafter=drafter, controller="constant")
            output = llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
            assert output.token_ids == truth
            if drafter is half_right:
                assert 0 < output.stats.num_accepted_tokens < output.stats.num_draft_tokens


def test_chain_logits_and_taps_are_the_plain_ones(target: SequentialModel) -> None:
    prompt, layers = prompt_of(12), target.config.num_hidden_layers
    sequence = target.open()
    taps = target.prefill(sequence, prompt[:-1], ["layer:1", "last"])
    assert [len(h) for h in taps.values()] == [11, 11]
    if target.capabilities.rollback:
        (wrong,) = target.forward([Feed(sequence, [prompt[-1], 3, 4, 5], wanted=2)])
        assert torch.allclose(wrong.logits, plain_logits(target.model, [*prompt, 3, 4, 5])[-2:], atol=1e-3, rtol=1e-4)
        target.commit(sequence, [0, 1])
        text = [*prompt, 3]
    else:
        target.forward([Feed(sequence, prompt[-1:])])
        target.commit(sequence, [0])
        text = prompt
    (rows,) = target.forward([Feed(sequence, [9])], ["last"])
    expected = plain_logits(target.model, [*text, 9])[-1]
    assert float((rows.logits[0] - expected).abs().max() / expected.std()) < 1e-4
    assert rows.taps["last"].shape == (1, target.config.hidden_size)
    target.commit(sequence, [0])
    with pytest.raises(ValueError, match=f"from 0 to {layers}"):
        target.forward([Feed(sequence, [9])], ["layer:99"])
    assert sequence.scratch_tokens == []
    target.release(sequence)


@pytest.mark.parametrize("layer", [0, -1], ids=["first layer", "last layer"])
def test_after_a_failure_a_text_is_read_again(target: SequentialModel, layer: int) -> None:
    """Also that of a feed which succeeded: its nodes are dropped, even where a cache cannot be rolled back."""
    texts = [target.open(), target.open()]
    for text, prompt in zip(texts, (PROMPTS[0], PROMPTS[2]), strict=True):
        target.prefill(text, prompt)
    feeds = [Feed(text, [token]) for text, token in zip(texts, (3, 4), strict=True)]
    module, forward = decoder_layers(target.model)[layer], type(decoder_layers(target.model)[layer]).forward
    calls: list[int] = []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        if self is module:
            calls.append(len(calls))
            if len(calls) == 2:
                raise RuntimeError("out of memory")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(module), "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            target.forward(feeds)
    assert not any(text.scratch_tokens for text in texts)
    for feed in feeds:
        for token in (feed.tokens[0], 7):
            (rows,) = target.forward([Feed(feed.sequence, [token])])
            expected = plain_logits(target.model, [*feed.sequence.tokens, token])[-1]
            assert float((rows.logits[0] - expected).abs().max() / expected.std()) < 1e-4
            target.commit(feed.sequence, [0])
        target.release(feed.sequence)


def test_an_error_belongs_to_its_request(target: SequentialModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault in a batch: the requests that are tried again give the same tokens."""
    llm = ft.load(target, drafter=None)
    expected = [by_hand(target, prompt) for prompt in PROMPTS]
    last, calls = decoder_layers(target.model)[-1], list[int]()
    forward = type(last).forward

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        if self is last:
            calls.append(len(calls))
            if len(calls) == 20:
                raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(type(last), "forward", failing)
    outputs = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert len(calls) > 20 and [output.token_ids for output in outputs] == expected


def test_a_draft_model_must_be_able_to_draft() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recurrent, alibi = (wrap(new_model(n, **EVERY[n][0])) for n in ("mamba", "bloom"))
    with pytest.raises(CapabilityError, match="linear_attention"):
        ModelDrafter(recurrent)
    with pytest.raises(CapabilityError, match="ALiBi"):
        ModelDrafter(alibi, tree="2x2")
    target = wrap(new_model("llama", seed=5))
    plain = ft.load(target, drafter=None).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    drafted = ft.load(target, drafter=ModelDrafter(alibi, k=3)).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


@pytest.mark.parametrize("name", ["bloom", "rwkv"])
def test_a_network_in_another_dtype_is_described_by_it(name: str) -> None:
    network = new_model(name, **EVERY[name][0])
    llm = ft.load(network, drafter=None)
    assert llm.describe()["weights"] == "float32"
    network.to(torch.bfloat16)
    llm.generate([5, 6, 7], max_new_tokens=2)
    assert llm.describe()["weights"] == "bfloat16"


def test_models_that_can_take_trees_are_not_refused() -> None:
    for name in ("llama", "gpt2", "llama4"):
        model = new_model(name)
        assert detect(model).missing == {}
        assert isinstance(wrap(model), HuggingFaceModel)


@pytest.mark.parametrize("name", ["bloom", "mamba", "llama", "t5"])
def test_an_unknown_exactness_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="exact must be 'distribution', 'bitwise' or 'approximate', not 'bitwse'"):
        wrap(t5() if name == "t5" else new_model(name, **EVERY.get(name, ({},))[0]), exact="bitwse")


@pytest.mark.parametrize("name", ["bloom", "mixtral", "t5"])
def test_bits_that_cannot_be_promised_are_said(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foretoken.models.refusals._SAID", set())
    model = t5() if name == "t5" else new_model(name, **EVERY.get(name, ({},))[0])
    runs = wrap(model, exact="bitwise")
    lost = [str(refused) for refused in runs.refused if refused.path == "bitwise"]
    assert runs.exactness == "rounding" and len(lost) == 1 and runs.exactness_why in lost[0]
    assert caplog.messages.count(lost[0]) == 1
    runs = wrap(model)
    assert not [refused for refused in runs.refused if refused.path == "bitwise"], "it was not asked for"
