"""PARD's folders: told by the mask token, copied whole, checked by what they accept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_nets import VOCAB, drafts, save_target

import foretoken
from engine.tiny_tokenizer import tokenizer
from foretoken.lab.acceptance import AcceptanceCheck
from foretoken.methods.drafters.model import ModelDrafter
from foretoken.methods.drafters.pard import PardDrafter
from foretoken.training.formats import export_drafter, import_drafter


def with_mask(folder: Path, source: Path, **fields: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.fixture
def pard(tmp_path: Path, target: Path) -> Path:
    wide = save_target(tmp_path / "wide", vocab_size=VOCAB + 8)
    return with_mask(tmp_path / "pard", wide, pard_token=VOCAB + 7)


def test_a_model_with_a_mask_drafts_in_parallel(pard: Path, target: Path) -> None:
    llm = foretoken.load(target, drafter=f"model:{pard},k=3")
    assert isinstance(llm.drafter, PardDrafter)
    assert (llm.drafter.max_depth, llm.drafter.mask) == (3, VOCAB + 7)
    assert isinstance(foretoken.load(target, drafter=f"model:{pard},parallel=false").drafter, ModelDrafter)
    assert drafts(target, f"model:{pard},k=3") == drafts(target, f"pard:{pard},k=3")


def test_a_tree_of_levels_is_refused(pard: Path, target: Path) -> None:
    with pytest.raises(ValueError, match="predicts all positions in one pass: give parallel=false with tree="):
        foretoken.load(target, drafter=f"model:{pard},tree=2x2")
    assert isinstance(foretoken.load(target, drafter=f"model:{pard},tree=2x2,parallel=false").drafter, ModelDrafter)


def test_distinct_masks_have_no_place_in_the_layout(target: Path, tmp_path: Path) -> None:
    wide = save_target(tmp_path / "wide", vocab_size=VOCAB + 8)
    distinct = with_mask(tmp_path / "distinct", wide, pard_token=VOCAB + 1, pard_tokens=7)
    with pytest.raises(ValueError, match=r"has distinct masks \(pard_tokens\), and this layout has one"):
        export_drafter(f"pard:{distinct}", tmp_path / "out", target=target)


def test_there_and_back(pard: Path, target: Path, tmp_path: Path) -> None:
    report = export_drafter(f"pard:{pard}", tmp_path / "theirs", target=target, engine="vllm")
    assert report["method"] == "pard"
    assert report["ready"] == (
        f'--speculative-config \'{{"method": "draft_model", "model": "{tmp_path / "theirs"}", '
        '"num_speculative_tokens": 8, "parallel_drafting": true}\''
    )
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert (read["method"], read["drafter"]) == ("pard", f"pard:{tmp_path / 'back'}")
    assert drafts(target, f"pard:{pard},k=4") == drafts(target, f"{read['drafter']},k=4")


def test_pard_2_is_said_to_go_without_the_targets_states(pard: Path, target: Path, tmp_path: Path) -> None:
    checkpoint = with_mask(tmp_path / "theirs", pard, pard2=True, pard2_scale=0.02)
    (checkpoint / "warp_model.bin").write_bytes(b"pickle")
    report = import_drafter(checkpoint, tmp_path / "back", target)
    assert any("warp_model.bin) is pickled, and is left out" in warning for warning in report["warnings"])
    assert "warp_model.bin" not in report["files"]


def test_what_is_refused(pard: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a draft model without a pard_token: export it as model:"):
        export_drafter(f"pard:{target}", tmp_path / "out", target=target)
    for mask in (VOCAB + 8, -1, "7", True):
        bad = with_mask(tmp_path / f"bad{mask}", pard, pard_token=mask)
        with pytest.raises(ValueError, match=rf"pard_token must be one of the model's {VOCAB + 8} tokens"):
            import_drafter(bad, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="its configuration has no pard_token; give mask=ID"):
        foretoken.load(target, drafter=f"pard:{target}")


def test_its_acceptance_is_checked(tmp_path: Path) -> None:
    """A draft model that is the target itself but for its masks: the next token is always right, the rest are not."""
    size = len(tokenizer())
    target = save_target(tmp_path / "target", vocab_size=size)
    tokenizer().save_pretrained(target)
    pard = with_mask(tmp_path / "pard", target, pard_token=0)
    report = import_drafter(pard, tmp_path / "out", target, check=AcceptanceCheck(2.0))
    by_position = report["acceptance"]["by_position"]
    assert len(by_position) == 8 and by_position[0] > 0.95 and by_position[1] < 0.9
    with pytest.raises(ValueError, match=r"of the expected 6: likely causes are another target"):
        import_drafter(pard, tmp_path / "again", target, check=AcceptanceCheck(6.0))
    assert not (tmp_path / "again").exists()


def with_states(folder: Path, place: Path) -> None:
    """A projection of two of the target's states, in a file."""
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    weight = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(0))
    place.parent.mkdir(exist_ok=True)
    save_file({"target_proj.weight": weight}, place)


@pytest.mark.parametrize("place", ["warp_model.safetensors", "../pard_warp_model/model.safetensors"])
def test_pard_2_comes_with_its_projection(pard: Path, target: Path, tmp_path: Path, place: str) -> None:
    """From beside the model, or from where its training writes it; the text stays the target's."""
    checkpoint = with_mask(tmp_path / "theirs", pard, pard2=True, pard2_scale=3.0, pard2_target_layers=[-1, 1])
    with_states(checkpoint, checkpoint / place)
    report = import_drafter(checkpoint, tmp_path / "back", target)
    assert not any("pickled" in warning for warning in report["warnings"])
    assert "warp_model.safetensors" in report["files"]
    llm = foretoken.load(target, drafter=f"{report['drafter']},k=3")
    assert isinstance(llm.drafter, PardDrafter) and llm.drafter.taps == ("last", "layer:1")
    assert isinstance(foretoken.load(target, drafter=f"model:{tmp_path / 'back'}").drafter, PardDrafter)
    without = foretoken.load(target, drafter=f"{report['drafter']},k=3,taps=false")
    plain = foretoken.load(target, drafter=None)
    texts = [model.generate([1, 2, 3], max_new_tokens=12).token_ids for model in (llm, without, plain)]
    assert texts[0] == texts[1] == texts[2]
    assert drafts(target, f"{report['drafter']},k=3") != drafts(target, f"{report['drafter']},k=3,taps=false")


def test_pard_2_of_another_target_is_refused(pard: Path, target: Path, tmp_path: Path) -> None:
    checkpoint = with_mask(tmp_path / "theirs", pard, pard2=True, pard2_target_layers=[-1, 1, 0])
    with_states(checkpoint, checkpoint / "warp_model.safetensors")
    with pytest.raises(ValueError, match="it was trained for another target; taps=false drafts without them"):
        foretoken.load(target, drafter=f"pard:{checkpoint}")
