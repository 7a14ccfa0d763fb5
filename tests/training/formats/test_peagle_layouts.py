"""P-EAGLE's layouts: what stands in them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_nets import SIZE, VOCAB, save_net, shapes
from torch import Tensor

from foretoken.core.io.drafter_folders import drafter_kind, not_a_model
from foretoken.loading import load_model
from foretoken.training.formats import export_drafter, import_drafter


def checkpoint(format: str, target: Path, folder: Path, **config: Any) -> Path:
    drafter = save_net("peagle", folder / "mine", target, **config)
    export_drafter(f"peagle:{drafter}", folder / "theirs", format, target)
    return folder / "theirs"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any] | None = None, **config: Any) -> None:
    file, fields = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if edit is not None:
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)
    fields |= config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def test_what_is_written(target: Path, tmp_path: Path) -> None:
    out = checkpoint("plain", target, tmp_path, own_embedding=True)
    sizes, config = shapes(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert sizes["mask_hidden"] == [1, 1, 3 * SIZE] and sizes["embed_tokens.weight"] == [VOCAB, SIZE]
    assert sizes["layers.0.self_attn.q_proj.weight"][1] == 2 * SIZE and "layers.0.hidden_norm.weight" in sizes
    for layer in (1, 2):
        assert sizes[f"layers.{layer}.self_attn.q_proj.weight"][1] == SIZE
        assert sizes[f"layers.{layer}.input_layernorm.weight"] == [SIZE]
    assert config["architectures"] == ["PEagleDraftModel"] and config["num_hidden_layers"] == 3
    assert [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")] == [7, 7, 7]


def test_what_is_written_for_speculators(target: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint("speculators", target, tmp_path, places=6) / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("peagle", ["PEagleSpeculator"])
    assert config["mask_token_id"] == 7 and config["transformer_layer_config"]["num_hidden_layers"] == 3
    assert config["speculators_config"]["algorithm"] == "peagle"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6


def test_the_line_for_vllm(target: Path, tmp_path: Path) -> None:
    drafter = save_net("peagle", tmp_path / "mine", target)
    ready = export_drafter(f"peagle:{drafter}", tmp_path / "out", None, target, "vllm")["ready"]
    assert '"method": "eagle3"' in ready and '"parallel_drafting": true' in ready
    assert '"num_speculative_tokens": 8' in ready


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_trained_places_come_back_and_stand_in_the_line(layout: str, target: Path, tmp_path: Path) -> None:
    drafter = save_net("peagle", tmp_path / "mine", target, places=3)
    out = tmp_path / "out"
    assert '"num_speculative_tokens": 3,' in export_drafter(f"peagle:{drafter}", out, layout, target, "vllm")["ready"]
    import_drafter(out, tmp_path / "back", target)
    assert json.loads((tmp_path / "back" / "drafter.json").read_text())["config"]["places"] == 3


def test_other_numbers_of_places(target: Path, tmp_path: Path) -> None:
    """No number reads as eight; too many are cut with a warning; a text is refused."""
    source = checkpoint("plain", target, tmp_path, places=3)
    for number, (places, read) in enumerate([(None, 8), (65, 64)]):
        change(source, num_speculative_tokens=places)
        warned = import_drafter(source, tmp_path / str(number), target)["warnings"]
        assert json.loads((tmp_path / str(number) / "drafter.json").read_text())["config"]["places"] == read
        assert warned == (["the checkpoint drafts 65 tokens, and this drafter 64 at most"] if places else [])
    change(source, num_speculative_tokens="many")
    with pytest.raises(ValueError, match=r"num_speculative_tokens in config\.json is 'many', which is not a number"):
        import_drafter(source, tmp_path / "no", target)


@pytest.mark.parametrize("shape", [(1, 3 * SIZE), (3 * SIZE,)])
def test_other_shapes_and_names_of_the_same(shape: tuple[int, ...], target: Path, tmp_path: Path) -> None:
    """The learned state may be flat, the wide layer be called ``midlayer``, the mask token stand under another key."""
    source = checkpoint("plain", target, tmp_path)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shape).clone()
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    change(source, edit, mask_token_id=None)
    import_drafter(source, tmp_path / "back", target)
    drafter, back = (load_file(tmp_path / name / "model.safetensors") for name in ("mine", "back"))
    assert drafter.keys() == back.keys() and all(torch.equal(drafter[name], back[name]) for name in drafter)


def test_the_targets_embedding_is_shared_again(target: Path, tmp_path: Path) -> None:
    source = checkpoint("plain", target, tmp_path)
    weight = load_model(target, dtype="bfloat16").model.model.embed_tokens.weight.detach()
    change(source, lambda tensors: tensors.update({"embed_tokens.weight": weight.clone()}))
    import_drafter(source, tmp_path / "back", target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "back" / "model.safetensors")


@pytest.mark.parametrize(
    ("format", "edit", "config", "words"),
    [
        ("speculators", lambda t: t.pop("mask_hidden"), {}, "lacks the tensor mask_hidden"),
        ("speculators", None, {"mask_token_id": None}, "has no mask token: it needs one of mask_token_id"),
        ("plain", None, {"mask_token_id": VOCAB}, f"mask_token must be a token of the target, from 0 to {VOCAB - 1}"),
        ("plain", None, {"mask_token_id": "7"}, "mask_token_id"),
        ("plain", None, {"num_hidden_layers": 4}, "has tensors of 3 layers, and config.json says 4"),
        ("plain", lambda t: t.pop("layers.1.mlp.up_proj.weight"), {}, "lacks the tensor layers.1.mlp.up_proj.weight"),
        ("plain", lambda t: t.update(mask_hidden=torch.zeros(1, 1, SIZE)), {}, "mask_hidden is"),
        (
            "plain",
            lambda t: t.update({"layers.1.self_attn.q_norm.weight": torch.zeros(8)}),
            {},
            "lacks the tensor layers.0.self_attn.q_norm.weight",
        ),
        ("plain", None, {"norm_before_fc": True}, "lacks the tensor input_norm.weight"),
    ],
)
def test_what_is_refused(
    format: str, edit: Any, config: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    source = checkpoint(format, target, tmp_path)
    change(source, edit, **config)
    with pytest.raises(ValueError, match=words):
        import_drafter(source, tmp_path / "back", target)
    assert not (tmp_path / "back").exists()


def test_it_is_told_from_a_model(target: Path, tmp_path: Path) -> None:
    source = checkpoint("plain", target, tmp_path)
    assert drafter_kind(source) == "peagle"
    assert f"import it, `foretoken import MODEL {source}" in str(not_a_model(source))
