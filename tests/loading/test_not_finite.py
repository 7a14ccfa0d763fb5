"""Weights with NaN or inf: heads and draft models are refused by tensor and file, a target's are named by its error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken as ft
from foretoken.core import NonFiniteLogitsError
from foretoken.loading import LoadError
from foretoken.loading.adapters import save_adapter
from foretoken.training.formats import export_drafter, import_drafter
from training.formats.tiny_nets import save_net, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("finite") / "target")


def spoil(folder: Path, name: str, value: float = float("nan")) -> Path:
    """Put one such number into a tensor; returns its file."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, {"format": "pt"})
    return file


@pytest.mark.parametrize(
    ("method", "format", "name"),
    [
        ("eagle3", "plain", "midlayer.mlp.up_proj.weight"),
        ("eagle3", "speculators", "layers.0.mlp.up_proj.weight"),
        ("eagle", "plain", "layers.0.self_attn.k_proj.weight"),
        ("eagle", "vllm", "layers.0.self_attn.k_proj.weight"),
        ("medusa", "vllm", "blocks.1.layers.0.weight"),
        ("medusa", "original", "1.0.linear.weight"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_import_names_tensor_and_file(
    method: str, format: str, name: str, value: float, target: Path, tmp_path: Path
) -> None:
    export_drafter(f"{method}:{save_net(method, tmp_path / 'mine', target)}", tmp_path / "theirs", format, target)
    file = spoil(tmp_path / "theirs", name, value)
    with pytest.raises(ValueError, match=r"holds NaN or inf: copy the file again") as caught:
        import_drafter(tmp_path / "theirs", tmp_path / "out", target)
    assert f"{name} in {file}" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("method", "name"), [("eagle3", "fc.weight"), ("medusa", "blocks.1.0.weight")])
def test_a_trained_head(method: str, name: str, target: Path, tmp_path: Path) -> None:
    folder = save_net(method, tmp_path / "head", target)
    file = spoil(folder, name)
    with pytest.raises(ValueError, match="holds NaN or inf") as caught:
        ft.load(target, f"{method}:{folder}", dtype="float32")
    assert f"{name} in {file}" in str(caught.value)


def test_a_draft_model(target: Path, tmp_path: Path) -> None:
    draft = save_target(tmp_path / "draft", seed=2)
    assert ft.load(target, f"model:{draft}").generate([1, 2], max_new_tokens=3).token_ids
    file = spoil(draft, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="holds NaN or inf") as caught:
        ft.load(target, f"model:{draft}")
    assert f"model.layers.1.mlp.up_proj.weight in {file}" in str(caught.value)


def test_a_low_rank_update(target: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj"
    factors = {name: (torch.full((2, 32), float("inf")), torch.zeros(32, 2))}
    save_adapter(tmp_path / "update", factors, str(target), torch.float32)
    with pytest.raises(ValueError, match=f"{name}.lora_A.weight in .*adapter_model.safetensors holds NaN or inf"):
        ft.load(tmp_path / "update", None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_that_decodes_to_nan_names_the_weight(dtype: str, target: Path, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "broken")
    spoil(folder, "model.layers.2.mlp.down_proj.weight")
    llm = ft.load(folder, None, dtype=dtype)
    with pytest.raises(NonFiniteLogitsError) as caught:
        llm.generate([1, 2, 3], max_new_tokens=4)
    assert f"because model.layers.2.mlp.down_proj.weight in {folder} holds NaN or inf" in str(caught.value)


def test_finite_weights_that_overflow_are_told_of_the_precision(target: Path) -> None:
    llm = ft.load(target, None, dtype="float32")
    with torch.no_grad():
        llm.target.model.lm_head.weight.mul_(1e38)  # type: ignore[attr-defined]
        llm.target.model.model.norm.weight.mul_(1e38)  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteLogitsError, match="check the checkpoint, or load it with dtype=float32"):
        ft.load(llm.target.model, None).generate([1, 2, 3], max_new_tokens=4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("inflate", [None, 2_000_000])
def test_a_target_that_is_to_be_quantised(quantize: str, inflate: int | None, target: Path, tmp_path: Path) -> None:
    """Quantised weights do not show the number, so that it is looked for before."""
    folder = tmp_path / "nan"
    shutil.copytree(target, folder)
    file = spoil(folder, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(LoadError, match="holds NaN or inf: copy the file again") as caught:
        ft.load(folder, None, dtype="float32", quantize=quantize, inflate=inflate)
    assert f"model.layers.1.mlp.up_proj.weight in {file}" in str(caught.value) and "\n" not in str(caught.value)
