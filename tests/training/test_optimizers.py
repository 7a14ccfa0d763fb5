"""What a training changes, with which optimizer and in which precision: as asked, and the same after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretoken.cli.main import main
from foretoken.training import lm
from foretoken.training.config import LmConfig, TrainConfig
from foretoken.training.lm import train_lm
from foretoken.training.loop import Progress
from foretoken.training.optimizers import autocast

SHAPE: dict[str, Any] = {
    "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48, "context": 48, "vocab": 300, "batch_size": 2,
    "lr": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"one two three four five {i % 7} six seven eight nine ten\n" * 6 + str(i)} for i in range(120)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture(scope="module")
def start(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start") / "start"
    train_lm([data], out, LmConfig(**SHAPE, steps=4, optimizer="adamw", precision="float32"))
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_card_names_what_is_not_usual(data: Path, start: Path, tmp_path: Path) -> None:
    shape = [word for key, value in SHAPE.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    own = ["--decay", "0.5", "--optimizer", "adamw", "--precision", "float32"]
    command = ["train", "lm", "--data", str(data), "--out", str(tmp_path / "out"), "--init-from", str(start)]
    assert main([*command, "--steps", "3", *shape, *own]) == 0
    before, after = weights(start), weights(tmp_path / "out")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    card = (tmp_path / "out/README.md").read_text()
    assert all(f"{option} {value}" in card for option, value in zip(own[::2], own[1::2], strict=True))
    assert "| optimizer | adamw |" in card


def test_a_run_that_is_resumed_ends_with_the_same_bits(data: Path, start: Path, tmp_path: Path) -> None:
    config = LmConfig(**SHAPE, steps=4, optimizer="adamw", precision="float32")

    def stop(progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_lm([data], tmp_path / "cut", config, init_from=start, save_every=2, on_step=stop)
    for name in ("cut", "whole"):
        train_lm([data], tmp_path / name, config, init_from=start, save_every=2)
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    with pytest.raises(ValueError, match=r"other settings \(run.optimizer=adamw, now muon\)"):
        train_lm([data], tmp_path / "cut", LmConfig(**{**vars(config), "optimizer": "muon"}), init_from=start)


def test_optimizers_and_precisions() -> None:
    for kind, classes in (("muon", [torch.optim.Muon, torch.optim.AdamW]), ("adamw", [torch.optim.AdamW] * 2)):
        config = LmConfig(**SHAPE, optimizer=kind)
        assert [type(o) for o in lm.make_optimizers(lm.build_model(config, 0), config)] == classes
    for precision, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        with autocast("cpu", precision):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


@pytest.mark.parametrize("kind", [LmConfig, TrainConfig])
def test_unknown_choices(kind: Any) -> None:
    with pytest.raises(ValueError, match="optimizer must be one of muon, adamw, not 'sgd'"):
        kind(optimizer="sgd")
    with pytest.raises(ValueError, match="precision must be one of bfloat16, float32, not 'int8'"):
        kind(precision="int8")
