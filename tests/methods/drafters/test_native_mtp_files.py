"""Missing and surplus tensors of a checkpoint's multi-token prediction head, and how its experts are stacked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foretoken as ft
from foretoken.loading import LoadError, load_model, load_tokenizer, read_head
from foretoken.methods.drafters.mtp import MtpDrafter
from foretoken.models.forward.heads.mtp import fused, target_layer_module
from native_checkpoints import (
    SIZE,
    VOCAB,
    add_tensors,
    drop,
    published,
    random_module,
    save_family,
    save_target,
    single_experts,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    save_family(folder, "glm4_moe")
    return folder


# -- experts ---------------------------------------------------------------------------------------------------------


def test_experts_are_stacked_in_the_order_of_the_class() -> None:
    parts = {f"layer.mlp.experts.{e}.{name}.weight": torch.full((2, 3), 10.0 * e + i)
             for e in range(3) for i, name in enumerate(("gate_proj", "up_proj"))}  # fmt: skip
    parts |= {f"layer.mlp.experts.{e}.down_proj.weight": torch.full((3, 2), float(e)) for e in range(3)}
    weights = fused({**parts, "norm.weight": torch.ones(3)})
    assert sorted(weights) == ["layer.mlp.experts.down_proj", "layer.mlp.experts.gate_up_proj", "norm.weight"]
    assert weights["layer.mlp.experts.gate_up_proj"][:, :, 0].tolist() == [
        [0, 0, 1, 1],
        [10, 10, 11, 11],
        [20, 20, 21, 21],
    ]
    assert weights["layer.mlp.experts.down_proj"][:, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("lost", ["layer.mlp.experts.1.up_proj.weight", "layer.mlp.experts.0.down_proj.weight"])
def test_a_lost_expert_is_named(lost: str, tmp_path: Path) -> None:
    network = save_target(tmp_path)
    tensors = single_experts(random_module(network).state_dict())
    del tensors[lost]
    with pytest.raises(ValueError, match=rf"lacks the tensor {lost}: it is incomplete"):
        target_layer_module(network, tensors)


# -- what can be wrong -----------------------------------------------------------------------------------------------


def refused(folder: Path, message: str, spec: str = "mtp") -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ft.load(folder, spec)
    assert "\n" not in str(caught.value)


def test_a_target_without_a_head(tmp_path: Path) -> None:
    save_target(tmp_path, "glm4_moe")
    drop(tmp_path, [], {"num_nextn_predict_layers": 0, "num_mtp_layers": 0})
    refused(tmp_path, r"has no multi-token prediction head: give .* or use drafter='ngram'")


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_head_that_is_declared_and_missing(key: str, tmp_path: Path) -> None:
    save_target(tmp_path, "glm4_moe")
    drop(tmp_path, [], {"num_mtp_layers": 0, "num_nextn_predict_layers": 0, key: 2})
    refused(tmp_path, r"declares 2 multi-token prediction layer\(s\) in config.json and has none of their tensors")
    with pytest.raises(LoadError):
        read_head(load_model(tmp_path).model)  # type: ignore[attr-defined]


def test_a_head_that_is_not_declared_is_used(glm: Path, tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    drop(tmp_path, [], {"num_mtp_layers": 0, "num_nextn_predict_layers": 0})
    assert isinstance(ft.load(tmp_path, "mtp").drafter, MtpDrafter)


@pytest.mark.parametrize(
    "name",
    [
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.q_proj.weight",
        "mlp.gate.weight",
        "input_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    drop(tmp_path, [f"model.layers.2.{name}"])
    refused(tmp_path, "module lacks the tensor .*: the checkpoint is incomplete")


def test_a_superfluous_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    add_tensors(tmp_path, {"model.layers.2.self_attn.q_proj.weight_scale_inv": torch.ones(1)})
    refused(tmp_path, "holds a tensor layer.self_attn.q_proj.weight_scale_inv that Glm4MoeDecoderLayer does not have")
    drop(tmp_path, ["model.layers.2.self_attn.q_proj.weight_scale_inv"])
    add_tensors(tmp_path, {"model.layers.2.eh_proj.weight": torch.ones(SIZE, SIZE)})
    refused(tmp_path, r"eh_proj.weight of its .* module is \[32, 32\] and must be \[32, 64\]")


def test_what_repeats_the_target_is_left_out(tmp_path: Path) -> None:
    save_family(tmp_path, "glm4_moe")
    add_tensors(tmp_path, {"model.layers.2.embed_tokens.weight": torch.ones(VOCAB, SIZE),
                           "model.layers.2.shared_head.head.weight": torch.ones(VOCAB, SIZE)})  # fmt: skip
    assert ft.load(tmp_path, "mtp", controller="constant").generate(PROMPT, max_new_tokens=4).token_ids


def test_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    network = save_target(tmp_path)
    module = random_module(network)
    add_tensors(tmp_path, published("glm4_moe", 0, 2, module.state_dict()), "mtp.safetensors")
    assert ft.load(tmp_path, "mtp", controller="constant").generate(PROMPT, max_new_tokens=4).stats.num_draft_tokens


@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_of_a_hub_id(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is named as on the hub, in the local cache as the hub's client lays it out."""
    from huggingface_hub import constants

    commit, home = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--some--target"
    folder = home / "snapshots" / commit
    network, _ = save_family(folder, "glm4_moe")
    if shards > 1:
        network.save_pretrained(folder / "split", max_shard_size="20KB")
        (folder / "model.safetensors").rename(folder / "head.safetensors")
        index = json.loads((folder / "split" / "model.safetensors.index.json").read_text())
        index["weight_map"] |= {
            name: "head.safetensors" for name in load_file(folder / "head.safetensors") if ".layers.2." in name
        }
        for file in (folder / "split").glob("*.safetensors"):
            file.rename(folder / file.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    llm = ft.load("some/target", "mtp", dtype="float64", tokenizer=load_tokenizer("builtin"), controller="constant")
    assert isinstance(llm.drafter, MtpDrafter)
    out = llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert out.stats.num_draft_tokens
    assert out.token_ids == llm.plain.generate(PROMPT, max_new_tokens=8, ignore_eos=True).token_ids


def test_a_head_that_a_hub_checkpoint_spreads_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the head are read, and none with the target's weights alone."""
    network, (module,) = save_family(tmp_path / "whole", "glm4_moe")
    head = published("glm4_moe", 0, network.config.num_hidden_layers, module.state_dict())
    files = {name: "experts.safetensors" if ".mlp." in name else "norms.safetensors" for name in head}
    for name, file in files.items():
        add_tensors(tmp_path, {name: head[name]}, file)
    weight_map = files | {"model.embed_tokens.weight": "target.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def cached_file(source: str, name: str, **_: object) -> str:
        assert source == "some/target" and (tmp_path / name).exists()
        return str(tmp_path / name)

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    network.config._name_or_path = "some/target"
    (read,) = read_head(network)
    assert len(read) == len(head)
    target_layer_module(network, read)


def test_an_unknown_feed(glm: Path) -> None:
    refused(glm, "needs feed=post_norm or feed=pre_norm, not 'both'", "mtp,feed=both")


def test_a_network_made_in_memory_has_no_head(glm: Path) -> None:
    network = load_model(glm).model  # type: ignore[attr-defined]
    network.config._name_or_path = ""
    refused(network, "the target has no multi-token prediction head")


def test_a_gguf_file_has_no_head(glm: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    network = load_model(glm).model  # type: ignore[attr-defined]
    network.config._name_or_path = str(file)
    with pytest.raises(LoadError, match=r"model\.gguf has no multi-token prediction head: give"):
        read_head(network)
