"""What may be handed in as a drafter: a draft model, the target's own network too, alone and in a list."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foretoken as ft
from foretoken.loading import LoadError, load_model
from foretoken.methods.drafters.model import ModelDrafter
from toys import llama

PROMPT = [3, 9, 5, 3, 9]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


def texts(llm: ft.Llm) -> list[list[int]]:
    """One alone, two together, and a sampled one."""
    batch = llm.generate([PROMPT, PROMPT[:3]], **OPTIONS)
    sampled = llm.generate(PROMPT, temperature=1.0, seed=3, **OPTIONS)
    return [list(output.token_ids) for output in (llm.generate(PROMPT, **OPTIONS), *batch, sampled)]


@pytest.mark.parametrize("target", [llama(), llama(dtype=torch.float32)], ids=["float64", "float32"])
def test_a_draft_model_alone_and_in_lists(target: Any) -> None:
    expected = texts(ft.load(target, None))
    near = llama(seed=1, noise=0.3, dtype=target.dtype)
    for drafter in (near, load_model(near), [near], ("ngram", near), ["ngram", ModelDrafter(load_model(near), k=2)]):
        assert texts(ft.load(target, drafter)) == expected


def test_a_model_drafts_for_itself() -> None:
    network = llama()
    expected = texts(ft.load(network, None))
    for drafter in (network, ["ngram", network]):
        assert texts(ft.load(network, drafter, controller="constant")) == expected
    alone = ft.load(network, network, controller="constant").generate(PROMPT, **OPTIONS).stats
    assert alone.num_accepted_tokens == alone.num_draft_tokens > 0  # it is always right about itself


def test_through_the_hook() -> None:
    network: Any = llama()
    ids = torch.tensor([PROMPT])
    expected = network.generate(ids, max_new_tokens=12, do_sample=False)
    for drafter in (network, ["ngram", network], llama(seed=1, noise=0.3)):
        output = network.generate(
            ids, max_new_tokens=12, do_sample=False, custom_generate=ft.custom_generate, drafter=drafter
        )
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (3, "an int is not a drafter: give a spec string .*, a drafter, a draft model, a list of these, or None"),
        (True, "a bool is not a drafter"),
        (b"ngram", "a bytes is not a drafter"),
        ({"ngram"}, "a set is not a drafter"),
        ({"ngram": 1}, "a dict is not a drafter"),
        (object(), "an object is not a drafter"),
        (type(llama()), "a type is not a drafter"),
        (Path("draft"), "a path is not a drafter: give model:draft"),
        ("./draft,k=4", "a path is not a drafter: give model:./draft for a draft model, or NAME:./draft"),
        (SimpleNamespace(encode=list, decode=str), "a tokenizer is not a drafter: .* tokenizer=TOKENIZER"),
        (["ngram", 3], "an int is not a drafter"),
        (["ngram", None], "a list of drafters cannot hold 'none'"),
        ([], "at least one member"),
        (llama(vocab=1000), "LlamaForCausalLM has a vocabulary of 1000, the target one of 32"),
        (["ngram", llama(vocab=1000)], "LlamaForCausalLM has a vocabulary of 1000, the target one of 32"),
        (llama().model, "LlamaModel"),
    ],
)
def test_what_is_no_drafter(drafter: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ft.load(llama(), drafter)
    assert "\n" not in str(caught.value)


def test_a_language_model_is_not_its_own_draft_model() -> None:
    target = load_model(llama())
    with pytest.raises(ValueError, match=r"is the target itself.*give its \.model"):
        ft.load(target, target)
    assert texts(ft.load(target, target.model)) == texts(ft.load(llama(), None))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "words"), [(3, "an int is not a model"), ([1], "a list is not a model")])
def test_the_article_fits(model: Any, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        ft.load(model)
