"""Medusa: what config.json says of heads, blocks and biases, and whose projections are meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_bad_checkpoints import Tensors, change, checkpoint, refused

from foretoken.training.formats import import_drafter

COUNTS = {"vllm": ("num_heads", "num_hidden_layers"), "original": ("medusa_num_heads", "medusa_num_layers")}
BIAS = {"vllm": "blocks.1.layers.0.bias", "original": "1.0.linear.bias"}


@pytest.mark.parametrize("format", ["vllm", "original"])
def test_fewer_tensors_than_stated(format: str, target: Path, tmp_path: Path) -> None:
    """The original project's own files state 2 heads and hold 5, so only the other way round is refused."""
    source = checkpoint("medusa", format, target, tmp_path)
    heads, blocks = COUNTS[format]
    change(source, None, **{heads: 2})
    import_drafter(source, tmp_path / "ours", target)
    assert "projections.2.weight" not in load_file(tmp_path / "ours" / "model.safetensors")  # shared again
    assert "blocks.2.0.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    change(source, None, **{heads: 5})
    refused(source, target, f"config.json says {heads} 5, and the checkpoint has tensors of 3")
    change(source, None, **{heads: 3, blocks: 2})
    refused(source, target, f"config.json says {blocks} 2, and the checkpoint has tensors of 1")


@pytest.mark.parametrize("format", ["vllm", "original"])
def test_biases(format: str, target: Path, tmp_path: Path) -> None:
    """All or none."""
    source = checkpoint("medusa", format, target, tmp_path)
    change(source, lambda tensors: tensors.pop(BIAS[format]))
    refused(source, target, f"lacks the tensor {BIAS[format]}")
    change(source, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".bias")])
    if format == "vllm":
        refused(source, target, "lacks the tensor blocks.0.layers.0.bias")
        change(source, None, medusa_fc_bias=False)
    import_drafter(source, tmp_path / "ours", target)
    assert not load_file(tmp_path / "ours" / "model.safetensors")["blocks.0.0.bias"].any()


def test_a_spare_projection_is_not_that_of_trained_heads(target: Path, tmp_path: Path) -> None:
    source = checkpoint("medusa", "vllm", target, tmp_path, own_projection=True)
    trained = load_file(source / "model.safetensors")["lm_heads.1.weight"]

    def spare(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"].bfloat16()

    change(source, spare)
    import_drafter(source, tmp_path / "ours", target)
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["projections.1.weight"], trained)
    change(source, None, original_lm_head=True)
    import_drafter(source, tmp_path / "shared", target)
    assert "projections.1.weight" not in load_file(tmp_path / "shared" / "model.safetensors")
