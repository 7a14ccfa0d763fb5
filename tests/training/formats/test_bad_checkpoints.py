"""What is wrong with a checkpoint is said in one sentence, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_nets import FFN, SIZE, VOCAB, save_net, save_target

from foretoken.training.formats import export_drafter, import_drafter

Tensors = dict[str, torch.Tensor]


def refused(source: Path, target: Path, words: str, method: str = "auto") -> None:
    out = source.parent / "refused"
    with pytest.raises(ValueError, match=words) as caught:
        import_drafter(source, out, target, method)
    assert "\n" not in str(caught.value)
    assert not out.exists() and not list(source.parent.glob(".refused*"))


def checkpoint(method: str, format: str, target: Path, folder: Path, **config: Any) -> Path:
    drafter = save_net(method, folder / "mine", target, **config)
    export_drafter(f"{method}:{drafter}", folder / "theirs", format, target)
    return folder / "theirs"


def change(folder: Path, edit: Callable[[Tensors], Any] | None = None, **config: Any) -> None:
    """Edit tensors in place, and keys of config.json (``None`` removes one)."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    if edit is not None:
        edit(tensors)
        save_file(tensors, file)
    fields = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


LAYOUTS = [
    ("eagle3", "plain", "midlayer.mlp.up_proj.weight"),
    ("eagle3", "speculators", "layers.0.input_layernorm.weight"),
    ("eagle", "plain", "layers.0.self_attn.k_proj.weight"),
    ("eagle", "vllm", "layers.0.self_attn.k_proj.weight"),
    ("medusa", "vllm", "blocks.1.layers.0.weight"),
    ("medusa", "original", "1.0.linear.weight"),
    ("dflash", "plain", "layers.1.self_attn.k_norm.weight"),
    ("dflash", "speculators", "layers.0.input_layernorm.weight"),
    ("dflash2", "plain", "candidate_selector.successor_codebook"),
    ("dspark", "speculators", "markov_head.markov_w2.weight"),
]


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight"])
def test_what_eagle3_is_recognised_by_may_not_be_what_it_lacks(name: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3", "plain", target, tmp_path)
    (file,) = source.glob("*.safetensors")
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)
    refused(source, target, f"lacks the tensor {name}")


@pytest.mark.parametrize(("method", "format", "name"), LAYOUTS)
def test_tensors(method: str, format: str, name: str, target: Path, tmp_path: Path) -> None:
    """Missing, superfluous, misshapen: by the name that the file has."""
    source = checkpoint(method, format, target, tmp_path)
    (file,) = source.glob("*.safetensors")
    whole = load_file(file)
    save_file({key: value for key, value in whole.items() if key != name}, file)
    refused(source, target, f"lacks the tensor {name}")
    save_file({**whole, "more.weight": torch.zeros(2)}, file)
    refused(source, target, "more.weight that this network does not have")
    save_file({**whole, name: torch.zeros(3, 7, dtype=torch.bfloat16)}, file)
    refused(source, target, f"{name} is \\[3, 7\\] and must be|lacks the tensor {name}")


@pytest.mark.parametrize(("method", "format", "_name"), LAYOUTS)
def test_another_target(method: str, format: str, _name: str, target: Path, other_target: Path, tmp_path: Path) -> None:
    source = checkpoint(method, format, target, tmp_path)
    refused(source, other_target, "another target: the shapes agree, but the weights differ")
    (source / "foretoken.json").unlink()
    narrow = save_target(tmp_path / "narrow", hidden_size=16)
    refused(source, narrow, f"(for a hidden size|target of hidden size) .*{SIZE}.*16")
    refused(source, save_target(tmp_path / "words", vocab_size=4 * VOCAB), f"vocabulary of {VOCAB}, .* {4 * VOCAB}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"fc_norm": True}, "lacks the tensor fc_norm.0.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, "lacks the tensor input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "two norms in one place: set one of them"),
        ({"norm_output": "yes"}, "norm_output in config.json must be true or false, not 'yes'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "a tensor fc.weight that this network does not have"),
        ({"eagle_config": {"use_aux_hidden_state": False, "fc_norm": True}}, "layers=last has no fc"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            "fuses the layers .1, 2, 9., and the target has depths 0 to 4",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight reads 96 numbers, and 2 layers have 32 each"),
        ({"num_hidden_layers": 2}, "has tensors of 1 layers, and config.json says 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "of the type 'llama3' cannot have these parameters"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 8.0}}, "of the type 'spiral', which is not supported"),
        ({"attention_bias": True}, "lacks the tensor midlayer.self_attn.q_proj.bias"),
        ({"mlp_bias": True}, "lacks the tensor midlayer.mlp.gate_proj.bias"),
        ({"intermediate_size": FFN + 8}, r"must be \[56, 32\] for this target and config.json"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"num_attention_heads": "four"}, "'four', which is not a number"),
        ({"target_hidden_size": 48}, "target of hidden size 48"),
        ({"draft_vocab_size": 31}, r"d2t is \[30\] and must be \[31\]"),
    ],
)
def test_configurations_of_eagle3(keys: dict[str, Any], words: str, target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3", "plain", target, tmp_path)
    change(source, None, **keys)
    refused(source, target, words)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "peagle"])
def test_a_window_that_is_switched_off(method: str, target: Path, tmp_path: Path) -> None:
    """SpecForge's configurations repeat the target's ``sliding_window`` beside ``use_sliding_window: false``."""
    source = checkpoint(method, "plain", target, tmp_path)
    change(source, None, sliding_window=131072, use_sliding_window=False)
    assert import_drafter(source, tmp_path / "ours", target)["method"] == method
    change(source, None, use_sliding_window=True)
    refused(source, target, "sliding_window = 131072")


def test_vocabulary_maps(target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3", "plain", target, tmp_path)
    (file,) = source.glob("*.safetensors")
    whole = load_file(file)
    for place, value, words in ((29, VOCAB, "outside the target's vocabulary"), (0, -1, "outside"), (1, 2, "twice")):
        offsets = whole["d2t"].clone()
        offsets[place] = value if words != "twice" else offsets[0] - 1
        save_file({**whole, "d2t": offsets}, file)
        refused(source, target, words)
    save_file({**whole, "d2t": whole["d2t"] + torch.arange(30)}, file)  # ids instead of offsets
    refused(source, target, "it holds offsets")
    save_file({key: value for key, value in whole.items() if key != "d2t"}, file)
    refused(source, target, "lacks the tensor d2t, the ids of its 30 draft tokens")


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_maps_that_name_other_tokens(method: str, target: Path, tmp_path: Path) -> None:
    """Low ids in place of offsets are a valid map, but for other tokens than ``t2d`` has."""
    source = checkpoint(method, "plain", target, tmp_path, draft_vocab=20)
    ids = torch.arange(1, 41, 2)
    has = torch.zeros(VOCAB, dtype=torch.bool)
    has[ids] = True
    change(source, lambda tensors: tensors.update(d2t=ids, t2d=has))
    refused(source, target, r"d2t and t2d name other tokens: d2t holds offsets")
    change(source, lambda tensors: tensors.update(d2t=ids - torch.arange(20), t2d=has.to(torch.uint8)))
    import_drafter(source, tmp_path / "ours", target)
    change(source, lambda tensors: tensors.update(t2d=torch.zeros(VOCAB, dtype=torch.bool)))  # never filled
    import_drafter(source, tmp_path / "again", target)
    change(source, lambda tensors: tensors.update(d2t=(ids - torch.arange(20)) + 0.6, t2d=has))
    refused(source, target, "d2t holds torch.float32 and must hold whole numbers")


def test_tables_of_another_target(target: Path, other_target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle", "plain", target, tmp_path)
    strange = load_file(other_target / "model.safetensors")
    for name, theirs_ in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        (file,) = source.glob("*.safetensors")
        whole = load_file(file)
        save_file({**whole, name: strange[theirs_]}, file)
        refused(source, target, f"{name} is not the target's")
        save_file(whole, file)


def test_truncated_medusa(target: Path, tmp_path: Path) -> None:
    source = checkpoint("medusa", "vllm", target, tmp_path)
    change(source, None, truncated_vocab_size=40)
    refused(source, target, "lacks the tensor token_map for its 40 tokens")
    for bad in (torch.arange(39), torch.arange(57, 97), torch.zeros(40, dtype=torch.int64), torch.arange(40.0)):
        change(source, lambda tensors, bad=bad: tensors.update(token_map=bad))
        refused(source, target, r"token_map must be 40 \(truncated_vocab_size\) different token ids below 96")


def test_speculators(target: Path, tmp_path: Path) -> None:
    source = checkpoint("eagle3", "speculators", target, tmp_path)
    change(source, None, norm_before_residual=None)
    refused(source, target, "lacks norm_before_residual")
    change(source, None, norm_before_residual=False, transformer_layer_config=[])
    refused(source, target, "lacks transformer_layer_config")
    change(source, None, speculators_model_type="mlp")
    refused(source, target, "of the type 'mlp': eagle3, peagle, mtp, dflash.* can be imported")


def test_files(target: Path, tmp_path: Path) -> None:
    source = checkpoint("medusa", "original", target, tmp_path)
    (file,) = source.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(source, target, "damaged or half-written")
    file.write_bytes(whole)
    (source / "config.json").write_text("{")
    refused(source, target, "config.json is damaged")
    (source / "config.json").write_text("[]")
    refused(source, target, "must hold a JSON object")
    (source / "config.json").write_text("{}")
    (source / "foretoken.json").write_text('{"method": "medusa"}')
    refused(source, target, "foretoken.json is damaged")


@pytest.mark.parametrize("accuracies", ["x", [0.5], [["x"]], [[]], {"a": 1}, [[None]], 3])
def test_damaged_measurements(accuracies: Any, target: Path, tmp_path: Path) -> None:
    source = checkpoint("medusa", "original", target, tmp_path)
    note = json.loads((source / "foretoken.json").read_text())
    (source / "foretoken.json").write_text(json.dumps({**note, "measured": {"accuracies": accuracies}}))
    refused(source, target, "foretoken.json is damaged: copy it again, or remove it")


def test_unknown_layouts(target: Path, tmp_path: Path) -> None:
    refused(tmp_path / "none", target, "no such folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, target, r"\(no config.json\) is in no layout")
    (empty / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    save_file({"x": torch.zeros(1)}, empty / "model.safetensors")
    words = r"\(DFlashDraftModel\) is in no layout .* eagle3, peagle, dflash, .*eagle, medusa, pard, uno, model"
    refused(empty, target, words)
    refused(empty, target, "in no layout that can be imported as medusa", method="medusa")
    refused(empty, target, "no other project supports drafters of the method 'ngram'", method="ngram")
    drafter = save_net("medusa", tmp_path / "mine", target)
    refused(drafter, target, "is a drafter already: use it with --drafter medusa:")
    other = checkpoint("eagle3", "plain", target, tmp_path / "eagle3")
    refused(other / "model.safetensors", target, f"model.safetensors is a file: give its folder, {other}")
    refused(
        other / "config.json", target, f"config.json is no list of layers: give the folder of a checkpoint, {other}"
    )
    import_drafter(other, other / "inner", target)
    refused(other, target, "in no layout that can be imported as medusa", method="medusa")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "m.gguf", target, r"is a GGUF file, which holds a model: use it with --drafter model:.*m\.gguf")


class Trap:
    """What a pickle does when it is loaded."""

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")

    def __init__(self, file: Path) -> None:
        self.file = file


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_pickles_are_never_loaded(name: str, target: Path, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"x": Trap(tmp_path / "sprung")}, source / name)
    refused(source, target, f"pickled weights only \\({name}\\), which can run code when loaded: convert them")
    assert not (tmp_path / "sprung").exists()
