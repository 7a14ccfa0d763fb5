"""A Transformers folder and a GGUF file of the same weights are one model: the same text, the same tokenizer, and no
second copy of the weights in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model, plain_logits, prompt_of, save

import foretoken as ft
from foretoken.lab.bench.gguf_export import write_gguf
from foretoken.loading import load_model, load_tokenizer
from foretoken.models.base import Feed
from foretoken.models.gguf.file import read_gguf
from foretoken.models.gguf.network import build_network
from foretoken.models.gguf.products import StoredEmbedding
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.product import QuantisedLinear
from foretoken.models.native import why_not
from gguf_writer import write_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "use_sliding_window": False,
    },
    "gemma": {**SIZES, "tie_word_embeddings": True},
}
PROMPTS = [prompt_of(12), prompt_of(30, seed=1), prompt_of(3, seed=2)]


def both(folder: Path, name: str, dtype: torch.dtype) -> tuple[Path, Path]:
    model = new_model(name, **FAMILIES[name]).to(dtype)
    kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    return save(model, folder / "model"), write_model(folder / "m.gguf", model, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_the_folders(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder, file = both(tmp_path, name, dtype)
    read, reference = ft.load(file, drafter="ngram", backend="native"), ft.load(folder, drafter=None)
    assert read.describe()["forward"] == reference.describe()["forward"]
    assert read.exactness == reference.exactness
    for options in ({}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_p": 0.9, "seed": [1, 2, 3]}):
        more: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, **options}
        ids = [output.token_ids for output in read.generate(PROMPTS, **more)]
        assert ids == [output.token_ids for output in reference.generate(PROMPTS, **more)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_folders_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, file = both(tmp_path, "llama", dtype)
    logits = []
    for source in (folder, file):
        model = load_model(source)
        rows = model.forward([Feed(model.open(), PROMPTS[1])])[0]
        logits.append(rows.logits)
    assert torch.equal(*logits)


@pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")
@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q8_0"])
def test_default_texts_are_bitwise(tmp_path: Path, kind: str) -> None:
    llm = ft.load(write_model(tmp_path / "m.gguf", new_model("llama", **SIZES), kind), drafter="ngram")
    assert llm.exactness == "bitwise"
    together = [output.token_ids for output in llm.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)]
    plain = [llm.plain.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids for prompt in PROMPTS]
    assert together == plain


def test_the_builtin_target_with_its_tokenizer(tmp_path: Path) -> None:
    builtin: Any = load_model("builtin", dtype="float32")
    file = tmp_path / "builtin.gguf"
    write_gguf(copy.deepcopy(builtin.model), file, load_tokenizer("builtin"))
    read, reference = (
        ft.load(file, drafter="ngram", backend="native"),
        ft.load("builtin", drafter=None, dtype="float32"),
    )
    prompt = "def fib(n):\n    a, b = 0, 1\n"
    assert read.generate(prompt, max_new_tokens=24).text == reference.generate(prompt, max_new_tokens=24).text
    assert read.target.eos_token_ids == reference.target.eos_token_ids


# -- memory -----------------------------------------------------------------------------------------------------------


def test_plain_weights_are_the_file(tmp_path: Path) -> None:
    """Matrices lie where the file is mapped: there is no other copy."""
    model = new_model("qwen2", **{**FAMILIES["qwen2"], "tie_word_embeddings": True})
    read = read_gguf(write_model(tmp_path / "m.gguf", model))
    network = build_network(read)
    for name, weight in network.named_parameters():
        if weight.dim() > 1:
            stored = {"embed_tokens": "token_embd", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
            stored |= {"o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
            module = stored[name.split(".")[-2]]
            block = f"blk.{name.split('.')[2]}." if "layers" in name else ""
            assert weight.data_ptr() == read.tensors[f"{block}{module}.weight"].data.data_ptr(), name
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_quantised_weights_are_kept_once(tmp_path: Path) -> None:
    model = new_model("llama", **{**SIZES, "tie_word_embeddings": False, "vocab_size": 96})
    file = write_model(tmp_path / "m.gguf", model, "Q8_0")
    read = load_model(file, backend="native")
    assert isinstance(read, HuggingFaceModel)
    network = read.model
    embedding = network.get_input_embeddings()
    assert isinstance(embedding, StoredEmbedding) and embedding.num_bytes == embedding.stored.nbytes
    layers = [module for module in network.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 7 * 3 + 1
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    kept = sum(layer.packed_bytes for layer in layers)
    # 34 bytes for 32 numbers, and blocks of 32 outputs that are filled up.
    assert kept <= 1.1 * numbers * 34 / 32
    wide = [weight for weight in network.parameters() if weight.dim() > 1]
    assert wide == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 8}, "a mistral model with sliding_window=8 as GGUF: only full attention is recorded"),
        ({"sliding_window": None, "hidden_act": "gelu"}, "hidden_act=gelu as GGUF: only silu is recorded"),
    ],
)
def test_settings_that_an_exported_file_would_lose(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write_gguf(new_model("mistral", **changes), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": 64, "max_position_embeddings": 64}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_an_exported_file_is_the_model(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    model = new_model(name, **changes)
    write_gguf(model, tmp_path / "m.gguf")
    read, text = load_model(tmp_path / "m.gguf", backend="native"), prompt_of(30)
    expected = plain_logits(model, text)
    assert (plain_logits(read.model, text) - expected).abs().max() < 1e-5 * expected.abs().max()
