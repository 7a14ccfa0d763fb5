"""The hook for ``model.generate`` prepares a model once, and keeps the result with that model alone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import foretoken as ft
from foretoken.loading import load_tokenizer
from foretoken.loading.prepared import ATTRIBUTE, prepared_of
from foretoken.loading.tokenizers import tokenizer_when_needed
from test_hub import ONE, llama

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def ours(model: Any, drafter: Any = "ngram", **options: Any) -> list[int]:
    how = {"custom_generate": ft.custom_generate, "drafter": drafter}
    ids: list[int] = model.generate(ONE, **{**how, **GREEDY, **options})[0].tolist()
    return ids


@pytest.fixture
def wrapped_models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were wrapped."""
    from foretoken.loading import prepared

    models: list[Any] = []
    honest = prepared.load_model

    def load_model(source: Any, **how: Any) -> Any:
        models.append(source)
        return honest(source, **how)

    monkeypatch.setattr(prepared, "load_model", load_model)
    return models


def test_a_model_is_prepared_once_and_again_when_it_has_changed(wrapped_models: list[Any]) -> None:
    model = llama(eos=None)
    expected = model.generate(ONE, **GREEDY)[0].tolist()
    for drafter in ("ngram", "early_exit,layer=1", None, "auto", llama(seed=1)):
        assert ours(model, drafter) == expected
    assert ours(model, ft.CustomGenerate(drafter="ngram")) == expected
    with pytest.raises(ValueError, match="unknown drafter"):
        ours(model, "nosuch")
    assert ours(model) == expected and wrapped_models == [model]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    expected = model.generate(ONE, **GREEDY)[0].tolist()
    assert ours(model) == ours(model) == expected and wrapped_models == [model, model]


def test_copies_and_files_of_the_model_are_without_it(tmp_path: Path) -> None:
    model = llama(eos=None)
    names, size = list(model.state_dict()), len(pickle.dumps(model))
    expected = ours(model)
    assert list(model.state_dict()) == names and len(pickle.dumps(model)) < size + 100
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert getattr(other, ATTRIBUTE) is None
        with torch.no_grad():
            other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
        assert ours(other) == other.generate(ONE, **GREEDY)[0].tolist() != expected
    shallow = copy.copy(model)
    assert ours(shallow) == expected == ours(model)
    model.save_pretrained(tmp_path)
    assert list(LlamaForCausalLM.from_pretrained(tmp_path).state_dict()) == names


def test_the_model_and_what_was_made_of_it_go_together() -> None:
    model = llama(eos=None)
    ours(model)
    alive = [weakref.ref(model), weakref.ref(vars(model)[ATTRIBUTE]["distribution"])]
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_what_an_engine_adds_to_its_target_stays_there() -> None:
    model = llama(eos=None)
    prepared = prepared_of(model, "distribution")
    first, second = prepared.target(), prepared.target()
    assert first.extra_embeddings(torch.zeros(2, 32)) == 24  # type: ignore[attr-defined]
    assert (first.num_ids, second.num_ids, prepared.target().num_ids) == (26, 24, 24)  # type: ignore[attr-defined]


def test_a_call_inside_a_call() -> None:
    model = llama(eos=None)
    expected = ours(model)

    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        assert ours(model) == expected
        return False

    assert ours(model, stopping_criteria=[stop]) == expected


def test_a_tokenizer_is_read_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = load_tokenizer("builtin")
    llama(vocab=len(tokenizer), eos=None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    read: list[Any] = []
    honest = AutoTokenizer.from_pretrained

    def from_pretrained(place: Any, **how: Any) -> Any:
        read.append(place)
        return honest(place, **how)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    prepared_of(model, "distribution")
    read.clear()  # a sentence that its forwards are tried on
    for drafter in ("ngram", "auto", "early_exit,layer=1"):
        ours(model, drafter)
    assert not read
    ours(model, None, prediction="def f():")
    assert len(read) == 1
    unread = tokenizer_when_needed(model)
    assert len(read) == 1 and len(unread) == len(tokenizer)
    assert unread("def f()")["input_ids"] == tokenizer("def f()")["input_ids"] == unread.encode("def f()")
    assert copy.deepcopy(unread).get_vocab() == tokenizer.get_vocab()
    assert tokenizer_when_needed(llama()) is None
