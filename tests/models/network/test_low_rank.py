"""A low-rank update: it starts as nothing, only its factors are trained, merging keeps the function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from foretoken.models import wrap
from foretoken.models.forward.parts import TargetParts
from foretoken.models.network.low_rank import add_low_rank, linear_layers, low_rank_factors, merge_low_rank, merged
from foretoken.training.config import LmConfig
from foretoken.training.lm import build_model

TOKENS = torch.arange(20)[None]


def llama(dtype: torch.dtype = torch.float32) -> Any:
    config = LmConfig(hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, context=32, vocab=300)
    return build_model(config, 0).to(dtype).eval()


def updated(rank: int = 3) -> Any:
    """One with an update that does something."""
    network = llama()
    add_low_rank(network, rank)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in network.named_parameters():
        if name.endswith(".b"):
            parameter.data.normal_(0, 0.3, generator=generator)
    return network


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = network(input_ids=TOKENS).logits
    return output


def test_the_layers_of_the_decoder_are_updated_and_no_others() -> None:
    names = set(linear_layers(llama()))
    assert len(names) == 2 * 7 and "model.layers.1.mlp.down_proj" in names and "lm_head" not in names


def test_a_new_update_changes_nothing_and_is_all_that_learns() -> None:
    network = llama()
    before = logits(network)
    add_low_rank(network, 3)
    assert torch.equal(logits(network), before)
    learning = {name.rpartition(".")[2]: p for name, p in network.named_parameters() if p.requires_grad}
    assert set(learning) == {"a", "b"}
    network(input_ids=TOKENS).logits.square().sum().backward()
    assert network.model.layers[0].self_attn.q_proj.parametrizations.weight.original.grad is None
    assert float(network.model.layers[0].self_attn.q_proj.parametrizations.weight[0].b.grad.abs().max()) > 0


def test_merging_keeps_the_function() -> None:
    network = updated()
    plain, expected = copy.deepcopy(network), logits(network)
    merge_low_rank(plain, torch.float32)
    assert not torch.allclose(expected, logits(llama()), atol=1e-3)  # it does something
    assert torch.allclose(logits(plain), expected, atol=1e-5)
    assert {n for n, _ in plain.named_parameters()} == {n for n, _ in llama().named_parameters()}
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert low_rank_factors(plain) == {} and len(low_rank_factors(network)) == 14


def test_a_copy_can_be_merged_again_and_again_while_the_original_learns() -> None:
    network = updated()
    expected = logits(network)
    for _ in range(2):
        served = copy.deepcopy(network)
        merge_low_rank(served, torch.float32)
        assert torch.equal(logits(network), expected)
        assert torch.allclose(logits(served), expected, atol=1e-5)


def test_biases_stay() -> None:
    network = llama()
    layer = torch.nn.Linear(16, 24)
    network.model.layers[0].mlp.up_proj = layer
    add_low_rank(network, 2)
    before = logits(network)
    merge_low_rank(network, torch.float32)
    assert torch.equal(logits(network), before)
    assert network.model.layers[0].mlp.up_proj.bias is layer.bias and network.model.layers[0].mlp.gate_proj.bias is None


def test_merging_rounds_the_factors_as_they_are_stored() -> None:
    network = updated()
    a, b = low_rank_factors(network)["model.layers.0.mlp.up_proj"]
    weight = llama().model.layers[0].mlp.up_proj.weight
    merge_low_rank(network, torch.bfloat16)
    merged_weight = network.model.layers[0].mlp.up_proj.weight
    assert torch.equal(merged_weight, weight + b.bfloat16().float() @ a.bfloat16().float())
    assert not torch.equal(merged_weight, weight + b @ a)


def test_merged_by_hand() -> None:
    weight, a, b = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    assert merged(weight, a, b, 0.5).tolist() == [[2.5, 3.0], [2.0, 5.0]]
    half = merged(weight.bfloat16(), a * 0 + 2**-5, b * 0 + 2**-5)  # 1 + 2**-10 in one rounding
    assert half.dtype == torch.bfloat16 and half[0].tolist() == [1.0, 2**-10]


def test_a_finetuned_decoder_has_a_fingerprint_of_its_own() -> None:
    """Only the layers tell, since the embedding is frozen."""
    base, network = llama(), updated()
    merge_low_rank(network, torch.bfloat16)
    first, second = (TargetParts(wrap(net, lean=False)).fingerprint() for net in (base, network))
    assert first.weights == second.weights and first.layers != second.layers
    assert "the weights differ" in first.difference(second)
    older = type(first)(first.hidden_size, first.vocab_size, first.num_layers, first.weights)
    assert older.difference(first) == older.difference(second) == ""  # a file that does not tell is not refused


def test_the_fingerprint_does_not_depend_on_the_dtype() -> None:
    fingerprint = TargetParts(wrap(llama(torch.bfloat16), lean=False)).fingerprint()
    assert TargetParts(wrap(llama(torch.bfloat16).float(), lean=False)).fingerprint() == fingerprint


def test_every_layer_is_in_the_fingerprint() -> None:
    plain = TargetParts(wrap(llama(), lean=False)).fingerprint()
    for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
        network = llama()
        weight = network.model.layers[0].get_submodule(name).weight
        weight.data += 0.1 * torch.ones_like(weight)
        assert TargetParts(wrap(network, lean=False)).fingerprint().difference(plain)


def test_bad_ranks() -> None:
    with pytest.raises(ValueError, match="rank >= 1, not 0"):
        add_low_rank(llama(), 0)
