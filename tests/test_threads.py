"""Several threads: one model through the hook, one :class:`Llm`; every text is right, and the model is left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.models import wrap
from foretoken.models.huggingface import HuggingFaceModel
from test_hub import llama

THREADS, CALLS = 4, 32
PROMPTS = [[3 + i % 7, 9, 5 + i % 11, 3, 9] for i in range(CALLS)]


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Switch threads far more often than usual, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(CALLS)))


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run on their own forward, as those of families without a lean one do."""
    monkeypatch.setattr("foretoken.models.forward.network.build_lean", lambda *_: None)


def plain_texts(model: Any) -> list[list[int]]:
    options = {"max_new_tokens": 12, "do_sample": False}
    return [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]


@pytest.mark.parametrize("kept", [False, True])
def test_the_hook_from_several_threads(public: None, kept: bool) -> None:
    model = llama(eos=None)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    expected = plain_texts(model)
    model.train()
    before = [config._attn_implementation_internal for config in (model.config, model.model.config)]
    generate = ft.CustomGenerate(drafter="early_exit,layer=1") if kept else ft.custom_generate

    def text_of(i: int) -> list[int]:
        ids = torch.tensor([PROMPTS[i]])
        out: list[int] = model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=generate)[0].tolist()
        return out

    assert at_once(text_of) == expected
    assert [config._attn_implementation_internal for config in (model.config, model.model.config)] == before
    assert all(module.training for module in model.modules())
    assert plain_texts(model.eval()) == expected


def test_wrapped_twice_and_used_at_once(public: None) -> None:
    """A hook in one thread, an ``Llm`` of the same network in another one: both write taps on it."""
    model = llama(eos=None)
    expected = plain_texts(model)
    llms = [ft.load(model, drafter=spec, prefix_cache=False) for spec in ("early_exit,layer=1", None)]
    before = model.config._attn_implementation_internal

    def text_of(i: int) -> list[int]:
        if i % 3 < 2:
            return [*PROMPTS[i], *llms[i % 3].generate(PROMPTS[i], max_new_tokens=12, ignore_eos=True).token_ids]
        ids = torch.tensor([PROMPTS[i]])
        out: list[int] = model.generate(
            ids, max_new_tokens=12, do_sample=False, custom_generate=ft.custom_generate, drafter="ngram"
        )[0].tolist()
        return out

    assert at_once(text_of) == expected
    assert model.config._attn_implementation_internal == before


@pytest.mark.parametrize("drafter", [None, "ngram,n=2,k=3", "early_exit,layer=1"])
def test_one_llm_from_several_threads(drafter: str | None) -> None:
    llm = ft.load(llama(eos=None), drafter=drafter)
    expected = [llm.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids for prompt in PROMPTS]

    def text_of(i: int) -> list[int]:
        options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
        if i % 3 == 0:
            return [token for piece in llm.stream(PROMPTS[i], **options) for token in piece.token_ids]
        if i % 3 == 1:  # the same target without drafts
            return list(llm.plain.generate(PROMPTS[i], **options).token_ids)
        return list(llm.generate(PROMPTS[i], **options).token_ids)

    for _ in range(3):
        assert at_once(text_of) == [list(tokens) for tokens in expected]
    assert not llm.engine.busy


def test_a_forward_switches_dropout_off_and_leaves_training_on(public: None) -> None:
    model = llama(eos=None)
    target = wrap(model)
    assert isinstance(target, HuggingFaceModel)
    sequence = target.open()
    target.prefill(sequence, PROMPTS[0])
    model.train()
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    first, second = (plain_logits(target, sequence) for _ in range(2))
    assert torch.equal(first, second) and all(module.training for module in model.modules())


def plain_logits(target: HuggingFaceModel, sequence: Any) -> torch.Tensor:
    from foretoken.models.base import Feed

    rows = target.forward([Feed(sequence, [4])])[0].logits
    target.commit(sequence, ())
    return rows


@pytest.mark.parametrize("drafter", [None, "early_exit,layer=1"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_own_generate_beside_ours(public: None, drafter: str | None, attention: str) -> None:
    """Transformers' generate knows nothing of us and does not wait: our switches for a forward must be ours alone."""
    model = llama(eos=None)
    model.set_attn_implementation(attention)
    expected = plain_texts(model)
    llm = ft.load(model, drafter=drafter, controller="constant", prefix_cache=False)

    def text_of(i: int) -> list[int]:
        if i % 2:
            ids = torch.tensor([PROMPTS[i]])
            out: list[int] = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
            return out
        return [*PROMPTS[i], *llm.generate(PROMPTS[i], max_new_tokens=12, ignore_eos=True).token_ids]

    for _ in range(2):
        assert at_once(text_of) == expected
    assert model.config._attn_implementation == attention
    assert "_attn_implementation" not in vars(type(model.config))  # the class is as it was, too
