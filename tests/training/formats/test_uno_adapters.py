"""UNO's updates as a PEFT adapter: there and back, as it is published, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_checkpoints import refused
from tiny_nets import LAYERS, SIZE, VOCAB, drafts, same_drafter, save_net

from foretoken.methods.drafters.nets.uno import UnoConfig
from foretoken.training.formats import export_drafter, import_drafter

RANK = 3
PREFIX = "base_model.model.model.layers"


def published(folder: Path, names: tuple[str, ...] = ("self_attn.q_proj",), **changes: Any) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none", "use_dora": False,
        "target_modules": ["q_proj"], "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, **changes,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in range(LAYERS):
        for name in names:
            tensors[f"{PREFIX}.{layer}.{name}.lora_A.weight"] = torch.randn(RANK, SIZE, generator=generator)
            tensors[f"{PREFIX}.{layer}.{name}.lora_B.weight"] = torch.randn(SIZE, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_there_and_back(target: Path, tmp_path: Path) -> None:
    drafter = save_net("uno", tmp_path / "mine", target)
    written = export_drafter(f"uno:{drafter}", tmp_path / "theirs", None, target)
    assert written["format"] == "peft"
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 6.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    names = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert names[f"{PREFIX}.2.mlp.down_proj.lora_A.weight"].shape == (RANK, 48)
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert (read["method"], read["warnings"]) == ("uno", [])
    assert json.loads((tmp_path / "back" / "drafter.json").read_text()) == json.loads(
        (drafter / "drafter.json").read_text()
    )
    assert same_drafter(drafter, tmp_path / "back")
    tokens, trees = drafts(target, f"uno:{drafter}")
    assert drafts(target, read["drafter"]) == (tokens, trees) and sum(len(tree) - 1 for tree, _ in trees) > 10


@pytest.mark.parametrize("rslora", [False, True])
def test_as_it_is_published(rslora: bool, target: Path, tmp_path: Path) -> None:
    """The adapter's files say neither the noise nor the number of tokens: the import says what it takes."""
    read = import_drafter(published(tmp_path / "adapter", use_rslora=rslora), tmp_path / "mine", target)
    assert read["method"] == "uno" and any("16 tokens a forward" in line for line in read["warnings"])
    config = UnoConfig(**json.loads((tmp_path / "mine" / "drafter.json").read_text())["config"])
    assert (config.places, config.noise, config.mask_token) == (16, "random", VOCAB)
    assert list(config.shapes) == ["self_attn.q_proj"] and config.scale == pytest.approx(
        2 * (RANK**0.5 if rslora else 1)
    )
    _, trees = drafts(target, read["drafter"])
    assert any(len(tree) > 2 for tree, _ in trees)


@pytest.mark.parametrize(
    ("names", "changes", "words"),
    [
        (("self_attn.q_proj",), {"peft_type": "IA3"}, "peft_type 'IA3': uno is read from a LORA"),
        (("self_attn.q_proj",), {"use_dora": True}, "uses use_dora, and uno is read from a plain LORA"),
        (("self_attn.q_proj",), {"modules_to_save": ["lm_head"]}, "uses modules_to_save"),
        (("self_attn.q_proj",), {"fan_in_fan_out": True, "use_qalora": True}, "uses fan_in_fan_out, use_qalora"),
        (("self_attn.q_proj",), {"init_lora_weights": "pissa"}, "uses init_lora_weights"),
        (("self_attn.q_proj",), {"layer_replication": [[0, 4]]}, "uses layer_replication"),
        (("self_attn.q_proj",), {"use_rslora": "no"}, "uses use_rslora"),
        (("self_attn.q_proj",), {"bias": "all"}, "uses bias"),
        (("self_attn.q_proj",), {"r": 4}, r"lora_A is .3, 32. and must be .4, 32."),
        (("self_attn.k_proj",), {}, r"lora_B is .32, 3. and must be .16, 3."),
        (("self_attn.in_proj",), {}, "updates self_attn.in_proj, which is no linear layer of every layer"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    names: tuple[str, ...], changes: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    refused(published(tmp_path / "adapter", names, **changes), target, words)


def test_updates_of_something_else(target: Path, tmp_path: Path) -> None:
    adapter = published(tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(RANK, SIZE)
    save_file(tensors, adapter / "adapter_model.safetensors")
    refused(adapter, target, "lm_head.lora_A.weight, which is no update of a linear layer")


@pytest.mark.parametrize(
    ("key", "value"), [("places", "x"), ("noise", ["mask"]), ("mask_token", 7.5), ("places", True)]
)
def test_a_damaged_note(key: str, value: Any, target: Path, tmp_path: Path) -> None:
    export_drafter(f"uno:{save_net('uno', tmp_path / 'mine', target)}", tmp_path / "theirs", None, target)
    file = tmp_path / "theirs" / "foretoken.json"
    note = json.loads(file.read_text())
    note["noise"][key] = value
    file.write_text(json.dumps(note))
    refused(tmp_path / "theirs", target, "foretoken.json is damaged: copy it again, or remove it")


@pytest.mark.parametrize(
    "other", [f"{PREFIX}.1.self_attn.q_proj.lora_A.other.weight", "vision.layers.1.self_attn.q_proj.lora_A.weight"]
)
def test_two_updates_of_one_layer(other: str, target: Path, tmp_path: Path) -> None:
    adapter = published(tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, other: torch.zeros(RANK, SIZE)}, adapter / "adapter_model.safetensors")
    refused(adapter, target, "which are one tensor of this network")
