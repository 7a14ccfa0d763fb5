"""From a Llama to a hybrid with a head of its own: start, training, the head, and one checkpoint that holds both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import foretoken as ft
from foretoken.cli.main import main
from foretoken.training.config import LmConfig
from foretoken.training.formats import export_drafter
from foretoken.training.hybrid import build_hybrid, common_shape, start_from_llama
from foretoken.training.lm import train_lm

SHAPE: dict[str, Any] = {
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 48,
    "context": 48,
    "vocab": 300,
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"one two three four five {i % 7} six seven eight nine ten\n" * 6 + str(i)} for i in range(120)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture(scope="module")
def llama(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("llama") / "llama"
    train_lm([data], out, LmConfig(**SHAPE, layers=1, steps=40, lr=1e-2))
    return out


def test_a_hybrid_starts_as_the_llama_that_it_was_made_of(llama: Path) -> None:
    """The norms of queries and keys are all that differs: the loss stays far below that of random weights."""
    network = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tokens = torch.randint(3, 300, (4, 40), generator=torch.Generator().manual_seed(0))
    hybrid = build_hybrid(LmConfig(**SHAPE, layers=2), 0)
    start_from_llama(hybrid, llama, tokens.flatten().numpy())
    with torch.no_grad():
        hybrid_scores, llama_scores = (m(input_ids=tokens).logits.log_softmax(-1) for m in (hybrid, network))
    assert float((llama_scores.exp() * (llama_scores - hybrid_scores)).sum(-1).mean()) < 0.05
    assert hybrid.config.layer_types == ["linear_attention", "full_attention"]


def test_what_a_hybrid_cannot_start_from(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers=3 must be even"):
        build_hybrid(LmConfig(**SHAPE, layers=3), 0)
    tokens = torch.arange(8).numpy()
    with pytest.raises(ValueError, match="must have 2 layers"):
        start_from_llama(build_hybrid(LmConfig(**SHAPE, layers=4), 0), llama, tokens)
    with pytest.raises(ValueError, match="not a Llama with hidden_size=16"):
        start_from_llama(build_hybrid(LmConfig(**{**SHAPE, "hidden": 16}, layers=2), 0), llama, tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05, and the model to train rms_norm_eps=1e-06"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters={.*500000.*10000"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"attention_bias": True}, "biases in its layers, which a hybrid lacks"),
    ],
)
def test_a_llama_of_another_function(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Its weights would fit, and the hybrid would not compute what it computes."""
    shape = LlamaConfig(**common_shape(LmConfig(**SHAPE, layers=1), 0))
    for key, value in changes.items():
        setattr(shape, key, value)
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has {words}"):
        start_from_llama(build_hybrid(LmConfig(**SHAPE, layers=2), 0), tmp_path, torch.arange(8).numpy())


def test_from_a_llama_to_a_checkpoint_with_its_own_head(data: Path, llama: Path, tmp_path: Path) -> None:
    hybrid, head, both = tmp_path / "hybrid", tmp_path / "head", tmp_path / "both"
    shape = [word for key in ("hidden", "heads", "kv_heads", "ffn", "context", "vocab", "batch_size")
             for word in (f"--{key.replace('_', '-')}", str(SHAPE[key]))]  # fmt: skip
    lm = ["train", "lm", "--data", str(data), "--out", str(hybrid), "--init-from", str(llama), "--hybrid"]
    assert main([*lm, "--layers", "2", "--steps", "4", *shape]) == 0
    assert "--hybrid" in (hybrid / "README.md").read_text()
    module = ["train", "mtp", "--target", str(hybrid), "--data", str(data), "--out", str(head), "--steps", "3"]
    plain_updates = ["--optimizer", "adamw", "--precision", "float32"]
    settings = ["--set", "layer=target", "--set", "feed=post_norm"]
    assert main([*module, "--batch-size", "2", "--context", "40", *settings, *plain_updates]) == 0
    assert " ".join(plain_updates) in (head / "README.md").read_text()
    report = export_drafter(f"mtp:{head}", both, "native", target=hybrid)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(report["files"])
    assert json.loads((both / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    names = load_file(both / "model.safetensors").keys() - load_file(hybrid / "model.safetensors").keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"} < names
    assert all(name.startswith("mtp.") for name in names)
    plain = ft.load(hybrid, None, dtype="float32").generate("one two three", max_new_tokens=20)
    for target, spec in ((hybrid, f"mtp:{head}"), (both, "mtp")):
        out = ft.load(target, spec, controller="constant", dtype="float32").generate("one two three", max_new_tokens=20)
        assert out.token_ids == plain.token_ids and out.stats.num_draft_tokens
