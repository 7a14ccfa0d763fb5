"""Block drafters as they are on the hub: what a folder is told by, the layout of every kind, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import DIM, HEADS, hub_folder
from safetensors.torch import load_file, save_file
from test_bad_checkpoints import change, checkpoint, refused
from tiny_nets import SIZE, VOCAB, drafts, save_net, save_target
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config

from foretoken.loading import load_model
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.block_model import BlockModel
from foretoken.methods.drafters.nets.store import build_net
from foretoken.models.base import Feed
from foretoken.models.forward.parts import TargetParts
from foretoken.training.formats import import_drafter
from foretoken.training.formats.block_layout import _default_kinds, default_taps


def stored(folder: Path) -> BlockConfig:
    return BlockConfig(**json.loads((folder / "drafter.json").read_text())["config"])


def test_a_folder_as_it_is_on_the_hub(target: Path, tmp_path: Path) -> None:
    read = import_drafter(hub_folder(tmp_path / "hub"), tmp_path / "mine", target)
    assert (read["method"], read["format"], read["warnings"]) == ("dflash", "plain", [])
    config = stored(tmp_path / "mine")
    assert (config.taps, config.block, config.mask_token, config.rope_theta) == ("1,3", 5, 90, 1e6)
    assert (config.reach, config.causal, config.from_anchor, config.own_head) == ("0", "0", False, False)
    plain, trees = drafts(target, read["drafter"]), drafts(target, read["drafter"])
    assert plain == trees and any(len(tree) > 1 for tree, _ in trees[1])


@pytest.mark.parametrize(
    ("config", "inner", "expected"),
    [
        ({}, {"block_size": 7}, {"block": 7}),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, {},
         {"reach": "7,0", "causal": "1,0"}),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, {"causal": False},
         {"reach": "7,0", "causal": "0"}),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}, {},
         {"reach": "7", "causal": "0"}),
        ({"sliding_window_non_causal": True}, {"use_swa": True, "swa_window_size": 4}, {"reach": "3", "causal": "0"}),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {},
         {"reach": "0,7", "causal": "0,1"}),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, {}, {"reach": "7", "causal": "1"}),
        ({"use_sliding_window": True, "sliding_window": 8}, {}, {"reach": "0"}),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {}, {"reach": "0"}),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, {}, {"reach": "0"}),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
          "layer_types": ["full_attention", "sliding_attention"]}, {}, {"reach": "0,7"}),
        ({}, {"causal_head": True}, {"causal": "1"}),
        ({}, {"dflash_draft_attention": "causal"}, {"causal": "1"}),
        ({}, {"attention_mode": "causal"}, {"causal": "1"}),
        ({}, {"attention_mode": "gqa"}, {"causal": "0"}),
        ({}, {"sample_from_anchor": True, "input_embedding_scale": 3.0}, {"from_anchor": True, "input_scale": 3.0}),
        ({"pard_token": 11}, {"mask_token_id": None}, {"mask_token": 11}),
        ({}, {"target_layer_ids": [1]}, {"taps": "2,4"}),  # fc reads one more than is named: the last layer
        ({}, {"target_layer_ids": None}, {"taps": "2,2"}),
    ],
)  # fmt: skip
def test_what_config_json_says(
    config: dict[str, Any], inner: dict[str, Any], expected: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    import_drafter(hub_folder(tmp_path / "hub", config, **inner), tmp_path / "mine", target)
    block_config = stored(tmp_path / "mine")
    assert {key: getattr(block_config, key) for key in expected} == expected


def test_windows_are_those_of_transformers() -> None:
    for shape in ({"sliding_window": 8, "max_window_layers": 2}, {"sliding_window": 8}, {"sliding_window": None}):
        config = {"use_sliding_window": True, "num_hidden_layers": 30, **shape}
        assert _default_kinds(config, 30) == Qwen3Config(**config).layer_types


def test_default_depths_are_the_papers() -> None:
    assert default_taps(36, 5) == [2, 10, 18, 26, 34]  # target_layer_ids 1, 9, 17, 25, 33
    assert default_taps(24, 5) == [2, 7, 12, 17, 22] and default_taps(24, 1) == [13]


def test_other_names_of_the_same_tensors(target: Path, tmp_path: Path) -> None:
    """Fused projections, a leading ``model.``, Muse-Glimmer's encoder, EAGLE's midlayer."""
    hub = hub_folder(tmp_path / "hub")
    import_drafter(hub, tmp_path / "one", target)
    tensors = load_file(hub / "model.safetensors")
    for layer in ("layers.0", "layers.1"):
        parts = [tensors.pop(f"{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    tensors = {("model." + k).replace("model.layers.0.", "midlayer."): v for k, v in tensors.items()}
    save_file(tensors, hub / "model.safetensors")
    import_drafter(hub, tmp_path / "other", target)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """A random network saved by Transformers' own class: the same states, windows included."""
    save_target(tmp_path / "target", num_hidden_layers=4)
    torch.manual_seed(3)
    shape = {"hidden_size": SIZE, "intermediate_size": 24, "num_attention_heads": HEADS, "head_dim": DIM}
    config = MuseGlimmerAssistantConfig(
        **shape, num_hidden_layers=2, num_key_value_heads=2, sliding_window=3, block_size=4, mask_token_id=90,
        layer_types=["sliding_attention", "full_attention"], target_layer_ids=[0, 1, 2],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    stock = MuseGlimmerAssistantModel(config).eval()
    for name, weight in stock.named_parameters():
        weight.copy_((torch.randn(weight.shape) * 0.3 + ("norm" in name)).to(torch.bfloat16))
    stock.save_pretrained(tmp_path / "stock")
    read = import_drafter(tmp_path / "stock", tmp_path / "mine", tmp_path / "target")
    assert read["method"] == "dflash"
    model = load_model(tmp_path / "target", dtype="float32")
    parts, description = TargetParts(model), json.loads((tmp_path / "mine" / "drafter.json").read_text())
    net = build_net(tmp_path / "mine", BlockNet, BlockConfig, description)
    assert net.config.reach == "3,0" and net.config.causal == "0"
    block_model = BlockModel(net, parts, model)
    sequence, taps = block_model.open(), torch.randn(9, 3 * SIZE)
    block_model.forward([Feed(sequence, [0] * 9, wanted=0, states=net.context([taps]))])
    block_model.commit(sequence, range(9))
    expected = stock(
        noise_embeds=parts.embed.weight[torch.tensor([[5, 90, 90, 90]])],
        context_hidden_states=taps[None],
        attention_mask=windowed(9, 4, 3),
    ).last_hidden_state[0]
    assert torch.allclose(block_model.blocks([sequence], [5], 4)[0].taps["state"], expected, atol=1e-4)


def windowed(places: int, rows: int, window: int) -> dict[str, Tensor]:
    """Masks by layer type: without a cache, Transformers would count only the rows."""
    distance = torch.arange(places, places + rows)[:, None] - torch.arange(places + rows)
    far = torch.zeros(1, 1, rows, places + rows).masked_fill_(distance.abs() > window, -torch.inf)
    return {"sliding_attention": far, "full_attention": torch.zeros_like(far)}


def test_neighbours_that_are_turned_become_halves(target: Path, tmp_path: Path) -> None:
    """LFM2's drafters turn neighbours: scores of queries and keys are what they were."""
    hub = hub_folder(tmp_path / "hub", {"architectures": ["Lfm2DFlashDraftModel"]})
    import_drafter(hub, tmp_path / "mine", target)
    old, new = load_file(hub / "model.safetensors"), load_file(tmp_path / "mine" / "model.safetensors")
    name = "layers.0.self_attn.k_proj.weight"
    assert torch.equal(new[name][:DIM], torch.cat([old[name][:DIM:2], old[name][1:DIM:2]]))
    assert torch.equal(new["layers.0.self_attn.v_proj.weight"], old["layers.0.self_attn.v_proj.weight"])
    x, angle = torch.randn(SIZE), torch.arange(DIM // 2) * 0.3

    def score(key: Tensor, halves: bool) -> Tensor:
        first, second = key.float().chunk(2) if halves else (key.float()[::2], key.float()[1::2])
        turned = torch.stack([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()])
        return (turned * torch.stack([first, second])).sum()

    assert torch.allclose(score(new[name][:DIM].float() @ x, True), score(old[name][:DIM].float() @ x, False))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "inner", "words"),
    [
        ({"block_size": ...}, {}, "config.json lacks block_size"),
        ({}, {"block_size": 1}, "a block has 2 to 256 rows, not 1"),
        ({}, {"block_size": 400}, "a block has 2 to 256 rows, not 400"),
        ({}, {"mask_token_id": None}, "names no mask token"),
        ({}, {"mask_token_id": VOCAB}, f"mask token {VOCAB} is not one of the target's {VOCAB} tokens"),
        ({}, {"target_layer_ids": [0, 3]}, "target_layer_ids must be from 0 to 2 for a target of 4 layers"),
        ({}, {"target_layer_ids": [-1, 2]}, "target_layer_ids must be from 0 to 2"),
        ({}, {"target_layer_ids": [0, 1, 2]}, "fc.weight reads 64 numbers, and 3 layers have 32 each"),
        ({"num_target_layers": 36}, {}, "for a target of 36 layers, and this one has 4"),
        ({"hidden_size": 48}, {}, "for a hidden size of 48, the target's is 32"),
        ({"vocab_size": 4 * VOCAB}, {}, f"for a vocabulary of {4 * VOCAB}"),
        ({"dflash_config": []}, {}, "dflash_config in config.json must be a JSON object"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, {}, "of the type 'spiral', which is not supported"),
        ({"attention_bias": True}, {}, "lacks the tensor layers.0.self_attn.q_proj.bias"),
        ({"layer_types": ["chunked_attention"] * 2}, {}, "must name 2 layers as full_attention or sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "sliding layers and no sliding_window"),
        ({}, {"final_logit_softcapping": 30.0}, "caps its logits at 30.0"),
        ({}, {"output_multiplier": 2.0}, "scales its logits by 2.0"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {}, "with compressed-tensors: take"),
        ({"intermediate_size": 48}, {}, "mlp.gate_proj.weight is .40, 32. and must be .48, 32."),
        ({}, {"attention_mode": "kda"}, "attention_mode 'kda', which this network does not have"),
        ({}, {"dflash_attention_sink": True}, "lacks the tensor layers.0.self_attn.attention_sink_bias"),
        ({"draft_vocab_size": 30}, {}, "lacks the tensor d2t, the ids of its 30 draft tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    config: dict[str, Any], inner: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    refused(hub_folder(tmp_path / "hub", config, **inner), target, words)


def test_a_confidence_head_that_is_promised(target: Path, tmp_path: Path) -> None:
    source = checkpoint("dspark", "plain", target, tmp_path)
    tensors = load_file(source / "model.safetensors")
    left = {name: value for name, value in tensors.items() if not name.startswith("confidence_head.")}
    assert len(left) < len(tensors)
    save_file(left, source / "model.safetensors")
    refused(source, target, "lacks the tensor confidence_head.proj.weight")


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_sinks_that_are_promised(layout: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint("dflash", layout, target, tmp_path, sinks=True)
    import_drafter(source, tmp_path / "ours", target)
    assert stored(tmp_path / "ours").sinks
    change(source, lambda tensors: [tensors.pop(name) for name in list(tensors) if "sink" in name])
    refused(source, target, "lacks the tensor layers.0.self_attn.attention_sink_bias")


def test_sizes_by_the_tensors(target: Path, tmp_path: Path) -> None:
    source = checkpoint("dflash2", "plain", target, tmp_path, conv=3, group=8, rank=6)
    inner = json.loads((source / "config.json").read_text())["dflash_config"]
    left = ("mask_token_id", "target_layer_ids", "block_size")
    change(source, None, dflash_config={key: inner[key] for key in left})
    import_drafter(source, tmp_path / "ours", target)
    config = json.loads((tmp_path / "ours" / "drafter.json").read_text())["config"]
    assert (config["conv"], config["group"], config["rank"]) == (3, 8, 6)


def test_pickled_or_damaged(target: Path, tmp_path: Path) -> None:
    hub = hub_folder(tmp_path / "hub")
    whole = (hub / "model.safetensors").read_bytes()
    (hub / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(hub, target, "damaged or half-written")
    (hub / "model.safetensors").unlink()
    torch.save({}, hub / "pytorch_model.bin")
    refused(hub, target, "pickled weights only .* convert them")


def test_speculators_count_layers_from_one(target: Path, tmp_path: Path) -> None:
    source = checkpoint("dflash", "speculators", target, tmp_path)
    config = json.loads((source / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 3] and config["speculators_model_type"] == "dflash"
    change(source, None, aux_hidden_state_layer_ids=[3, 5])
    refused(source, target, "aux_hidden_state_layer_ids must be from 1 to 4 for a target of 4 layers")
    plain = checkpoint("dflash", "plain", target, tmp_path / "plain")
    assert json.loads((plain / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [1, 2]


def test_what_an_engine_is_told(target: Path, tmp_path: Path) -> None:
    from foretoken.training.formats import export_drafter

    drafter = save_net("dflash", tmp_path / "mine", target, block=6)
    report = export_drafter(f"dflash:{drafter}", tmp_path / "out", None, target, engine="vllm")
    assert report["format"] == "plain" and '"num_speculative_tokens": 5' in report["ready"]
    with pytest.raises(ValueError, match="sglang cannot load a drafter 'dflash'"):
        export_drafter(f"dflash:{drafter}", tmp_path / "other", None, target, engine="sglang")
