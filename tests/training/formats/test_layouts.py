"""Names, shapes and keys of every layout, written down here as the engines' own code has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_nets import DRAFT_TOKENS, FFN, HEADS, KV_HEADS, LAYERS, SIZE, VOCAB, save_net, shapes

from foretoken.training.formats import export_drafter
from foretoken.training.formats.base import Checkpoint, Target
from foretoken.training.formats.medusa import MedusaVllm

D, F, Q, KV = SIZE, FFN, SIZE, SIZE // HEADS * KV_HEADS


def layer(prefix: str, width: int) -> dict[str, list[int]]:
    """A Llama layer whose attention reads ``width`` numbers."""
    return {
        f"{prefix}.self_attn.q_proj.weight": [Q, width],
        f"{prefix}.self_attn.k_proj.weight": [KV, width],
        f"{prefix}.self_attn.v_proj.weight": [KV, width],
        f"{prefix}.self_attn.o_proj.weight": [D, Q],
        f"{prefix}.mlp.gate_proj.weight": [F, D],
        f"{prefix}.mlp.up_proj.weight": [F, D],
        f"{prefix}.mlp.down_proj.weight": [D, F],
        f"{prefix}.post_attention_layernorm.weight": [D],
    }


def eagle3(prefix: str) -> dict[str, list[int]]:
    return {
        **layer(prefix, 2 * D),
        f"{prefix}.input_layernorm.weight": [D],
        f"{prefix}.hidden_norm.weight": [D],
        "fc.weight": [D, 3 * D],
        "norm.weight": [D],
        "lm_head.weight": [30, D],
        "d2t": [30],
        "t2d": [VOCAB],
    }


def medusa(heads: int, blocks: int, name: Any) -> dict[str, list[int]]:
    sizes = {}
    for head in range(heads):
        for block in range(blocks):
            sizes[name(head, block, "weight")] = [D, D]
            sizes[name(head, block, "bias")] = [D]
    return sizes


LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def exported(method: str, format: str, target: Path, folder: Path, **config: Any) -> tuple[Path, dict[str, Any]]:
    drafter = save_net(method, folder / "mine", target, **config)
    report = export_drafter(f"{method}:{drafter}", folder / "theirs", format, target)
    assert report["files"] == sorted(file.name for file in (folder / "theirs").iterdir())
    return folder / "theirs", json.loads((folder / "theirs" / "config.json").read_text())


def test_eagle3_plain(target: Path, tmp_path: Path) -> None:
    out, config = exported("eagle3", "plain", target, tmp_path)
    assert shapes(out / "model.safetensors") == eagle3("midlayer")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {key: config[key] for key in LLAMA} == LLAMA
    assert config["draft_vocab_size"] == 30 and config["target_hidden_size"] == D
    assert config["num_aux_hidden_states"] == 3
    assert not any(config[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(30) + tensors["d2t"], DRAFT_TOKENS)  # offsets
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_TOKENS.tolist()


def test_eagle3_speculators(target: Path, tmp_path: Path) -> None:
    out, config = exported("eagle3", "speculators", target, tmp_path)
    assert shapes(out / "model.safetensors") == eagle3("layers.0")
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert {key: config["transformer_layer_config"][key] for key in LLAMA} == LLAMA
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
    }
    assert config["norm_before_residual"] is False  # written, whatever a reader takes it for otherwise
    assert config["draft_vocab_size"] == 30 and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert isinstance(config["speculators_version"], str)


@pytest.mark.parametrize("format", ["plain", "speculators"])
def test_a_shared_eagle3_head_is_the_targets_rows(format: str, target: Path, tmp_path: Path) -> None:
    out, _ = exported("eagle3", format, target, tmp_path, share_head=True)
    head = load_file(target / "model.safetensors")["lm_head.weight"].bfloat16()
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], head[DRAFT_TOKENS])


def test_eagle3_with_the_whole_vocabulary_has_no_maps(target: Path, tmp_path: Path) -> None:
    out, config = exported("eagle3", "plain", target, tmp_path, draft_vocab=0)
    sizes = shapes(out / "model.safetensors")
    assert sizes["lm_head.weight"] == [VOCAB, D] and not {"d2t", "t2d"} & sizes.keys()
    assert config["draft_vocab_size"] == VOCAB


def test_eagle_plain(target: Path, tmp_path: Path) -> None:
    out, config = exported("eagle", "plain", target, tmp_path)
    expected = {"fc.weight": [D, 2 * D], "fc.bias": [D], **layer("layers.0", D)}
    assert shapes(out / "model.safetensors") == expected
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert {key: config[key] for key in LLAMA} == LLAMA
    assert "bias" not in config  # EAGLE takes it as true; SGLang would give the attention biases


def test_eagle_for_vllm(target: Path, tmp_path: Path) -> None:
    out, config = exported("eagle", "vllm", target, tmp_path)
    biases = {"q_proj": [Q], "k_proj": [KV], "v_proj": [KV], "o_proj": [D]}
    attention = {f"layers.0.self_attn.{name}.bias": shape for name, shape in biases.items()}
    assert shapes(out / "model.safetensors") == {"fc.weight": [D, 2 * D], **attention, **layer("layers.0", D)}
    assert config["architectures"] == ["EagleLlamaForCausalLM"] and config["attention_bias"] is True


@pytest.mark.parametrize(("own", "blocks"), [(False, 1), (True, 2)])
def test_medusa_for_vllm(own: bool, blocks: int, target: Path, tmp_path: Path) -> None:
    out, config = exported("medusa", "vllm", target, tmp_path, own_projection=own, layers=blocks)
    heads = {f"lm_heads.{i}.weight": [VOCAB, D] for i in range(3)} if own else {"lm_head.weight": [VOCAB, D]}
    expected = medusa(3, blocks, lambda h, j, part: f"blocks.{h}.layers.{j}.{part}")
    assert shapes(out / "model.safetensors") == {**expected, **heads}
    facts = {
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": 3,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
    }
    assert {key: config[key] for key in facts} == facts
    # vLLM renames every key with "num" and "heads", or "num" and "layers", in it: there must be one of each.
    assert sum("num" in key and "heads" in key for key in config) == 1
    assert sum("num" in key and "layers" in key for key in config) == 1


@pytest.mark.parametrize(("own", "scale"), [(True, 2.0), (False, 0.5), (False, 1.0)])
def test_the_logit_scale_of_medusa_for_vllm(own: bool, scale: float, target: Path, tmp_path: Path) -> None:
    """vLLM's MedusaModel multiplies its logits by ``logit_scale``: here it is in the projections."""
    out, _ = exported("medusa", "vllm", target, tmp_path, own_projection=own)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    opened, reader = Target.open(str(target)), MedusaVllm()
    trained = reader.read(Checkpoint({**config, "logit_scale": scale}, dict(tensors)), opened)
    projections = [value for name, value in trained.tensors.items() if name.startswith("projections.")]
    if scale == 1.0:
        assert not projections and not trained.config["own_projection"]
        return
    theirs = [tensors[f"lm_heads.{head}.weight" if own else "lm_head.weight"] for head in range(3)]
    assert trained.config["own_projection"]
    assert all(torch.equal(ours, scale * one) for ours, one in zip(projections, theirs, strict=True))
    with pytest.raises(ValueError, match=r"logit_scale in config\.json must be above 0, not 0"):
        reader.read(Checkpoint({**config, "logit_scale": 0.0}, dict(tensors)), opened)


@pytest.mark.parametrize(("own", "blocks"), [(False, 1), (True, 2)])
def test_medusa_original(own: bool, blocks: int, target: Path, tmp_path: Path) -> None:
    out, config = exported("medusa", "original", target, tmp_path, own_projection=own, layers=blocks)
    expected = medusa(3, blocks, lambda h, j, part: f"{h}.{j}.linear.{part}")
    file = out / "medusa_lm_head.safetensors"
    assert shapes(file) == {**expected, **{f"{h}.{blocks}.weight": [VOCAB, D] for h in range(3)}}
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, blocks)
    assert config["base_model_name_or_path"] == str(target)
    if not own:
        head = load_file(target / "model.safetensors")["lm_head.weight"].bfloat16()
        assert all(torch.equal(load_file(file)[f"{h}.1.weight"], head) for h in range(3))


def test_the_layer_count_of_the_tiny_target_is_what_the_ids_are_about() -> None:
    assert LAYERS == 4
