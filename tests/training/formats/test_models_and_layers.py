"""Draft models as folders, and lists of layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_nets import LAYERS, PROMPT, VOCAB, drafts, save_target
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import foretoken
from foretoken.loading import ZOO
from foretoken.training.formats import export_drafter, import_drafter

BUILTIN = pytest.mark.skipif(not (ZOO / "draft" / "model.safetensors").exists(), reason="no built-in models")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# -- draft models ----------------------------------------------------------------------------------------------------


def test_a_model_there_and_back(target: Path, other_target: Path, tmp_path: Path) -> None:
    report = export_drafter(f"model:{other_target}", tmp_path / "theirs", target=target)
    assert report["format"] == "plain" and report["warnings"] == []
    files = contents(tmp_path / "theirs")
    assert all(files[name] == content for name, content in contents(other_target).items())
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert (read["method"], read["drafter"]) == ("model", f"model:{tmp_path / 'back'}")
    assert contents(tmp_path / "back") == files
    assert drafts(target, f"model:{other_target},k=4") == drafts(target, f"{read['drafter']},k=4")
    assert drafts(target, read["drafter"])[1]


@BUILTIN
def test_the_builtin_draft_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    report = export_drafter("model", tmp_path / "draft", engine="vllm")
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(report["files"])
    assert not {"training.json", "losses.csv", "README.md"} & set(report["files"])
    assert report["ready"] == (
        f'--speculative-config \'{{"method": "draft_model", "model": "{tmp_path / "draft"}", '
        '"num_speculative_tokens": 5}\''
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    ids = tokenizer("def fib(n):", return_tensors="pt")["input_ids"]
    got = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    llm = foretoken.load(tmp_path / "draft", drafter=None, dtype="float32")
    assert llm.generate("def fib(n):", max_new_tokens=8).token_ids == got


@BUILTIN
def test_the_targets_tokenizer_is_written_where_there_is_none(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(ZOO / "draft" / name, bare)
    report = export_drafter(f"model:{bare}", tmp_path / "theirs")
    assert report["warnings"] == ["the draft model has no tokenizer: the target's was written beside it"]
    expected, tokenizer = (AutoTokenizer.from_pretrained(path) for path in (ZOO / "target", tmp_path / "theirs"))
    assert expected.get_vocab() == tokenizer.get_vocab()


def test_a_padded_vocabulary_is_said(target: Path, tmp_path: Path) -> None:
    wide = save_target(tmp_path / "wide", vocab_size=VOCAB + 8)
    (warning,) = export_drafter(f"model:{wide}", tmp_path / "theirs", target=target)["warnings"]
    assert f"{VOCAB + 8} logits and the target {VOCAB}" in warning


def test_models_that_are_refused(target: Path, tmp_path: Path) -> None:
    for spec, words in (
        ("model", "give the draft model to export"),
        (f"model:{tmp_path / 'none'}", "not a folder with a model"),
        (f"model:{target},k=4", "options of a draft model are not exported: leave out k"),
    ):
        with pytest.raises(ValueError, match=words):
            export_drafter(spec, tmp_path / "theirs", target=target)
    foreign = save_target(tmp_path / "foreign", vocab_size=VOCAB * 20)
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        export_drafter(f"model:{foreign}", tmp_path / "theirs", target=target)
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        import_drafter(foreign, tmp_path / "theirs", target)
    assert not (tmp_path / "theirs").exists()


# -- layers ----------------------------------------------------------------------------------------------------------


def test_an_exit_layer_there_and_back(target: Path, tmp_path: Path) -> None:
    report = export_drafter("early_exit,layer=2", tmp_path / "theirs", target=target, engine="huggingface")
    assert report["files"] == ["early_exit.json", "generation_config.json"]
    content = json.loads((tmp_path / "theirs" / "early_exit.json").read_text())
    assert (content["format"], content["layer"], content["layers"]) == ("foretoken early exit", 2, LAYERS)
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert read["drafter"] == "early_exit,layer=2"
    assert json.loads((tmp_path / "back" / "early_exit.json").read_text()) == content


def test_transformers_takes_the_exit_layer(target: Path, tmp_path: Path) -> None:
    """The ready line, run: greedy output is the target's own, and fewer layers really drafted."""
    report = export_drafter("early_exit,layer=2", tmp_path / "exit", target=target, engine="huggingface")
    assert "GenerationConfig.from_pretrained" in report["ready"] and str(tmp_path / "exit") in report["ready"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    config = GenerationConfig.from_pretrained(tmp_path / "exit")
    assert config.assistant_early_exit == 2
    ids = torch.tensor([PROMPT])
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    config.max_new_tokens = 16
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    handles = [model.model.layers[i].register_forward_hook(counted) for i in (0,)]
    last = []
    handles.append(model.model.layers[-1].register_forward_hook(lambda *_: last.append(1)))
    assert torch.equal(model.generate(ids, generation_config=config), plain)
    assert count > len(last) > 0
    for handle in handles:
        handle.remove()


def test_an_exit_layer_that_others_wrote(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "generation_config.json").write_text('{"assistant_early_exit": 3}')
    assert import_drafter(source, tmp_path / "one", target)["drafter"] == "early_exit,layer=3"
    read = import_drafter(source / "generation_config.json", tmp_path / "two", target)
    assert read["drafter"] == "early_exit,layer=3"
    for text, words in (("4", "exit layer from 1 to 3"), ('"two"', "has no exit layer")):
        (source / "generation_config.json").write_text(f'{{"assistant_early_exit": {text}}}')
        with pytest.raises(ValueError, match=words):
            import_drafter(source, tmp_path / "three", target)


def test_exit_layers_that_are_refused(target: Path, other_target: Path, tmp_path: Path) -> None:
    for spec, words in (
        ("early_exit:somewhere", "takes no path"),
        ("early_exit,layer=4", "exit layer from 1 to 3"),
        ("early_exit,depth=4", "unknown option 'depth'"),
    ):
        with pytest.raises(ValueError, match=words):
            export_drafter(spec, tmp_path / "out", target=target)
    export_drafter("early_exit,layer=1", tmp_path / "theirs", target=target)
    with pytest.raises(ValueError, match="made for another target"):
        import_drafter(tmp_path / "theirs", tmp_path / "out", other_target)


def test_skipped_layers_there_and_back(target: Path, tmp_path: Path) -> None:
    spec = "layer_skip,attention=1+2,mlp=2"
    assert export_drafter(spec, tmp_path / "theirs", target=target)["files"] == ["layer_skip.json"]
    content = json.loads((tmp_path / "theirs" / "layer_skip.json").read_text())
    assert (content["attention"], content["mlp"]) == ([1, 2], [2])
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert read["drafter"] == f"layer_skip:{tmp_path / 'back' / 'layer_skip.json'}"
    assert json.loads((tmp_path / "back" / "layer_skip.json").read_text()) == content
    assert drafts(target, spec) == drafts(target, read["drafter"])
    file = import_drafter(tmp_path / "back" / "layer_skip.json", tmp_path / "again", target)
    assert file["drafter"].endswith("again/layer_skip.json")
    out = tmp_path / "from_file"
    export_drafter(f"layer_skip:{tmp_path / 'back' / 'layer_skip.json'}", out, target=target)
    assert json.loads((out / "layer_skip.json").read_text()) == content


def test_skipped_layers_of_another_target(target: Path, other_target: Path, tmp_path: Path) -> None:
    export_drafter("layer_skip,attention=1", tmp_path / "theirs", target=target)
    with pytest.raises(ValueError, match="made for another target"):
        import_drafter(tmp_path / "theirs", tmp_path / "out", other_target)
    (tmp_path / "theirs" / "layer_skip.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        import_drafter(tmp_path / "theirs", tmp_path / "out", target)
