"""Mean squares of what layers read: those of the text, on any forward, and the network is what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from foretoken.loading.models import load_model
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.input_power import FLOOR, input_powers
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.linear.quantised import available
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.linear.quantised_weights import Int4Weight
from foretoken.models.variants.second_weights import QuantisedWeights, Scheme, linears
from models.checkpoints import new_model, save

TEXT = [5, 9, 2, 7, 1, 30, 4]


def spread(network: Any) -> Any:
    """The network with inputs of very different sizes."""
    for layer in network.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = torch.logspace(-2, 1, len(norm.weight)).to(norm.weight.dtype)
    return network


def test_they_are_those_of_the_text() -> None:
    network = spread(new_model("llama", hidden_size=64).float())
    layer = network.model.layers[1].self_attn.k_proj
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.inference_mode():
        network(input_ids=torch.tensor([TEXT]))
    handle.remove()
    before = set(vars(layer))
    squares = seen[0].reshape(-1, 64).square().sum(0)
    powers = input_powers(network, [m for m in network.modules() if isinstance(m, nn.Linear)], TEXT)
    assert torch.allclose(powers[layer], squares + FLOOR * squares.mean(), rtol=1e-4)
    assert len(powers) == sum(isinstance(m, nn.Linear) for m in network.modules())
    assert set(vars(layer)) == before and not layer._forward_pre_hooks


def test_an_encoder_decoder_has_them() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    network = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert set(input_powers(network, layers, TEXT)) == set(layers)


def test_an_expert_without_tokens_has_none() -> None:
    class Two(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.device = config, torch.device("cpu")
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
            return self.used(torch.ones(len(input_ids), 4))

    model = Two(new_model("llama").config)
    assert list(input_powers(model, [model.used, model.unused], TEXT)) == [model.used]


def test_inputs_that_are_not_finite_have_none() -> None:
    network = new_model("llama").float()
    network.model.layers[1].input_layernorm.weight.data[0] = torch.inf
    layers = [layer.self_attn.q_proj for layer in network.model.layers]
    assert list(input_powers(network, layers, TEXT)) == layers[:1]


def error(weight: torch.Tensor, stored: torch.Tensor, power: torch.Tensor) -> float:
    return float(((stored - weight.detach()).square() * power).sum())


@pytest.mark.skipif(not available(), reason="this build of PyTorch has no quantised matrix products")
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "public"])
def test_a_draft_in_4_bits_is_fitted_to_them(lean: bool) -> None:
    network = spread(new_model("llama", hidden_size=64, intermediate_size=128).float())
    plain = [m for m in network.modules() if isinstance(m, nn.Linear)]
    model = HuggingFaceModel(network, lean=lean)
    powers = input_powers(network, plain, model.forwards.text)
    products = QuantisedWeights(model.forwards, Scheme("4")).all_products
    gate = network.model.layers[0].mlp.gate_proj
    wanted = Int4Weight.of(gate.weight.detach(), 32, powers[gate]).dequantised()
    ends = Int4Weight.of(gate.weight.detach(), 32).dequantised()
    held = [p.dense()[:128] for p in products if p.bits == 4 and p.shape[1] == 64 and p.shape[0] >= 128]
    nearest = min(float((rows - wanted).abs().max()) for rows in held)
    assert nearest < 1e-2 * float((ends - wanted).abs().max())
    assert error(gate.weight, wanted, powers[gate]) < 0.8 * error(gate.weight, ends, powers[gate])


@pytest.mark.skipif(not available(), reason="this build of PyTorch has no quantised matrix products")
def test_a_model_loaded_in_4_bits_is_fitted_to_them(tmp_path: Any) -> None:
    network = spread(new_model("llama", hidden_size=64, intermediate_size=128).float())
    save(network, tmp_path)
    loaded = load_model(tmp_path, quantize="int4", lean=False)
    assert isinstance(loaded, HuggingFaceModel)
    layer = loaded.model.model.layers[0].mlp.gate_proj
    weight = network.model.layers[0].mlp.gate_proj.weight.detach()
    power = input_powers(network, [network.model.layers[0].mlp.gate_proj], loaded.forwards.text).popitem()[1]
    ends = Int4Weight.of(weight, 32).dequantised()
    assert isinstance(layer, QuantisedLinear)
    assert error(weight, layer.product.dense(), power) < 0.8 * error(weight, ends, power)


def test_8_bits_read_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HuggingFaceModel(new_model("llama"), lean=False)
    monkeypatch.setattr("foretoken.models.variants.second_weights.input_powers", lambda *_: pytest.fail("read"))
    assert all(product.bits == 8 for product in QuantisedWeights(model.forwards, Scheme("8")).all_products)
    assert quantise_linears(new_model("llama"), "int8", True, lambda: pytest.fail("read")) > 0


def test_layers_of_a_draft_are_watched_once() -> None:
    network = new_model("llama").float()
    assert set(input_powers(network, linears(network), TEXT)) == set(linears(network))
