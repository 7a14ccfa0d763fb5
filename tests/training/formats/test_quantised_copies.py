"""Quantised copies of drafters: whole bytes with factors are read, others are refused by the method's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_nets import drafts, same_drafter, save_net
from torch import Tensor

from foretoken.training.formats import export_drafter, import_drafter
from foretoken.training.formats.quantised import dequantised

CONFIG = {"quant_method": "compressed-tensors", "format": "int-quantized"}
METHODS = [
    ("eagle3", "plain"),
    ("eagle3", "speculators"),
    ("peagle", "plain"),
    ("eagle", "plain"),
    ("eagle", "vllm"),
    ("medusa", "vllm"),
    ("medusa", "original"),
    ("dflash", "plain"),
    ("dspark", "speculators"),
]


def folder_of(method: str, format: str, target: Path, folder: Path) -> Path:
    drafter = save_net(method, folder / "mine", target)
    export_drafter(f"{method}:{drafter}", folder / "theirs", format, target)
    (folder / "theirs" / "foretoken.json").unlink()
    return folder / "theirs"


def rewrite(folder: Path, change: Any, quantization: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """The changed tensors, written in place of the others."""
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, Tensor] = change(load_file(file))
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization or CONFIG}))
    return tensors


def is_matrix(name: str, value: Tensor) -> bool:
    return value.dim() == 2 and name.endswith(".weight") and "embed" not in name


def by_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix in int8 with a factor per row, as llm-compressor writes it."""
    whole: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not is_matrix(name, value):
            whole[name] = value
            continue
        scale = (value.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
        whole[name] = (value.float() / scale).round().to(torch.int8)
        whole[f"{name}_scale"] = scale.to(torch.bfloat16)
    return whole


@pytest.mark.parametrize(("method", "format"), METHODS)
def test_bytes_with_factors_are_read(method: str, format: str, target: Path, tmp_path: Path) -> None:
    source = folder_of(method, format, target, tmp_path)
    original = load_file(tmp_path / "mine" / "model.safetensors")
    rewrite(source, by_rows)
    read = import_drafter(source, tmp_path / "back", target)
    note = "the weights are quantised with compressed-tensors (int-quantized), and were read as bfloat16"
    assert read["warnings"] == [note]
    back = load_file(tmp_path / "back" / "model.safetensors")
    differ = 0
    for name in original.keys() & back.keys():
        if original[name].is_floating_point():
            assert float((original[name].float() - back[name].float()).norm()) <= 0.02 * float(
                original[name].float().norm()
            )
            differ += not torch.equal(original[name], back[name])
    assert differ
    assert sum(len(tree) for tree, _ in drafts(target, read["drafter"])[1]) > 5


@pytest.mark.parametrize(("method", "format"), METHODS)
def test_packed_weights_are_refused_by_name(method: str, format: str, target: Path, tmp_path: Path) -> None:
    source = folder_of(method, format, target, tmp_path)

    def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {name: f"{name}_packed" if is_matrix(name, value) else name for name, value in tensors.items()}
        return {theirs: tensors[name].clone() for name, theirs in names.items()}

    rewrite(source, packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    words = r"is quantised with compressed-tensors \(pack-quantized\): take the unquantised checkpoint"
    with pytest.raises(ValueError, match=words):
        import_drafter(source, tmp_path / "back", target)
    assert not (tmp_path / "back").exists()


WEIGHT = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("scale", "zero"),
    [
        (torch.full((1,), 0.02), None),
        (torch.rand(6, 1) * 0.02 + 0.01, None),
        (torch.rand(6) * 0.02 + 0.01, torch.arange(6, dtype=torch.int8)),
        (torch.rand(6, 2) * 0.02 + 0.01, torch.ones(6, 2, dtype=torch.int8)),
    ],
    ids=["matrix", "rows", "rows with zero points", "groups"],
)
def test_factors(scale: Tensor, zero: Tensor | None) -> None:
    """One of a matrix, one per row, or one per row and group of columns."""
    columns = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    wide = columns.expand(6, -1).repeat_interleave(8 // columns.shape[1], 1)
    offsets = torch.zeros(6, 8)
    if zero is not None:
        offsets = zero.float().reshape(6, -1).repeat_interleave(8 // (zero.numel() // 6), 1)
    stored = (WEIGHT / wide + offsets).round().clamp(-128, 127).to(torch.int8)
    tensors = {"a.weight": stored, "a.weight_scale": scale, "b": torch.ones(2)}
    if zero is not None:
        tensors["a.weight_zero_point"] = zero
    read, method = dequantised({}, tensors)
    assert method == "8 bits" and read.keys() == {"a.weight", "b"} and read["a.weight"].dtype == torch.bfloat16
    assert torch.equal(read["a.weight"], ((stored.float() - offsets) * wide).to(torch.bfloat16))


def test_float8() -> None:
    eighths = (WEIGHT * 8).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight": eighths,
        "a.weight_scale": torch.tensor(0.125),
        "a.input_scale": torch.tensor(1.0),
    }
    read, _ = dequantised({"quantization_config": CONFIG}, tensors)
    assert read.keys() == {"a.weight"} and torch.equal(read["a.weight"].float(), eighths.float() / 8)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"quant_method": "gptq"}, {"a.qweight": torch.zeros(2, dtype=torch.int32)}, "with gptq: take"),
        (
            {"quant_method": "bitsandbytes"},
            {"a.weight": torch.zeros(4, 1, dtype=torch.uint8)},
            "with bitsandbytes: take",
        ),
        ({}, {"a.qweight": torch.zeros(2, dtype=torch.int32)}, "with packed weights: take"),
        (
            {},
            {"a.weight": torch.zeros(2, 2, dtype=torch.int8)},
            r"with 8-bit weights without scales \(a.weight\): take",
        ),
        (
            {"quant_method": "fp8"},
            {"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)},
            "with fp8: take",
        ),
        (CONFIG, {"a.weight": torch.zeros(2, 2)}, "with compressed-tensors .int-quantized.: take"),
        (["x"], {"a.weight": torch.zeros(2, 2)}, "with an unnamed method: take"),
        (
            CONFIG,
            {"a.weight": torch.zeros(4, 4, dtype=torch.int8), "a.weight_scale": torch.ones(3, 1)},
            r"a.weight_scale is \[3, 1\], which does not fit a.weight of \[4, 4\]",
        ),
        (
            CONFIG,
            {"a.weight": torch.zeros(4, 4, dtype=torch.int8), "a.weight_scale": torch.ones(4, 3)},
            r"a.weight_scale is \[4, 3\], which does not fit",
        ),
        (
            CONFIG,
            {"a.weight": torch.zeros(4, 8, dtype=torch.int8), "a.weight_scale": torch.ones(2, 2)},
            r"a.weight_scale is \[2, 2\], which does not fit a.weight of \[4, 8\]",
        ),
    ],
)
def test_what_cannot_be_read(config: Any, tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dequantised({"quantization_config": config} if config else {}, tensors)


def test_whole_weights_pass() -> None:
    tensors = {"a.weight": WEIGHT, "t2d": torch.ones(3, dtype=torch.bool), "d2t": torch.zeros(3, dtype=torch.int64)}
    assert dequantised({}, tensors) == (tensors, "")


def test_flags_in_bytes_are_no_weights(target: Path, tmp_path: Path) -> None:
    source = folder_of("eagle3", "plain", target, tmp_path)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "t2d": tensors["t2d"].to(torch.uint8)}, file)
    assert import_drafter(source, tmp_path / "back", target)["warnings"] == []
    assert same_drafter(tmp_path / "mine", tmp_path / "back")
