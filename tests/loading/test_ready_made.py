"""Checkpoints whose weights were quantised by another package, and weights that layers share.

Such packages keep ``nn.Linear`` for the class, take its ``weight`` away and give the object a ``forward`` of its own;
the networks here are made like that (compressed-tensors 0.20 was looked at), so that no package is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import foretoken as ft
from foretoken.loading.adapters import merge_adapter, read_adapter, save_adapter
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import PackedLinear, check_packable, pack_linears, unpack_linears
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.variants.inflation import inflate
from models.checkpoints import new_model, prompt_of

PROMPT = prompt_of(9)


def ready_made(name: str = "llama", **changes: Any) -> Any:
    """A network whose decoder layers multiply by 8-bit numbers and have no weight."""
    network = new_model(name, hidden_size=64, **changes)
    for layer in network.model.layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                take_weight(module)
    network.config.quantization_config = {"quant_method": "compressed-tensors"}
    return network


def take_weight(linear: Any) -> None:
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    packed = (linear.weight.detach() / scale).round().to(torch.int8)
    bias = linear.bias

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, packed.to(x.dtype) * scale.to(x.dtype), bias)

    del linear.weight
    linear.register_parameter("weight_packed", nn.Parameter(packed, requires_grad=False))
    linear.forward = forward


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_it_runs_on_the_public_forward_and_drafts_change_nothing(name: str) -> None:
    network = ready_made(name)
    llm = ft.load(network, "ngram,n=1,k=4", controller="constant")
    assert isinstance(llm.target, HuggingFaceModel) and not llm.target.is_lean
    choices: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]
    for options in choices:
        out = llm.generate(PROMPT, max_new_tokens=24, ignore_eos=True, **options)
        plain = llm.plain.generate(PROMPT, max_new_tokens=24, ignore_eos=True, **options)
        assert out.token_ids == plain.token_ids and out.stats.num_draft_tokens
    public = network.generate(torch.tensor([PROMPT]), max_new_tokens=24, eos_token_id=-1, do_sample=False)
    assert llm.plain.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids == public[0, len(PROMPT) :].tolist()


def test_packing_leaves_such_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, shapes, names: names[-1])
    network = ready_made(tie_word_embeddings=False).bfloat16()
    before = network.model.layers[0].mlp.up_proj
    check_packable(network)
    assert pack_linears(network) == 1 and isinstance(network.lm_head, PackedLinear)
    assert network.model.layers[0].mlp.up_proj is before
    network.lm_head = nn.Identity()
    with pytest.raises(ValueError, match=r"pack=True: LlamaForCausalLM has no torch\.nn\.Linear layers"):
        check_packable(network)


def test_what_needs_the_full_weights_is_refused(tmp_path: Path) -> None:
    network = ready_made()
    factors = torch.ones(2, 64), torch.ones(len(network.model.layers[0].mlp.up_proj.weight_packed), 2)
    save_adapter(tmp_path, {"model.layers.0.mlp.up_proj": factors}, "base", torch.float32)
    cases: list[tuple[Any, str]] = [
        (lambda: quantise_linears(network, "int8"), "quantised already: leave quantize out"),
        (lambda: QuantizedDrafter(HuggingFaceModel(network)), "quantised already: use another drafter"),
        (
            lambda: inflate(network, "2m"),
            "cannot inflate a model whose weights are quantised: give its full checkpoint",
        ),
        (
            lambda: merge_adapter(network, tmp_path, read_adapter(tmp_path)),
            "whose weights are quantised: use the full",
        ),
    ]
    for run, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            run()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("pack", [True, False])
def test_layers_that_share_a_weight(pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs stay, packed or quantised; a weight that an embedding reads is left where it is."""
    monkeypatch.setattr("foretoken.models.linear.packing.fastest_layout", lambda dtype, shapes, names: names[-1])

    def sharing() -> Any:
        network = new_model("llama", hidden_size=64, tie_word_embeddings=True)
        first, second, _ = network.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        second.self_attn.q_proj = first.self_attn.q_proj
        return network

    plain, network = sharing(), sharing()
    expected = ft.load(plain, None).generate(PROMPT, max_new_tokens=16, ignore_eos=True).token_ids
    if pack:
        llm = ft.load(network, "ngram,n=1,k=3", pack=True)
        assert llm.generate(PROMPT, max_new_tokens=16, ignore_eos=True).token_ids == expected
        unpack_linears(network)
        assert ft.load(network, None).generate(PROMPT, max_new_tokens=16, ignore_eos=True).token_ids == expected
    else:
        ids = torch.tensor([PROMPT])
        quantise_linears(network, "int8")
        with torch.inference_mode():
            quantised, full = network(ids).logits, plain(ids).logits
        assert float((quantised - full).norm() / full.norm()) < 0.03
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
