"""A drafter that is given where a model is wanted, and a model that is given as a drafter: one line says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import hub_folder
from safetensors.torch import save_file
from test_mtp_speculators import save_trained
from tiny_nets import SIZE, save_net

import foretoken as ft
from foretoken.cli.main import main
from foretoken.core.io.drafter_folders import IMPORTED, drafter_kind, is_whole_model, not_a_model
from foretoken.loading import LoadError
from foretoken.registry import find
from foretoken.training.formats import export_drafter, import_drafter
from foretoken.training.formats.catalogue import LAYOUTS
from native_checkpoints import save_target as save_native

LAYOUTS_OF_DRAFTERS = [
    (layout.method, layout.name)
    for layout in LAYOUTS
    if find("drafter", layout.method).needs_training and layout.name not in ("native", "peft")
]
"""Without the target's own checkpoint, and PEFT's adapters, which can also be those of a whole model."""


def drafter_and_target(method: str, folder: Path, target: Path) -> tuple[Path, Path]:
    """A drafter in a folder of ours, and its target."""
    if method != "mtp":
        return save_net(method, folder / "mine", target), target
    save_native(folder / "target", "qwen3_5_text")
    return save_trained(folder / "mine", folder / "target", layer="target", feed="post_norm"), folder / "target"


@pytest.mark.parametrize(("method", "layout"), LAYOUTS_OF_DRAFTERS)
def test_a_drafter_of_another_project_as_model(method: str, layout: str, target: Path, tmp_path: Path) -> None:
    drafter, model = drafter_and_target(method, tmp_path, target)
    checkpoint = tmp_path / "theirs"
    export_drafter(f"{method}:{drafter}", checkpoint, layout, model)
    (checkpoint / "foretoken.json").unlink()
    words = (
        rf"{checkpoint} is a drafter \({method}\) for .*, not a model: import it, "
        rf"`foretoken import MODEL {checkpoint} --out"
    )
    with pytest.raises(LoadError, match=words) as caught:
        ft.load(str(checkpoint), None)
    assert str(caught.value).endswith(f"give it with --drafter {method}:OUT") and "\n" not in str(caught.value)
    with pytest.raises(LoadError, match=words):
        ft.load(str(target), f"model:{checkpoint}")
    import_drafter(checkpoint, tmp_path / "back", model)  # as the line says
    assert drafter_kind(tmp_path / "back") == method


@pytest.mark.parametrize("method", IMPORTED)
def test_a_drafter_of_ours_as_model(method: str, target: Path, tmp_path: Path) -> None:
    drafter, _ = drafter_and_target(method, tmp_path, target)
    with pytest.raises(
        LoadError, match=rf"is a drafter \({method}\) for a model of \d layers and hidden size"
    ) as caught:
        ft.load(str(drafter), None)
    assert str(caught.value).endswith(f"not a model: give it with --drafter {method}:{drafter}")


@pytest.mark.parametrize("method", IMPORTED)
def test_a_model_as_drafter(method: str, target: Path) -> None:
    words = (
        rf"{target} is a whole model, not a drafter of the method {method}: give it as MODEL, or with --drafter model:"
    )
    with pytest.raises(ValueError, match=words) as caught:
        ft.load(str(target), f"{method}:{target}")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="in no layout that can be imported as dflash"):
        import_drafter(target, target.parent / "none", target, "dflash")


@pytest.mark.parametrize(
    "arguments", [("generate", "{}", "Once"), ("serve", "{}"), ("generate", "Once", "--target", "{}"), ("chat", "{}"),
                  ("import", "{}", "{}", "--out", "never")]
)  # fmt: skip
def test_the_commands(arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder as it is on the hub, which says ``qwen3``."""
    hub = hub_folder(tmp_path / "hub")
    assert main([part.format(hub) for part in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(
        f"error: {hub} is a drafter (dflash) for a model of 4 layers and hidden size {SIZE}, not a model"
    )


def pickled(name: str, **config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.save({}, folder / name)
        (folder / "config.json").write_text(json.dumps(config))

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (pickled("medusa_lm_head.pt", medusa_num_heads=3, base_model_name_or_path="lmsys/vicuna"),
         r"a drafter \(medusa\) for lmsys/vicuna, not a model"),
        (pickled("pytorch_model.bin", architectures=["LlamaForCausalLMEagle3"], hidden_size=64),
         r"a drafter \(eagle3\) for a model of hidden size 64"),
        (pickled("pytorch_model.bin", architectures=["Qwen3Model"], dflash_config={}), r"a drafter \(dflash\), not"),
        (pickled("pytorch_model.bin", speculators_model_type="mlp",
                 speculators_config={"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}),
         r"a drafter \(mlp\) for Qwen/Qwen3-8B, not a model: drafters of this kind cannot be imported"),
        (pickled("pytorch_model.bin", architectures=["LlamaForCausalLM"]), "pickled weights only"),
        (lambda folder: (folder / "drafter.json").write_text("{"),
         r"is a drafter with a damaged drafter\.json, not a model: copy the folder again$"),
    ],
)  # fmt: skip
def test_what_no_tensor_tells(write: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(LoadError, match=words) as caught:
        ft.load(str(tmp_path), None)
    assert "\n" not in str(caught.value)


def test_models_are_models(target: Path, tmp_path: Path) -> None:
    assert is_whole_model(target) and not_a_model(target) is None
    save_native(tmp_path / "native", "qwen3_5_text")
    assert is_whole_model(tmp_path / "native")
    assert not is_whole_model(tmp_path) and drafter_kind(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert drafter_kind(tmp_path) is None


def test_a_parallel_head_is_none_of_eagle3(tmp_path: Path) -> None:
    names = ("fc.weight", "layers.0.hidden_norm.weight", "mask_hidden")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert drafter_kind(tmp_path) == "peagle"


def test_a_drafter_in_a_subfolder(target: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    hub_folder(tmp_path / "whole" / "dflash")
    with pytest.raises(ValueError, match=r"its subfolder dflash holds a drafter: import .*/whole/dflash"):
        import_drafter(tmp_path / "whole", tmp_path / "out", target)


def test_a_drafter_beside_a_model(target: Path, tmp_path: Path) -> None:
    """A root with a whole model is imported as that, and its subfolder is named."""
    root = tmp_path / "whole"
    shutil.copytree(target, root)
    assert import_drafter(root, tmp_path / "alone", target)["warnings"] == []
    hub_folder(root / "dflash")
    warnings = import_drafter(root, tmp_path / "out", target)["warnings"]
    assert f"its subfolder dflash holds a drafter: import {root / 'dflash'} for that" in warnings


@pytest.mark.parametrize(("method", "config"), [("eagle3", {"layers": "last"}), ("uno", {})])
def test_drafters_without_fused_states(method: str, config: dict[str, Any], target: Path, tmp_path: Path) -> None:
    """One reads the last state and has no ``fc``, the other is an adapter."""
    drafter = save_net(method, tmp_path / "mine", target, **config)
    checkpoint = tmp_path / "whole" / "inner"
    export_drafter(f"{method}:{drafter}", checkpoint, None, target)
    (checkpoint / "foretoken.json").unlink()
    with pytest.raises(ValueError, match=r"its subfolder inner holds a drafter: import .*/whole/inner"):
        import_drafter(tmp_path / "whole", tmp_path / "out", target)
    if method == "eagle3":
        with pytest.raises(LoadError, match=r"is a drafter \(eagle3\) for a model of hidden size"):
            ft.load(str(target), f"model:{checkpoint}")
