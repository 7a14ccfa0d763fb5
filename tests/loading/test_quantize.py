"""``quantize=`` of ``load``, of draft models and of the command line: what is replaced, what stays exact, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foretoken as ft
from fake_cuda import fake_cuda
from foretoken.cli.main import main
from foretoken.core.io.checkpoints import LoadError
from foretoken.core.sampling import SamplingParams
from foretoken.engine.request import Request
from foretoken.loading import build_drafter, load_model
from foretoken.methods.drafters.quantized import QuantizedDrafter
from foretoken.models.base import CapabilityError, Feed
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear import product, quantised_linear
from foretoken.models.linear.product import QuantisedLinear, SideBySide
from foretoken.models.linear.quantised import make_product, multiplies_bytes
from foretoken.models.linear.quantised_linear import quantise_linears
from foretoken.models.linear.quantised_products import Int8Product, IntegerProduct
from foretoken.models.linear.quantised_weights import Int8Weight
from models.checkpoints import new_model, prompt_of
from toys import engine, outputs

PROMPTS = [prompt_of(9), [3], prompt_of(14, seed=1)]


def saved(tmp_path: Path, name: str = "llama", **changes: Any) -> str:
    folder = tmp_path / name
    new_model(name, **{"hidden_size": 64, **changes}).save_pretrained(folder)
    return str(folder)


SHORT = ["int8-a8", "int4-a8"] if multiplies_bytes() else []
"""Activations of 8 bits, where this machine multiplies them."""


def requests(params: SamplingParams) -> list[Request]:
    return [Request(p, params, 20, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    sequence = model.open()
    output: torch.Tensor = model.forward([Feed(sequence, tokens)])[0].logits
    model.release(sequence)
    return output


@pytest.mark.parametrize("kind", ["int8", "int4", *SHORT])
@pytest.mark.parametrize("lean", [True, False])
def test_every_linear_layer_is_replaced(kind: str, lean: bool, tmp_path: Path) -> None:
    target = load_model(saved(tmp_path, "qwen2"), quantize=kind, lean=lean)
    assert isinstance(target, HuggingFaceModel) and target.is_lean is lean
    layers = [m for m in target.model.modules() if isinstance(m, QuantisedLinear)]
    assert len(layers) == 3 * 7 + 1 and not any(type(m) is nn.Linear for m in target.model.modules())
    head = target.model.get_output_embeddings()
    assert [m.product.bits for m in layers if m is not head] == [int(kind[3])] * 21 and head.product.bits == 8
    assert {m.product.activations for m in layers} == {8 if kind in SHORT else 15}
    assert target.describe()["weights"].startswith(f"{kind}, with activations in ")
    full = load_model(saved(tmp_path / "full", "qwen2"))
    assert target.weight_bytes < full.weight_bytes / 2
    error = float((logits(target, PROMPTS[0]) - logits(full, PROMPTS[0])).norm() / logits(full, PROMPTS[0]).norm())
    assert 1e-4 < error < ({"int8": 0.03, "int8-a8": 0.06}.get(kind, 0.4))


def test_the_lean_forward_equals_the_public_one(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen2")
    lean, public = (load_model(path, quantize="int8", lean=way) for way in (True, False))
    a, b = logits(lean, PROMPTS[2]), logits(public, PROMPTS[2])
    torch.testing.assert_close(a, b, rtol=0, atol=0.03 * float(b.std()))


def test_weights_are_those_of_the_full_model_rounded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    full, target = load_model(path, lean=False), load_model(path, quantize="int8", lean=False)
    quantised, original = (m.model.model.layers[1].mlp.down_proj for m in (target, full))  # type: ignore[attr-defined]
    expected = Int8Weight.of(original.weight).dequantised()
    torch.testing.assert_close(quantised.weight.float(), expected, rtol=8e-3, atol=1e-6)
    assert quantised.bias is None


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)], ids=["greedy", "seeded"])
def test_speculation_keeps_the_quantised_targets_text(
    lean: bool, params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_linear, "fastest_target_product", lambda *_: IntegerProduct)
    target = load_model(saved(tmp_path), quantize="int8", lean=lean, dtype="float64")
    plain = outputs(engine(target), requests(params))
    for spec in ("ngram,n=2,k=4", "recycling,nodes=6", "early_exit,layer=2,k=3"):
        drafter = build_drafter(spec, target, target_source="")
        assert outputs(engine(target, drafter), requests(params)) == plain


def test_tied_embeddings_stay(tmp_path: Path) -> None:
    target = load_model(saved(tmp_path, "llama_gqa_tied"), quantize="int8", lean=False)
    assert isinstance(target, HuggingFaceModel)
    head = target.model.get_output_embeddings()
    assert type(head) is nn.Linear and head.weight is target.model.get_input_embeddings().weight
    assert sum(isinstance(m, QuantisedLinear) for m in target.model.modules()) == 3 * 7


def test_layers_that_int4_does_not_fit_stay(tmp_path: Path) -> None:
    target = load_model(saved(tmp_path, intermediate_size=72), quantize="int4")
    assert isinstance(target, HuggingFaceModel)
    mlp = target.model.model.layers[0].mlp
    assert type(mlp.down_proj) is nn.Linear  # 72 inputs are no multiple of 32
    assert type(mlp.up_proj) is nn.Linear  # 72 outputs are no multiple of 16
    assert type(target.model.model.layers[0].self_attn.q_proj) is QuantisedLinear
    assert len(logits(target, [1, 2, 3])) == 3


def test_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is quantised, the full weights of those before it are gone already."""
    network = new_model("llama", hidden_size=64)
    seen = []
    real = make_product

    def spy(*args: Any) -> Any:
        seen.append(sum(type(m) is nn.Linear for m in network.modules()))
        return real(*args)

    monkeypatch.setattr(product, "make_product", spy)
    assert quantise_linears(network, "int8") == 22
    assert seen == list(range(22, 0, -1))


def test_products_side_by_side() -> None:
    w = torch.randn(32, 64)
    parts = [Int8Product(Int8Weight.of(rows), None) for rows in w.split(16)]
    whole, x = Int8Product(Int8Weight.of(w), None), torch.randn(3, 64)
    joined = SideBySide(parts)
    torch.testing.assert_close(joined(x), whole(x), rtol=0, atol=0)
    torch.testing.assert_close(joined.plus(x, x[:, :32]), x[:, :32] + whole(x), rtol=0, atol=0)
    torch.testing.assert_close(SideBySide(parts[:1])(x), whole(x)[:, :16], rtol=0, atol=0)


def test_the_front_door_and_draft_models() -> None:
    llm = ft.load("builtin", "model,k=3,quantize=int8", quantize="int8", dtype="float32", controller="constant")
    assert isinstance(llm.target.model.model.layers[0].mlp.up_proj, QuantisedLinear)  # type: ignore[attr-defined]
    assert isinstance(llm.drafter.model.model.model.layers[0].mlp.up_proj, QuantisedLinear)  # type: ignore
    prompt = "def read_lines(path):\n"
    assert llm.generate(prompt, max_new_tokens=16).token_ids == llm.plain.generate(prompt, max_new_tokens=16).token_ids
    nested = ft.load("builtin", "cascade,k=4,quantize=int4", dtype="float32")
    assert any(m.product.bits == 4 for m in nested.drafter.model.model.modules() if isinstance(m, QuantisedLinear))  # type: ignore


def test_an_inflated_target_can_be_quantised() -> None:
    big = load_model("builtin", inflate="20m", quantize="int8", dtype="float32")
    small = load_model("builtin", quantize="int8", dtype="float32")
    assert any(isinstance(m, QuantisedLinear) for m in big.model.modules())  # type: ignore[attr-defined]
    assert bool((logits(big, [400, 401]).argmax(-1) == logits(small, [400, 401]).argmax(-1)).all())


def test_bitwise_text_does_not_depend_on_speculation(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for kind in ("int8", "int4", *SHORT):
        target = load_model(path, quantize=kind, dtype="bfloat16", exact="bitwise")
        plain = outputs(engine(target), requests(SamplingParams()))
        drafter = build_drafter("recycling,nodes=6", target, target_source="")
        assert outputs(engine(target, drafter), requests(SamplingParams())) == plain


# -- what is refused -------------------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (path, {"quantize": "int3"}, "quantize must be one of int8, int4, int8-a8, int4-a8, not 'int3'"),
        (new_model("llama"), {"quantize": "int8"}, "a model passed as an object is not changed: give its path"),
        (saved(tmp_path, "gpt2"), {"quantize": "int8"}, r"GPT2LMHeadModel has no nn\.Linear that quantize=int8 fits"),
        (saved(tmp_path / "odd", hidden_size=40, intermediate_size=72), {"quantize": "int4"}, "use int8"),
    ]
    for source, options, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            load_model(source, **options)
        assert "\n" not in str(error.value)
    with fake_cuda(), pytest.raises(CapabilityError, match="is for the cpu, and the weights are on cuda"):
        load_model(path, quantize="int8", device="cuda")
    quantised = load_model(path, quantize="int8")
    with pytest.raises(CapabilityError, match="quantised already"):
        QuantizedDrafter(quantised)
    monkeypatch.setattr(quantised_linear, "multiplies_bytes", lambda: False)
    with pytest.raises(CapabilityError, match="no kernel for activations of 8 bits: use quantize=int4"):
        load_model(path, quantize="int4-a8")
    monkeypatch.setattr(quantised_linear, "available", dict)
    with pytest.raises(CapabilityError, match="this build of PyTorch"):
        load_model(path, quantize="int8")


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("gptq", "optimum|gptqmodel"),
        ("awq", "gptqmodel"),
        ("compressed-tensors", "compressed-tensors"),
        ("torchao", "torchao"),
    ],
)
def test_ready_made_checkpoints_name_their_package(method: str, package: str, tmp_path: Path) -> None:
    """What Transformers loads, loads here, if the package is installed; else the error says which one is missing."""
    folder = Path(saved(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": 4,
        "group_size": 32,
        "quant_type": "int8_weight_only",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=package) as error:
        ft.load(str(folder))
    assert "\n" not in str(error.value)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "def f(", "--quantize", "int8", "--drafter", "ngram", "--max-new-tokens", "4", "--json"])
    assert len(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["token_ids"]) == 4
    assert main(["generate", "x", "--quantize", "int2"]) == 2
    assert "quantize must be one of int8, int4, int8-a8, int4-a8, not 'int2'" in capsys.readouterr().err
