"""A drafter in several files: all that the index lists are needed, and no tensor may stand twice with other numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_checkpoints import change, checkpoint, refused

from foretoken.training.formats import import_drafter


def in_two_files(folder: Path, second: str) -> Path:
    """Move the tensors whose names end so to a second file; returns that."""
    (file,) = folder.glob("*.safetensors")
    whole = load_file(file)
    file.unlink()
    places = {name: f"model-0000{1 + name.endswith(second)}-of-00002.safetensors" for name in whole}
    for place in set(places.values()):
        save_file({name: value for name, value in whole.items() if places[name] == place}, folder / place)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("method", "config", "second", "key"),
    [
        ("eagle3", {"own_embedding": True}, "embed_tokens.weight", "own_embedding"),
        ("dflash", {"own_head": True}, "lm_head.weight", "own_head"),
        ("dflash", {"sinks": True}, "attention_sink_bias", "sinks"),
    ],
)
def test_shards(method: str, config: dict[str, Any], second: str, key: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint(method, "plain", target, tmp_path, **config)
    shard = in_two_files(source, second)
    import_drafter(source, tmp_path / "ours", target)
    assert json.loads((tmp_path / "ours" / "drafter.json").read_text())["config"][key]
    save_file({"fc.weight": torch.zeros(1)}, source / "old.safetensors")  # not of the index
    import_drafter(source, tmp_path / "again", target)
    shard.unlink()
    refused(source, target, f"lacks {shard.name}: copy the missing shards")


def test_a_tensor_in_two_files(target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3", "plain", target, tmp_path)
    weight = load_file(source / "model.safetensors")["fc.weight"]
    save_file({"fc.weight": weight}, source / "old.safetensors")
    import_drafter(source, tmp_path / "ours", target)
    save_file({"fc.weight": torch.zeros_like(weight)}, source / "old.safetensors")
    refused(source, target, "holds two tensors fc.weight, one in old.safetensors")


@pytest.mark.parametrize(
    ("method", "format", "name", "prefix"),
    [
        ("dflash", "plain", "fc.weight", "model."),
        ("medusa", "vllm", "blocks.0.layers.0.weight", "medusa_heads."),
        ("medusa", "original", "0.0.linear.weight", "medusa_head."),
    ],
)
def test_a_tensor_with_two_names(
    method: str, format: str, name: str, prefix: str, target: Path, tmp_path: Path
) -> None:
    source = checkpoint(method, format, target, tmp_path)
    change(source, lambda tensors: tensors.update({prefix + name: torch.zeros_like(tensors[name])}))
    refused(source, target, "which are one tensor of this network")
