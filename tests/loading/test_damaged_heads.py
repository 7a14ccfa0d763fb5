"""Heads that are damaged, incomplete or of another target: one line with the cause, imported or used as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken as ft
from foretoken.training.formats import export_drafter, import_drafter
from training.formats.tiny_nets import save_net, save_target

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("heads") / "target")


def weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def edited(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(weights(folder))
        edit(tensors)
        save_file(tensors, weights(folder), {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes()[:-500])


def described(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        description = json.loads((folder / "drafter.json").read_text())
        description["config"].update(changes)
        (folder / "drafter.json").write_text(json.dumps(description))

    return damage


def as_int8(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)


def as_fp8(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)


OUTSIDE = "the draft vocabulary names tokens outside the target's vocabulary of 96"
EIGHT_BITS: list[tuple[Damage, str]] = [
    (edited(as_int8), "fc.weight in .* is stored as int8, and only unquantised weights are supported"),
    (edited(as_fp8), "fc.weight in .* is stored as float8_e4m3fn"),
]


UNSCALED = r"quantised with 8-bit weights without scales \(fc.weight\): take the unquantised checkpoint"


@pytest.mark.parametrize("format", ["plain", "speculators"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json: copy it"),
        (lambda folder: weights(folder).unlink(), r"holds no \*.safetensors weights: the checkpoint is incomplete"),
        (cut, "damaged or half-written: copy it again"),
        (edited(as_int8), UNSCALED),
        (edited(as_fp8), UNSCALED),
    ],
)
def test_imported(damage: Damage, words: str, format: str, target: Path, tmp_path: Path) -> None:
    export_drafter(f"eagle3:{save_net('eagle3', tmp_path / 'mine', target)}", tmp_path / "theirs", format, target)
    (tmp_path / "theirs" / "foretoken.json").unlink()
    damage(tmp_path / "theirs")
    with pytest.raises(ValueError, match=words) as caught:
        import_drafter(tmp_path / "theirs", tmp_path / "out", target)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edited(lambda tensors: tensors["d2t"].__setitem__(29, 5000)), OUTSIDE),
        (edited(lambda tensors: tensors["d2t"].__setitem__(0, -50)), OUTSIDE),
        (described(hidden_size="many"), r"drafter.json does not describe a valid drafter, copy it again"),
        (described(unheard_of=1), r"drafter.json does not describe a valid drafter, copy it again: .*unheard_of"),
        (described(draft_vocab=-3), "drafter.json does not describe a valid drafter"),
        (cut, "damaged or half-written: copy the folder again"),
        *EIGHT_BITS,
    ],
)
def test_used(damage: Damage, words: str, target: Path, tmp_path: Path) -> None:
    head = save_net("eagle3", tmp_path / "head", target)
    assert ft.load(target, f"eagle3:{head}", dtype="float32").generate([1, 2], max_new_tokens=3).token_ids
    damage(head)
    with pytest.raises(ValueError, match=words) as caught:
        ft.load(target, f"eagle3:{head}", dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
@pytest.mark.parametrize("measured", [[1], "much", None])
def test_measurements_that_are_none(method: str, measured: Any, target: Path, tmp_path: Path) -> None:
    head = save_net(method, tmp_path / "head", target)
    file = head / "drafter.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "measured": measured}))
    with pytest.raises(ValueError, match=r"drafter.json is damaged: copy the folder again"):
        ft.load(target, f"{method}:{head}", dtype="float32")


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_descriptions_of_other_methods(method: str, target: Path, tmp_path: Path) -> None:
    head = save_net(method, tmp_path / "head", target)
    described(hidden_size="many")(head)
    with pytest.raises(ValueError, match=r"drafter.json does not describe a valid drafter, copy it again"):
        ft.load(target, f"{method}:{head}", dtype="float32")
