"""A model that is not causal is refused; one whose cache gives other logits is decoded token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import new_model
from transformers import BertConfig, BertLMHeadModel

import foretoken as ft
from foretoken.models import runner, wrap
from foretoken.models.base import CapabilityError
from foretoken.models.checks import cache_trial
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.sequential import SequentialModel


def bert(is_decoder: bool) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, is_decoder=is_decoder,
    )  # fmt: skip
    model = BertLMHeadModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def test_a_model_that_looks_ahead_is_refused_in_one_line() -> None:
    with pytest.raises(CapabilityError, match="bert is not a causal language model") as caught:
        ft.load(bert(is_decoder=False), "ngram")
    assert "\n" not in str(caught.value)


def test_a_bert_that_decodes_is_none() -> None:
    llm = ft.load(bert(is_decoder=True), "ngram")
    assert llm.generate([5, 6, 5, 6, 5], max_new_tokens=8).token_ids


def test_attention_without_its_mask_is_seen_before_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: chains would then look ahead.  Token by token there is nothing to look at."""
    model = new_model("phi3")
    assert isinstance(wrap(model), HuggingFaceModel)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "RowPlan", _blind(runner.RowPlan))
        target = wrap(new_model("phi3"), lean=False)
    assert isinstance(target, SequentialModel)
    assert "its logits of several tokens differ" in target.capabilities.missing["rollback"]
    with pytest.raises(CapabilityError, match="phi3: its logits of several tokens differ"):
        ft.load(target, "ngram")
    plain = ft.load(target, None).generate([5, 6, 7], max_new_tokens=6, ignore_eos=True).token_ids
    assert plain == ft.load(model, None).generate([5, 6, 7], max_new_tokens=6, ignore_eos=True).token_ids


def _blind(real: Any) -> Any:
    """Plans in which every new row hangs from the committed text, so that none sees the others."""
    return lambda committed, parents, depths, *more: real(committed, [-1] * len(parents), depths, *more)


def test_a_forward_that_fails_is_told_with_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel for this\nand a long trace")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(CapabilityError, match=r"^llama cannot be decoded here: RuntimeError: no kernel for this$"):
        wrap(model)


def test_a_model_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``custom_generate`` wraps it in every call."""
    model = new_model("llama")
    wrap(model)
    monkeypatch.setattr(cache_trial, "_without_cache", None)  # a second trial would call it
    wrap(model)
    with pytest.raises(TypeError):
        wrap(model, exact="bitwise")  # another form
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x * 0)
    with pytest.raises(TypeError):
        wrap(model)  # another class


def scaled_per_call(model: Any) -> Any:
    """Every linear layer of the decoder rounds its input to 8 bits with one scale for all tokens of a call."""

    def eight_bits(linear: torch.nn.Linear) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax() / 127
            return torch.nn.functional.linear((x / scale).round() * scale, linear.weight, linear.bias)

        return forward

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = eight_bits(module)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_layers_that_scale_a_call_are_no_bidirectional_model(dtype: torch.dtype) -> None:
    model = scaled_per_call(new_model("llama").to(dtype))
    target = wrap(model)
    assert isinstance(target, SequentialModel)
    assert "quantised layers scale all tokens of a call together" in target.capabilities.missing["rollback"]
    with pytest.raises(CapabilityError, match="llama: its quantised layers scale all tokens of a call together"):
        ft.load(model, "ngram")
    assert ft.load(model).generate([5, 6, 7], max_new_tokens=6, ignore_eos=True).token_ids


def test_a_quantised_model_that_looks_ahead_is_refused_as_one() -> None:
    """Its layers round every token for itself, so that they are not why later tokens count."""
    model = bert(is_decoder=False)
    for module in model.bert.encoder.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = rounded_by_token(module)  # type: ignore[method-assign]
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(CapabilityError, match="bert is not a causal language model"):
        wrap(model)


def rounded_by_token(linear: torch.nn.Linear) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.nn.functional.linear((x / scale).round() * scale, linear.weight, linear.bias)

    return forward
