"""Drafters that are stored in 8 bits: how far weights are rounded, that they load as any other, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foretoken as ft
from foretoken.cli.main import main
from foretoken.methods.drafters.nets.eight_bits import BLOCK, SCALES, packed, unpacked
from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.methods.drafters.nets.store import load_weights, save_drafter
from foretoken.models.forward.parts import TargetParts
from toys import llamas


def some_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(8, 64, generator=generator) * torch.logspace(-4, 1, 8)[:, None],
        "zero": torch.zeros(2, BLOCK),
        "odd": torch.randn(3, 5, generator=generator),
        "norm": torch.randn(64, generator=generator),
        "table": torch.arange(64).reshape(2, 32),
    }


def test_a_weight_is_rounded_by_half_a_step_of_its_own_block() -> None:
    """A row that is 10,000 times as small as another one keeps its own precision."""
    weights = some_weights()
    back = unpacked(packed(weights), "file")
    assert list(back) == list(weights)
    blocks, rounded = weights["wide"].reshape(-1, BLOCK), back["wide"].float().reshape(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    # Half a step, and what bfloat16 and a scale in float16 round
    assert bool(((rounded - blocks).abs() <= 0.51 * step + blocks.abs() / 200).all())
    assert float((rounded - blocks).abs().max()) > 0
    assert not back["zero"].any()


def test_only_whole_blocks_of_matrices_are_packed() -> None:
    weights = some_weights()
    stored = packed(weights)
    assert {name for name, value in stored.items() if value.dtype == torch.int8} == {"wide", "zero"}
    assert stored["wide" + SCALES].shape == (16,) and stored["wide"].shape == (8, 64)
    for name in ("odd", "norm", "table"):
        assert stored[name] is weights[name] and name + SCALES not in stored


def saved(folder: Path, bits: int) -> tuple[Path, MedusaHeads]:
    parts = TargetParts(llamas()[0])
    torch.manual_seed(3)
    net = MedusaHeads(MedusaConfig(parts.hidden_size, parts.vocab_size, 3, own_projection=True))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape))
    config = {"hidden_size": parts.hidden_size, "vocab_size": parts.vocab_size, "heads": 3, "own_projection": True}
    save_drafter(folder, "medusa", config, net, parts.fingerprint(), bits=bits)
    return folder, net


def test_a_folder_in_8_bits_loads_as_one_in_16(tmp_path: Path) -> None:
    whole, net = saved(tmp_path / "whole", 16)
    small, _ = saved(tmp_path / "small", 8)
    full, rounded = MedusaHeads(net.config), MedusaHeads(net.config)
    load_weights(whole, full)
    load_weights(small, rounded)
    sizes = [sum(v.nbytes for v in load_file(folder / "model.safetensors").values()) for folder in (small, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    assert json.loads((small / "drafter.json").read_text()) == json.loads((whole / "drafter.json").read_text())
    for name, value in full.state_dict().items():
        error = float((rounded.state_dict()[name] - value).square().mean().sqrt() / value.square().mean().sqrt())
        assert error < 0.01, name


def cut_scales(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if name.endswith(SCALES))
    tensors[name] = tensors[name][:-1].contiguous()


def lose_scales(tensors: dict[str, Tensor]) -> None:
    tensors.pop(next(name for name in tensors if name.endswith(SCALES)))


def break_scales(tensors: dict[str, Tensor]) -> None:
    tensors[next(name for name in tensors if name.endswith(SCALES))][0] = torch.nan


def lose_weights(tensors: dict[str, Tensor]) -> None:
    tensors.pop(next(name for name in tensors if name.endswith(SCALES)).removesuffix(SCALES))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_scales, f"{SCALES} in .* does not fit"),
        (lose_scales, "is stored as int8, and only unquantised weights are supported"),
        (break_scales, "holds NaN or inf"),
        (lose_weights, "lacks the tensor"),
    ],
)
def test_damaged_scales(damage: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path) -> None:
    folder, net = saved(tmp_path, 8)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=words) as caught:
        load_weights(folder, MedusaHeads(net.config))
    assert "\n" not in str(caught.value)


def test_other_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights are stored in 16 or 8 bits, not 4"):
        saved(tmp_path, 4)
    assert not list(tmp_path.iterdir())


def test_training_stores_8_bits_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} bottles of milk stood on the wall, and one fell down\n" * 12)
    words = ["train", "pass_tokens", "--data", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--steps", "1"]
    assert main([*words, "--batch-size", "1", "--context", "32", "--weight-bits", "8"]) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert any(value.dtype == torch.int8 for value in stored.values())
    assert "--weight-bits 8" in (tmp_path / "out" / "README.md").read_text()
    llm = ft.load(drafter=f"pass_tokens:{tmp_path / 'out'}", dtype="float32", controller="constant")
    output = llm.generate("It was", max_new_tokens=6)
    assert output.stats.num_draft_tokens > 0
    assert output.token_ids == llm.plain.generate("It was", max_new_tokens=6).token_ids
