"""Low-rank updates on disk: PEFT's layout, merged when loaded; what does not fit is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

import foretoken as ft
from foretoken.cli.main import main
from foretoken.loading import LoadError, load_model, load_tokenizer
from foretoken.loading.adapters import save_adapter
from foretoken.models.forward.parts import TargetParts
from foretoken.models.network.low_rank import linear_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROMPT = [5, 9, 2, 7, 5, 9, 2]


def save_base(folder: Path, **changes: Any) -> Path:
    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


def factors_for(base: Path, rank: int = 4) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    network = LlamaForCausalLM.from_pretrained(base)
    return {
        name: (
            torch.randn(rank, layer.in_features, generator=generator) * 0.3,
            torch.randn(layer.out_features, rank, generator=generator) * 0.3,
        )
        for name, layer in linear_layers(network).items()
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    save_adapter(tmp_path / "adapter", factors_for(base), str(base), torch.float32)
    return tmp_path / "adapter"


def change(folder: Path, **values: Any) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_the_layout_is_pefts(adapter: Path, base: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    assert {key: config[key] for key in ("peft_type", "r", "lora_alpha", "task_type", "bias")} == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(adapter / WEIGHTS)
    assert len(tensors) == 2 * 7 * 3
    assert tensors["base_model.model.model.layers.2.self_attn.k_proj.lora_A.weight"].shape == (4, 32)
    assert tensors["base_model.model.model.layers.2.self_attn.k_proj.lora_B.weight"].shape == (16, 4)
    assert sorted(p.name for p in adapter.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(("more", "scale"), [({}, 1.0), ({"lora_alpha": 6}, 1.5), ({"use_rslora": True}, 2.0)])
def test_an_update_is_merged(adapter: Path, base: Path, more: dict[str, Any], scale: float) -> None:
    change(adapter, **more)
    network = LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, (a, b) in factors_for(base).items():
            network.get_submodule(name).weight += scale * (b @ a)
        expected = network(input_ids=torch.tensor([PROMPT])).logits
    model: Any = load_model(adapter, lean=False)
    with torch.no_grad():
        logits = model.model(input_ids=torch.tensor([PROMPT])).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    assert not torch.allclose(logits, load_model(base, lean=False).model(input_ids=torch.tensor([PROMPT])).logits)  # type: ignore[attr-defined]


def test_an_updated_target_is_a_target(adapter: Path, base: Path) -> None:
    """Its own output, the same with early exits, and drafters of its base are not its own."""
    llm = ft.load(str(adapter), drafter="early_exit,layer=1,k=3", controller="constant")
    spec, plain = (side.generate(PROMPT, max_new_tokens=20) for side in (llm, llm.plain))
    assert spec.token_ids == plain.token_ids and spec.stats.num_draft_tokens > 0
    assert plain.token_ids != ft.load(str(base), drafter=None).generate(PROMPT, max_new_tokens=20).token_ids
    updated, original = (TargetParts(load_model(source)).fingerprint() for source in (adapter, base))
    assert "weights differ" in updated.difference(original)
    for dtype in ("bfloat16", "float64"):
        assert load_model(adapter, dtype=dtype).dtype == getattr(torch, dtype)  # type: ignore[attr-defined]


def test_the_tokenizer_is_that_of_the_base(adapter: Path, base: Path) -> None:
    assert load_tokenizer(str(adapter)) is None
    inner = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="a").save_pretrained(base)
    assert load_tokenizer(str(adapter)).get_vocab() == {"a": 0, "b": 1}
    assert load_tokenizer(load_model(adapter).model).get_vocab() == {"a": 0, "b": 1}  # type: ignore[attr-defined]


def test_part_of_the_layers_may_be_updated(adapter: Path) -> None:
    def first_layer_only(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".layers.0." not in key]:
            del tensors[key]

    change_tensors(adapter, first_layer_only)
    with pytest.raises(LoadError, match=r"lacks the update of model.layers.1.mlp.down_proj: the adapter is incomplete"):
        load_model(adapter)
    change(adapter, layers_to_transform=[0])
    load_model(adapter)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "an adapter of the type 'IA3', and only LORA"),
        ({"peft_type": "PREFIX_TUNING"}, "'PREFIX_TUNING', which adds learned rows .* load its base model"),
        ({"peft_type": "ADAPTION_PROMPT"}, "'ADAPTION_PROMPT', which adds learned rows .* load its base model"),
        ({"use_dora": True, "bias": "all"}, "uses use_dora, bias, and only a plain LORA"),
        ({"init_lora_weights": "pissa"}, "uses init_lora_weights"),
        ({"use_rslora": "no"}, "uses use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "uses rank_pattern"),
        ({"modules_to_save": ["norm"]}, "uses modules_to_save"),
        ({"base_model_name_or_path": None}, "names no base model: write its folder"),
        ({"base_model_name_or_path": "/no/such"}, "updates /no/such, which cannot be loaded: /no/such is not a folder"),
        ({"base_model_name_or_path": "builtin:x"}, "unknown built-in model 'builtin:x': choose one of builtin"),
        ({"base_model_name_or_path": "builtin"}, r"layer of builtin is \[384, 1024\]: it is for another model"),
        ({"r": 0}, "has r = 0 and lora_alpha = 4: r is a whole number from 1"),
        ({"r": -4}, "has r = -4"),
        ({"r": 4.9}, "has r = 4.9"),
        ({"r": 8}, r"updates model.layers.0.mlp.down_proj with 4 rows of lora_A, and adapter_config.json says r = 8"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
        ({"lora_alpha": "much"}, "damaged or half-written"),
        ({"peft_type": ["LORA"]}, "an adapter of the type"),
    ],
)
def test_bad_descriptions(adapter: Path, values: dict[str, Any], words: str) -> None:
    change(adapter, **values)
    with pytest.raises(LoadError, match=words) as caught:
        load_model(adapter)
    assert "\n" not in str(caught.value)


def _lose(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(key for key in sorted(tensors) if key.endswith(ending))]

    return edit


def _more_layers(tensors: dict[str, torch.Tensor]) -> None:
    for letter in "AB":
        tensors[f"base_model.model.model.layers.9.mlp.up_proj.lora_{letter}.weight"] = torch.zeros(4, 4)


def _norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.ones(32)


def _flat(tensors: dict[str, torch.Tensor]) -> None:
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[key] = tensors[key].flatten()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_lose("lora_B.weight"), "down_proj.lora_B.weight: the adapter is incomplete"),
        (_lose("lora_A.weight"), "down_proj.lora_A.weight: the adapter is incomplete"),
        (_more_layers, "updates model.layers.9.mlp.up_proj, which .* does not have: it is for another model"),
        (_norm, "holds base_model.model.model.norm.weight, which is not part of a plain LORA"),
        (_flat, "it is for another model"),
        (lambda tensors: tensors.clear(), "holds no tensors"),
    ],
)
def test_bad_tensors(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], None], words: str) -> None:
    change_tensors(adapter, edit)
    with pytest.raises(LoadError, match=words) as caught:
        load_model(adapter)
    assert "\n" not in str(caught.value)


def test_an_update_of_a_narrower_model(adapter: Path, tmp_path: Path) -> None:
    wide = save_base(tmp_path / "wide", hidden_size=64)
    change(adapter, base_model_name_or_path=str(wide))
    with pytest.raises(LoadError, match=r"\[32, 4\] times \[4, 48\], and that layer of .*wide is \[64, 48\]"):
        load_model(adapter)


def test_an_update_of_a_projection_that_is_the_embedding_too(tmp_path: Path) -> None:
    factors = {"lm_head": (torch.ones(2, 32), torch.ones(64, 2))}
    for tied in (True, False):
        base = save_base(tmp_path / f"base-{tied}", tie_word_embeddings=tied)
        save_adapter(tmp_path / f"adapter-{tied}", factors, str(base), torch.float32)
    with pytest.raises(LoadError, match=r"updates lm_head, whose weight is also the input embedding of .*base-True"):
        load_model(tmp_path / "adapter-True")
    network = load_model(tmp_path / "adapter-False", lean=False).model  # type: ignore[attr-defined]
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "base-False")
    assert torch.equal(network.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert torch.allclose(network.lm_head.weight, plain.lm_head.weight + 2.0)


def test_an_update_of_an_update(adapter: Path, base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "second", factors_for(base), str(adapter), torch.float32)
    with pytest.raises(LoadError, match="is an adapter itself: merge that one first"):
        load_model(tmp_path / "second")


def test_damaged_files(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-9])
    assert main(["generate", "--target", str(adapter), "hello"]) == 2
    assert capsys.readouterr().err.count("damaged or half-written") == 1
    (adapter / WEIGHTS).unlink()
    with pytest.raises(LoadError, match="is missing: the adapter is incomplete"):
        load_model(adapter)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(LoadError, match="damaged or half-written: copy it again"):
        load_model(adapter)
    with pytest.raises(LoadError, match="damaged or half-written: copy it again"):
        load_tokenizer(str(adapter))


def test_a_full_disk_leaves_no_half_adapter(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, file: Path, metadata: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(tmp_path / "out", factors_for(base), str(base), torch.float32)
    assert list((tmp_path / "out").iterdir()) == []
