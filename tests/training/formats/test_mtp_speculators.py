"""The speculators layout of a multi-token prediction module: round trips, and what cannot be imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_nets import same_drafter

import foretoken as ft
from foretoken.loading import load_model
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.mtp import MtpConfig, module_for
from foretoken.methods.drafters.nets.store import save_drafter
from foretoken.models.forward.parts import TargetParts
from foretoken.training.formats import export_drafter, import_drafter
from native_checkpoints import published, random_module, save_family, save_target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def save_trained(folder: Path, target: Path, **config: Any) -> Path:
    """A random module in a folder of ours, as training leaves it."""
    parts = TargetParts(load_model(target, dtype="float32"))
    shape = MtpConfig(**asdict(LayerConfig.of_target(parts.config)), **config)
    net = module_for(shape, parts.network)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    save_drafter(folder, "mtp", asdict(shape), net, parts.fingerprint(), {"acceptance": [0.7, 0.5]})
    return folder


@pytest.mark.parametrize(("family", "experts"), [("glm4_moe", True), ("glm4_moe", False), ("qwen3_5_text", False)])
def test_round_trip(family: str, experts: bool, tmp_path: Path) -> None:
    save_target(tmp_path / "target", family)
    ours = save_trained(tmp_path / "ours", tmp_path / "target", layer="target", feed="post_norm", experts=experts)
    report = export_drafter(f"mtp:{ours}", tmp_path / "out", target=tmp_path / "target", engine="vllm")
    assert (report["format"], report["warnings"]) == ("speculators", [])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_model_type"] == "mtp" and config["transformer_layer_config"]["model_type"] == family
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert {f"mtp_layers.0.{name}.weight" for name in ("input_proj", "token_layernorm", "final_layernorm")} < names
    back = import_drafter(tmp_path / "out", tmp_path / "back", target=tmp_path / "target")
    assert back["drafter"] == f"mtp:{tmp_path / 'back'}"
    assert same_drafter(ours, tmp_path / "back")
    described = [json.loads((folder / "drafter.json").read_text()) for folder in (ours, tmp_path / "back")]
    assert described[0]["measured"] == described[1]["measured"] == {"acceptance": [0.7, 0.5]}


def test_the_targets_own_head_is_exported_and_drafts_the_same(tmp_path: Path) -> None:
    target = tmp_path / "target"
    network, _ = save_family(target, "glm4_moe")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(half, target / "model.safetensors", {"format": "pt"})
    assert network is not None
    export_drafter("mtp", tmp_path / "out", target=target)
    spec = import_drafter(tmp_path / "out", tmp_path / "back", target=target)["drafter"]
    own, imported = (
        ft.load(target, s, controller="constant", dtype="float32").generate(PROMPT, max_new_tokens=24)
        for s in ("mtp", spec)
    )
    assert own.token_ids == imported.token_ids
    assert own.stats.num_accepted_tokens_per_pos == imported.stats.num_accepted_tokens_per_pos
    assert own.stats.num_draft_tokens == imported.stats.num_draft_tokens


def refused(source: Path, target: Path, out: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        import_drafter(source, out, target=target)
    assert "\n" not in str(caught.value) and not out.exists()


def changed(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
    """``None`` for a tensor takes it out."""
    file = folder / "model.safetensors"
    weights = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file, {"format": "pt"})
    fields = {**json.loads((folder / "config.json").read_text()), **(config or {})}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"mtp_layers.0.input_proj.weight": None}, {}, "lacks the tensor eh_proj.weight"),
        ({"mtp_layers.0.self_attn.q_proj.weight": None}, {}, "lacks the tensor layer.self_attn.q_proj.weight"),
        ({"mtp_layers.0.input_proj.weight": torch.ones(32, 32)}, {}, r"is \[32, 32\] and must be \[32, 64\]"),
        ({"mtp_layers.1.input_proj.weight": torch.ones(32, 64)}, {}, "lacks the tensor enorm.weight"),
        ({"mtp_layers.2.input_proj.weight": torch.ones(32, 64)}, {}, r"lacks the tensors mtp_layers.1.\*"),
        ({"other.weight": torch.ones(1)}, {}, "a tensor other.weight that this network does not have"),
        ({}, {"num_nextn_predict_layers": 2}, "says num_nextn_predict_layers 2, and the checkpoint has tensors of 1"),
        ({}, {"transformer_layer_config": None}, "config.json lacks transformer_layer_config"),
        ({}, {"transformer_layer_config": {"hidden_size": 64}}, "is for a hidden size of 64, the target's is 32"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: Any, config: Any, message: str, tmp_path: Path) -> None:
    save_family(tmp_path / "target", "glm4_moe")
    export_drafter("mtp", tmp_path / "out", target=tmp_path / "target")
    changed(tmp_path / "out", tensors, config)
    refused(tmp_path / "out", tmp_path / "target", tmp_path / "back", message)


def test_embedding_and_projection_of_the_target_are_left_out(tmp_path: Path) -> None:
    save_family(tmp_path / "target", "glm4_moe")
    export_drafter("mtp", tmp_path / "out", target=tmp_path / "target")
    changed(tmp_path / "out", {"embed_tokens.weight": torch.ones(61, 32), "lm_head.weight": torch.ones(61, 32)})
    assert import_drafter(tmp_path / "out", tmp_path / "back", target=tmp_path / "target")["method"] == "mtp"


def test_quantised_copies(tmp_path: Path) -> None:
    """Bytes with factors are read, packed weights refused by the method's name."""
    save_family(tmp_path / "target", "glm4_moe")
    out = tmp_path / "out"
    export_drafter("mtp", out, target=tmp_path / "target")
    name = "mtp_layers.0.self_attn.q_proj.weight"
    weight = load_file(out / "model.safetensors")[name].float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    eighths = (weight / scale).round().to(torch.int8)
    changed(
        out, {name: eighths, f"{name}_scale": scale}, {"quantization_config": {"quant_method": "compressed-tensors"}}
    )
    note = "the weights are quantised with compressed-tensors, and were read as bfloat16"
    assert import_drafter(out, tmp_path / "back", target=tmp_path / "target")["warnings"] == [note]
    back = load_file(tmp_path / "back" / "model.safetensors")["layer.self_attn.q_proj.weight"]
    assert torch.equal(back, (eighths.float() * scale).to(torch.bfloat16))
    changed(out, {f"{name}_packed": eighths.to(torch.int32), name: None})
    refused(
        out, tmp_path / "target", tmp_path / "no", "quantised with compressed-tensors: take the unquantised checkpoint"
    )


def test_what_this_layout_cannot_hold(tmp_path: Path) -> None:
    save_target(tmp_path / "target", "glm4_moe")
    ours = save_trained(tmp_path / "ours", tmp_path / "target")
    for format in ("speculators", "native"):
        with pytest.raises(ValueError, match="this layout holds layer=target and feed=post_norm"):
            export_drafter(f"mtp:{ours}", tmp_path / "out", format, target=tmp_path / "target")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_several_trained_modules(family: str, tmp_path: Path) -> None:
    """Module after module, in the order of the draft's steps."""
    target = tmp_path / "target"
    save_target(target, family)
    ours = save_trained(tmp_path / "ours", target, layer="target", feed="post_norm", experts=False, modules=3)
    export_drafter(f"mtp:{ours}", tmp_path / "out", "speculators", target=target)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 3
    theirs, stored = load_file(tmp_path / "out/model.safetensors"), load_file(ours / "model.safetensors")
    for number in range(3):
        name = f"mtp_layers.{number}.input_proj.weight"
        assert torch.equal(theirs[name], stored[f"steps.{number}.eh_proj.weight"])
    back = import_drafter(tmp_path / "out", tmp_path / "back", target=target)
    assert same_drafter(ours, tmp_path / "back")
    texts = [drafted(target, spec) for spec in (f"mtp:{ours}", back["drafter"])]
    assert texts[0] == texts[1]


def test_the_targets_own_modules_are_exported_in_their_order(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_family(target, "deepseek_v3", 2)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(half, target / "model.safetensors", {"format": "pt"})
    export_drafter("mtp", tmp_path / "out", target=target)
    spec = import_drafter(tmp_path / "out", tmp_path / "back", target=target)["drafter"]
    own = drafted(target, "mtp")
    assert own == drafted(target, spec)
    # in the other order, they draft something else
    tensors = load_file(tmp_path / "out/model.safetensors")
    places = {name: name.split(".")[1] for name in tensors}
    swapped = {name.replace(f".{at}.", f".{1 - int(at)}.", 1): tensors[name] for name, at in places.items()}
    save_file(swapped, tmp_path / "out/model.safetensors", {"format": "pt"})
    other = import_drafter(tmp_path / "out", tmp_path / "other", target=target)["drafter"]
    assert drafted(target, other) != own


def drafted(target: Path, spec: str) -> tuple[list[int], list[int], list[int]]:
    """A text, its accepted draft tokens by position, and the tokens of the first draft."""
    llm = ft.load(target, spec, controller="constant", dtype="float32")
    out = llm.generate(PROMPT, max_new_tokens=24)
    trees: list[Any] = []
    llm.engine.on_round = lambda runs, drafts, verdicts, times: trees.extend(drafts)
    llm.generate(PROMPT, max_new_tokens=12)
    return out.token_ids, list(out.stats.num_accepted_tokens_per_pos), [t for tree in trees for t in tree.tokens]


@pytest.mark.parametrize(("family", "modules"), [("glm4_moe", 1), ("glm4_moe", 2), ("deepseek_v3", 2)])
def test_modules_in_the_targets_own_checkpoint(family: str, modules: int, tmp_path: Path) -> None:
    """As layers after the target's, with the names and the single experts of the published files."""
    network, target = save_target(tmp_path / "target", family), tmp_path / "target"
    shape = {"layer": "target", "feed": "post_norm", "experts": True, "modules": modules}
    ours = save_trained(tmp_path / "ours", target, **shape)
    out = tmp_path / "out"
    export_drafter(f"mtp:{ours}", out, "native", target=target)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == modules
    theirs = load_file(out / "model.safetensors")
    layers = network.config.num_hidden_layers
    expected: set[str] = set()
    for number in range(modules):
        expected |= set(published(family, number, layers, random_module(network, number).state_dict()))
        expected |= {
            f"model.layers.{layers + number}.{name}" for name in ("embed_tokens.weight", "shared_head.head.weight")
        }
    assert {name for name in theirs if int(([*name.split("layers."), "0."])[1].split(".")[0]) >= layers} == expected
    assert drafted(out, "mtp")[0] == drafted(target, f"mtp:{ours}")[0]
    assert drafted(out, "mtp") == drafted(target, f"mtp:{ours}")
    refused(out, target, tmp_path / "back", f"out is a target: use its head with --target {out} --drafter mtp")


def test_the_native_layout_needs_its_families(tmp_path: Path) -> None:
    save_target(tmp_path / "target", "qwen3_5_text")
    shape = {"layer": "target", "feed": "post_norm", "modules": 2}
    ours = save_trained(tmp_path / "ours", tmp_path / "target", **shape)
    with pytest.raises(ValueError, match="has 2 modules, and this layout shares all but their layers"):
        export_drafter(f"mtp:{ours}", tmp_path / "out", "native", target=tmp_path / "target")


def test_an_export_for_another_target_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "target", "glm4_moe")
    export_drafter("mtp", tmp_path / "out", target=tmp_path / "target")
    other, _ = save_family(tmp_path / "other", "glm4_moe")
    with torch.no_grad():
        other.model.layers[0].self_attn.o_proj.weight.add_(0.5)
    other.save_pretrained(tmp_path / "other")
    refused(tmp_path / "out", tmp_path / "other", tmp_path / "back", "was made for another target: ")


def test_an_incomplete_folder_and_8_bit_weights_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "target", "glm4_moe")
    export_drafter("mtp", tmp_path / "out", target=tmp_path / "target")
    name = "mtp_layers.0.input_proj.weight"
    changed(tmp_path / "out", {name: torch.ones(32, 64, dtype=torch.int8)})
    refused(tmp_path / "out", tmp_path / "target", tmp_path / "back", "is quantised with 8-bit weights")
    (tmp_path / "out/model.safetensors").unlink()
    refused(tmp_path / "out", tmp_path / "target", tmp_path / "back", r"holds no \*.safetensors weights")
