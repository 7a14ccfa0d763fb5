"""Export, import: the same tensors bit for bit, and the same drafts in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_nets import DRAFT_TOKENS, SIZE, drafts, same_drafter, save_net

from foretoken.loading import load_model
from foretoken.training.formats import export_drafter, import_drafter

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = [
    ("eagle3", "plain", {}),
    ("eagle3", "plain", {"share_head": True}),
    ("eagle3", "plain", {"draft_vocab": 0, "layers": "1,2,3,4"}),
    ("eagle3", "speculators", {}),
    ("eagle3", "speculators", {"share_head": True, "layers": "0,4"}),
    ("eagle3", "speculators", {"draft_vocab": 0}),
    ("eagle3", "plain", {"norm_before_residual": True}),
    ("eagle3", "speculators", {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True}),
    ("eagle3", "plain", {"fc_norm": True, "norm_output": True}),
    ("eagle3", "speculators", {"fc_norm": True, "num_layers": 3}),
    ("eagle3", "plain", {"num_layers": 2, "norm_before_fc": True, **BIASES}),
    ("eagle3", "speculators", {"head_norms": True, **BIASES, "rope": LLAMA3, "own_embedding": True}),
    ("eagle3", "plain", {"layers": "last", "rope": YARN}),
    ("peagle", "plain", {"norm_before_fc": True, "rope": LLAMA3, "attention_bias": True}),
    ("peagle", "speculators", {"fc_norm": True, "norm_before_residual": True, "head_norms": True}),
    ("peagle", "plain", {}),
    ("peagle", "plain", {"num_layers": 1, "share_head": True}),
    ("peagle", "speculators", {"own_embedding": True, "places": 5}),
    ("peagle", "speculators", {"draft_vocab": 0, "num_layers": 2}),
    ("eagle", "plain", {}),
    ("eagle", "vllm", {}),
    ("eagle", "plain", {**BIASES, "rope": {"partial_rotary_factor": 0.5}}),
    ("medusa", "vllm", {}),
    ("medusa", "vllm", {"layers": 2, "own_projection": True}),
    ("medusa", "vllm", {"draft_vocab_size": 20}),
    ("medusa", "vllm", {"draft_vocab_size": 20, "own_projection": True}),
    ("medusa", "original", {}),
    ("medusa", "original", {"layers": 2, "own_projection": True}),
    ("dflash", "plain", {}),
    ("dflash", "plain", {"reach": "5,0", "causal": "1,0", "own_mask": True, "mask_token": 0, "sinks": True}),
    ("dflash", "speculators", {"draft_vocab": 30, "own_head": True, "from_anchor": True, "taps": "1,2,4"}),
    ("dflash", "speculators", {"reach": "6", "causal": "1", "input_scale": 2.0}),
    ("dflash", "plain", {**BIASES, "rope": YARN}),
    ("dflash", "speculators", {"rope": LLAMA3, "mlp_bias": True}),
    ("dflash2", "plain", {"rank": 6, "top": 5}),
    ("dflash2", "speculators", {"rank": 6, "top": 5, "conv": 3, "group": 8, "draft_vocab": 30, "own_head": True}),
    ("dspark", "plain", {"rank": 6, "top": 9}),
    ("dspark", "plain", {"rank": 6, "head": "rnn", "confidence": ""}),
    ("dspark", "speculators", {"rank": 6, "head": "gated", "confidence": "state", "draft_vocab": 30, "own_head": True}),
]


@pytest.mark.parametrize(("method", "format", "config"), CASES)
def test_there_and_back(method: str, format: str, config: dict[str, Any], target: Path, tmp_path: Path) -> None:
    drafter = save_net(method, tmp_path / "mine", target, **config)
    written = export_drafter(f"{method}:{drafter}", tmp_path / "theirs", format, target)
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert (read["method"], read["format"]) == (written["method"], written["format"]) == (method, format)
    assert read["drafter"] == f"{method}:{tmp_path / 'back'}" and read["warnings"] == []
    assert json.loads((tmp_path / "back" / "drafter.json").read_text()) == json.loads(
        (drafter / "drafter.json").read_text()
    )
    assert same_drafter(drafter, tmp_path / "back")
    tokens, trees = drafts(target, f"{method}:{drafter}")
    assert drafts(target, read["drafter"]) == (tokens, trees)
    assert sum(len(tree) - 1 for tree, _ in trees) > 10  # they were really compared


@pytest.mark.parametrize(("method", "format"), [("eagle3", "plain"), ("dflash", "plain"), ("dflash2", "speculators")])
def test_an_embedding_of_its_own_is_kept(method: str, format: str, target: Path, tmp_path: Path) -> None:
    """With a warning, because another target's embedding looks the same; padding rows are dropped."""
    drafter = save_net(method, tmp_path / "mine", target, own_embedding=True)
    theirs = tmp_path / "theirs"
    export_drafter(f"{method}:{drafter}", theirs, format, target)
    tensors = load_file(theirs / "model.safetensors")
    padded = torch.cat([tensors["embed_tokens.weight"], torch.zeros(4, SIZE, dtype=torch.bfloat16)])
    save_file({**tensors, "embed_tokens.weight": padded}, theirs / "model.safetensors")
    read = import_drafter(theirs, tmp_path / "back", target)
    assert len(read["warnings"]) == 1 and "a token embedding of its own, which was kept" in read["warnings"][0]
    assert same_drafter(drafter, tmp_path / "back")
    tokens, trees = drafts(target, read["drafter"])
    assert drafts(target, f"{method}:{drafter}") == (tokens, trees)
    # The targets', which is shared again
    own = load_model(target, dtype="bfloat16").model.model.embed_tokens.weight.detach().clone()
    save_file({**tensors, "embed_tokens.weight": own}, theirs / "model.safetensors")
    shared = import_drafter(theirs, tmp_path / "shared", target)
    assert shared["warnings"] == []
    assert "embed_tokens.weight" not in load_file(tmp_path / "shared" / "model.safetensors")
    assert drafts(target, shared["drafter"])[1] != trees  # the embedding counts


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_the_length(name: str, target: Path, tmp_path: Path) -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": name, "max_position_embeddings": 64, **(lists if name == "longrope" else {"factor": 2.0})}
    drafter = save_net("eagle3", tmp_path / "mine", target, rope=rope)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    length = 32 if name == "longrope" else 64
    assert import_drafter(tmp_path / "theirs", tmp_path / "back", target)["warnings"] == [
        f"the rotary embedding ({name}) changes with the length of a text: this drafter keeps that of texts up to "
        f"{length} tokens"
    ]
    assert same_drafter(drafter, tmp_path / "back")


def test_biases_of_queries_keys_and_values_only(target: Path, tmp_path: Path) -> None:
    """Qwen2's layers: the output projection gets zeros; ``config.json`` need not say so."""
    drafter = save_net("eagle3", tmp_path / "mine", target, attention_bias=True)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("midlayer.self_attn.o_proj.bias")
    save_file(tensors, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["midlayer.o_proj.bias"], torch.zeros_like(bias)) and bool(bias.any())
    assert torch.equal(back["midlayer.q_proj.bias"], tensors["midlayer.self_attn.q_proj.bias"])


def test_biases_that_are_not_folded_ones(target: Path, tmp_path: Path) -> None:
    """vLLM's EAGLE layout holds the bias of ``fc`` there, or the attention's own."""
    drafter = save_net("eagle", tmp_path / "mine", target)
    export_drafter(f"eagle:{drafter}", tmp_path / "theirs", "vllm", target)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.self_attn.q_proj.bias"] += 1.0
    save_file(tensors, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert not back["fc.bias"].any()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert torch.equal(back[f"layer.{name}.bias"], tensors[f"layers.0.self_attn.{name}.bias"])


def test_a_norm_that_vllm_makes_and_does_not_read(target: Path, tmp_path: Path) -> None:
    drafter = save_net("eagle3", tmp_path / "mine", target, num_layers=2)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    file = tmp_path / "theirs" / "model.safetensors"
    save_file({**load_file(file), "layers.1.hidden_norm.weight": torch.ones(SIZE, dtype=torch.bfloat16)}, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert same_drafter(drafter, tmp_path / "back")


def test_a_network_over_the_last_state_has_no_place_in_speculators(target: Path, tmp_path: Path) -> None:
    drafter = save_net("eagle3", tmp_path / "mine", target, layers="last")
    with pytest.raises(ValueError, match=r"reads the last state only .layers=last. has no place in this format"):
        export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "speculators", target)


def test_a_head_without_bias_is_written_without_one(target: Path, tmp_path: Path) -> None:
    """vLLM gets no attention bias for nothing, and what comes back has a bias of zero."""
    drafter = save_net("eagle", tmp_path / "mine", target)
    tensors = load_file(drafter / "model.safetensors")
    save_file({**tensors, "fc.bias": torch.zeros(SIZE, dtype=torch.bfloat16)}, drafter / "model.safetensors")
    export_drafter(f"eagle:{drafter}", tmp_path / "theirs", "vllm", target)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["attention_bias"] is False
    assert not [name for name in load_file(tmp_path / "theirs" / "model.safetensors") if name.endswith("bias")]
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert same_drafter(drafter, tmp_path / "back")


def test_the_folded_bias_computes_the_same(target: Path, tmp_path: Path) -> None:
    """vLLM's layer with attention biases and a bias-free fc, written down here, is our net."""
    from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
    from foretoken.methods.drafters.nets.store import load_weights

    drafter = save_net("eagle", tmp_path / "mine", target)
    export_drafter(f"eagle:{drafter}", tmp_path / "theirs", "vllm", target)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    net = EagleNet(EagleConfig(**json.loads((drafter / "drafter.json").read_text())["config"]))
    load_weights(drafter, net)
    embeddings, features = torch.randn(2, 1, 5, SIZE, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(5)[None]
    expected = net(embeddings, features, positions).detach()
    with torch.no_grad():
        net.fc.bias.zero_()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(net.layer, name)
            linear.bias = torch.nn.Parameter(tensors[f"layers.0.self_attn.{name}.bias"].float())
    got = net(embeddings, features, positions)
    assert torch.allclose(got, expected, atol=0.01 * float(expected.std()))
    with torch.no_grad():
        net.layer.o_proj.bias.zero_()
    assert not torch.allclose(net(embeddings, features, positions), expected, atol=0.01 * float(expected.std()))


def test_what_was_measured_may_be_lost_but_not_the_drafter(target: Path, tmp_path: Path) -> None:
    """Without the note beside an export nothing is known of the target but its sizes."""
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "theirs", "original", target)
    (tmp_path / "theirs" / "foretoken.json").unlink()
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert same_drafter(drafter, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "drafter.json").read_text())["measured"] == {}


@pytest.mark.parametrize("format", ["vllm", "original"])
def test_prefixes_that_training_code_leaves(format: str, target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "theirs", format, target)
    (file,) = (tmp_path / "theirs").glob("*.safetensors")
    prefix = "medusa_heads." if format == "vllm" else "medusa_head."
    save_file({prefix + name: value for name, value in load_file(file).items()}, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert same_drafter(drafter, tmp_path / "back")


def test_one_projection_of_their_own_becomes_one_per_head(target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target)
    export_drafter(f"medusa:{drafter}", tmp_path / "theirs", "vllm", target)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].flip(0)}, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[f"projections.{i}.weight"], tensors["lm_head.weight"].flip(0)) for i in range(3))


def test_float16_and_shards_and_the_targets_own_tables(target: Path, tmp_path: Path) -> None:
    """A checkpoint as others ship it: half precision, two files, the target's embedding inside, no note."""
    drafter = save_net("eagle3", tmp_path / "mine", target)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    (tmp_path / "theirs" / "foretoken.json").unlink()
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = {n: v.half() if v.is_floating_point() else v for n, v in load_file(file).items()}
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    file.unlink()
    save_file(
        {"embed_tokens.weight": table.half(), "fc.weight": tensors.pop("fc.weight")}, file.with_name("a.safetensors")
    )
    save_file(tensors, file.with_name("b.safetensors"))
    read = import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    assert same_drafter(drafter, tmp_path / "back") and read["warnings"] == ["the weights were rounded to bfloat16"]


def test_layers_are_numbered_as_each_engine_does(target: Path, tmp_path: Path) -> None:
    """Depth k is vLLM's k and SGLang's k - 1; a checkpoint with neither means 2, L // 2, L - 3."""
    drafter = save_net("eagle3", tmp_path / "mine", target)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    for dropped, layers in ((["eagle_aux_hidden_state_layer_ids"], "1,2,4"), (["eagle_config"], "2,2,1")):
        for key in dropped:
            del config[key]
        file.write_text(json.dumps(config))
        out = tmp_path / f"back{len(config)}"
        import_drafter(tmp_path / "theirs", out, target)
        assert json.loads((out / "drafter.json").read_text())["config"]["layers"] == layers


def test_vocabulary_maps_in_any_order(target: Path, tmp_path: Path) -> None:
    """Others need not sort their draft vocabulary; t2d follows from d2t."""
    drafter = save_net("eagle3", tmp_path / "mine", target)
    export_drafter(f"eagle3:{drafter}", tmp_path / "theirs", "plain", target)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    ids = torch.arange(30)
    order = (tensors["d2t"] + ids).flip(0)
    save_file({**tensors, "d2t": order - ids, "lm_head.weight": tensors["lm_head.weight"].flip(0)}, file)
    import_drafter(tmp_path / "theirs", tmp_path / "back", target)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["t2d"], tensors["t2d"]) and torch.equal(back["d2t"] + ids, order)
    (_, expected), (_, got) = drafts(target, f"eagle3:{drafter}"), drafts(target, f"eagle3:{tmp_path / 'back'}")
    # Ties (logits are bfloat16) may fall otherwise, so the best guess is what is compared.
    same = sum(before[0][1] == after[0][1] for before, after in zip(expected, got, strict=True))
    assert same > 0.8 * len(expected) > 8


def test_heads_over_few_tokens_draft_these(target: Path, tmp_path: Path) -> None:
    """vLLM's ``token_map``: rows of the whole vocabulary are cut to it, and ids are mapped back."""
    drafter = save_net("medusa", tmp_path / "mine", target, own_projection=True)
    theirs, ids = tmp_path / "theirs", DRAFT_TOKENS.flip(0)
    export_drafter(f"medusa:{drafter}", theirs, "vllm", target)
    whole = load_file(theirs / "model.safetensors")
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    expected = drafts(target, f"medusa:{drafter},vocab={tmp_path / 'ids.json'}")
    assert {token for tokens, _ in expected[1] for token in tokens[1:]} <= set(ids.tolist())
    cut = {name: tensor[ids] if "lm_heads" in name else tensor for name, tensor in whole.items()}
    for number, tensors in enumerate((whole, cut)):
        save_file({**tensors, "token_map": ids}, theirs / "model.safetensors")
        (theirs / "config.json").write_text(json.dumps({**config, "truncated_vocab_size": len(ids)}))
        read = import_drafter(theirs, tmp_path / f"back{number}", target)
        assert read["warnings"] == [] and drafts(target, read["drafter"]) == expected
        stored = load_file(tmp_path / f"back{number}" / "model.safetensors")
        assert stored["projections.0.weight"].shape == (len(ids), SIZE)
        fewer = ids[:10]
        (tmp_path / "fewer.json").write_text(json.dumps(fewer.tolist()))
        few = drafts(target, f"{read['drafter']},vocab={tmp_path / 'fewer.json'}")
        assert few == drafts(target, f"medusa:{drafter},vocab={tmp_path / 'fewer.json'}")
    # without a truncated size, the map is not used
    save_file({**whole, "token_map": ids}, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(config))
    assert drafts(target, import_drafter(theirs, tmp_path / "all", target)["drafter"]) == drafts(
        target, f"medusa:{drafter}"
    )


def test_heads_over_few_tokens_have_no_original_layout(target: Path, tmp_path: Path) -> None:
    drafter = save_net("medusa", tmp_path / "mine", target, draft_vocab_size=20)
    with pytest.raises(ValueError, match="the heads predict 20 tokens, and this layout holds all: use vllm"):
        export_drafter(f"medusa:{drafter}", tmp_path / "theirs", "original", target)
