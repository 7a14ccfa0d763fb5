"""Quantised checkpoints whose scales nobody would read are refused at load: as plain numbers they write nonsense."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loading import model, save_checkpoint

import foretoken as ft
from foretoken.loading import LoadError, load_model

LAYER = "model.layers.1.mlp.up_proj"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "good")


def settings(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite(folder: Path, change: Callable[[Weights], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refusal_of(source: Any) -> str:
    with pytest.raises(LoadError) as caught:
        ft.load(source, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def in_float8(weights: Weights, name: str = f"{LAYER}.weight") -> None:
    scale = weights[name].abs().max() / 448
    weights[name + "_scale_inv"] = scale.reshape(1, 1).clone()
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)


def all_in_float8(weights: Weights) -> None:
    for name in [name for name in weights if "proj" in name]:
        in_float8(weights, name)


def in_int8(weights: Weights) -> None:
    scale = weights[f"{LAYER}.weight"].abs().max() / 127
    weights[f"{LAYER}.weight"] = (weights[f"{LAYER}.weight"] / scale).round().to(torch.int8)


def packed(weights: Weights) -> None:
    weights[f"{LAYER}.qweight"] = (weights.pop(f"{LAYER}.weight") * 1000).to(torch.int32)


@pytest.mark.parametrize("change", [None, in_float8, packed])
@pytest.mark.parametrize("inner", [False, True])
def test_a_method_that_transformers_passes_over(
    good: Path, change: Callable[[Weights], None] | None, inner: bool
) -> None:
    config = {"quantization_config": {"quant_method": "novel"}}
    settings(good, **({"text_config": config} if inner else config))
    if change is not None:
        rewrite(good, change)
    message = refusal_of(str(good))
    assert "good is quantised with novel, which Transformers" in message and "use the full checkpoint" in message


@pytest.mark.parametrize(("change", "kind"), [(in_float8, "F8_E4M3"), (in_int8, "I8")])
@pytest.mark.parametrize("dtype", ["float32", None])
def test_eight_bits_without_their_meaning(
    good: Path, change: Callable[[Weights], None], kind: str, dtype: str | None
) -> None:
    settings(good, dtype=dtype)
    rewrite(good, change)
    message = refusal_of(str(good))
    assert message.startswith(f"{LAYER}.weight in ") and f"is stored as {kind}, and config.json has no" in message
    with pytest.raises(LoadError, match=f"is stored as {kind}"):
        load_model(str(good), role="draft")


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "scales", "qzeros", "bias"])
def test_what_changes_a_weight_and_has_no_place(good: Path, leaf: str) -> None:
    rewrite(good, lambda weights: weights.update({f"{LAYER}.{leaf}": torch.full((32,), 3.0)}))
    assert f"good has {LAYER}.{leaf}, which {LAYER} in the model of config.json does not have" in refusal_of(str(good))


def test_packed_weights_without_a_configuration(good: Path) -> None:
    rewrite(good, packed)
    assert f"good has {LAYER}.qweight, which {LAYER} in the model of config.json does not have" in refusal_of(str(good))


@pytest.mark.parametrize(
    "harmless",
    [
        {f"{LAYER}.input_scale": torch.ones(())},  # of activations, which are not quantised here
        {f"{LAYER}.bias": torch.zeros(32)},
        {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        {"model.layers.1.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)},  # a mask, in older files
        {"model.layers.2.mlp.up_proj.weight": torch.ones(32, 32)},  # a layer beyond the model's: its drafter
    ],
)
def test_what_changes_no_weight_is_left_out(good: Path, harmless: Weights) -> None:
    expected = ft.load(str(good), None).generate([3, 4, 5], max_new_tokens=6).token_ids
    rewrite(good, lambda weights: weights.update(harmless))
    assert ft.load(str(good), None).generate([3, 4, 5], max_new_tokens=6).token_ids == expected


def test_a_weight_in_a_layer_that_has_no_place_for_it(good: Path) -> None:
    """As of a Qwen3 whose configuration says Llama."""
    names = [f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk"]
    rewrite(good, lambda weights: weights.update({name: torch.ones(16) for name in names}))
    message = refusal_of(str(good))
    assert "good has a config.json that does not fit its weights: 4 of them (first: model.layers.0.self_a" in message
    assert "without them the output would differ; copy both from the same checkpoint" in message


def lines_of(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foretoken"):
        load_model(str(folder))
    return [message for message in caplog.messages if "left out" in message]


def test_layers_beyond_the_configuration_are_told(good: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, good) == []
    settings(good, num_hidden_layers=1)
    (line,) = lines_of(caplog, good)
    assert "good has 9 weights that the model of config.json does not have (first: model.layers.1.input_layern" in line


@pytest.mark.parametrize(
    "beside",
    [
        {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.mlp.up_proj.weight": torch.ones(32, 32)},
        {"mtp.layers.0.mlp.up_proj.weight": torch.ones(32, 32)},
        {"visual.blocks.0.attn.qkv.weight": torch.ones(32, 32)},
        {"model.vision_tower.layers.0.mlp.fc1.weight": torch.ones(32, 32)},
        {"score.weight": torch.ones(2, 32)},
        {"model.layers.1.self_attn.attn.k_scale": torch.ones(1)},
        {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    ],
)
def test_what_is_beside_the_model_needs_no_line(good: Path, caplog: pytest.LogCaptureFixture, beside: Weights) -> None:
    rewrite(good, lambda weights: weights.update(beside))
    assert lines_of(caplog, good) == []


def test_a_model_whose_method_was_passed_over_when_it_was_loaded() -> None:
    network = model()
    network.config.quantization_config = {"quant_method": "novel"}
    assert "LlamaForCausalLM is quantised with novel, which Transformers" in refusal_of(network)


def test_eight_bits_with_their_meaning_still_load(good: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers undoes FP8 with it")
    expected = ft.load(str(good), None).target.model.get_submodule(LAYER).weight
    rewrite(good, all_in_float8)
    settings(good, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    read = ft.load(str(good), None).target.model.get_submodule(LAYER).weight
    assert torch.allclose(read.float(), expected.float(), atol=0.02 * float(expected.abs().max()), rtol=0.1)
