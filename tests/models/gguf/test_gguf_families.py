"""GGUF files of every family that we read: the logits of the Transformers model that they were written from, and of
llama.cpp where it is installed, so that the files are not judged by their own writer alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, new_model, plain_logits, prompt_of
from torch import Tensor

import foretoken as ft
from foretoken.loading import LoadError, load_model
from foretoken.loading.gguf import has_llama_cpp
from foretoken.models.base import Feed
from foretoken.models.gguf.architectures import ARCHITECTURES
from foretoken.models.huggingface import HuggingFaceModel
from gguf_writer import Stored, header_of, write_model

ROUNDING = 1e-5
"""Of float32, as a fraction of the largest logit."""
WINDOW = {"sliding_window": 8}
PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SCALED_WITHOUT_WINDOW = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 32,
}
SHARED: dict[str, Any] = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 20}),
    "llama3_positions": ("llama", {"rope_parameters": LLAMA3, "head_dim": 12}),
    "llama_linear_positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma": ("gemma", GEMMA),
    "gemma2": (
        "gemma2",
        {
            **GEMMA,
            **WINDOW,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            **WINDOW,
            "num_hidden_layers": 6,
            "layer_types": PATTERN,
            "query_pre_attn_scalar": 16,
            "rope_parameters": LOCAL,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_part": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "phi3_window": ("phi3", WINDOW),
    "phi3_long": ("phi3", {"sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOW, "layer_types": MIXED, "rope_parameters": SCALED_WITHOUT_WINDOW}),
    "granite": ("granite", {**SHARED, "logits_scaling": 2.0}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    "granitemoe": (
        "granitemoe",
        {**SHARED, "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
NOT_THERE = {
    "phi3_window": "llama.cpp has switched Phi's windows off",
    "phi3_long": "llama.cpp takes one list of factors for all lengths",
}
"""Where llama.cpp runs another model than Transformers."""


def original(name: str) -> Any:
    model_type, values = FAMILIES[name]
    return new_model(model_type, **values, experts_implementation="eager")


def texts() -> list[list[int]]:
    """One within the windows and the original lengths, one beyond them."""
    return [prompt_of(7), prompt_of(45, seed=1)]


def rows(model: Any, tokens: list[int]) -> Tensor:
    """[n, V] logits of a text, by a language model's own forward."""
    sequence = model.open()
    logits = model.forward([Feed(sequence, tokens)])[0].logits.float()
    model.release(sequence)
    return logits


def near(logits: Tensor, expected: Tensor) -> bool:
    return bool((logits - expected).abs().max() < ROUNDING * expected.abs().max())


def gguf_key(model: Any, key: str) -> str:
    return f"{header_of(model)['general.architecture']}.{key}"


def with_entry(key: str, value: Any, header: dict[str, Any], tensors: Any) -> None:
    header[key] = value


def test_every_architecture_is_tried() -> None:
    tried = {model_type for model_type, _ in FAMILIES.values()}
    assert {architecture.model_type for architecture in ARCHITECTURES.values()} <= tried


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_transformers_models(tmp_path: Path, name: str) -> None:
    model = original(name)
    file = write_model(tmp_path / "m.gguf", model)
    read = load_model(file, backend="native", dtype="float32")
    assert isinstance(read, HuggingFaceModel)
    folder = load_model(model)
    for text in texts():
        expected = plain_logits(model, text)
        assert expected.abs().max() > 1
        assert near(plain_logits(read.model, text), expected)
        assert near(rows(read, text), rows(folder, text))
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    text = prompt_of(9, seed=2)
    wanted_ids = ft.load(folder, drafter=None).generate(text, **options).token_ids
    assert ft.load(read, drafter="ngram").generate(text, **options).token_ids == wanted_ids


def test_older_keys_and_numbers_of_rotary_embeddings(tmp_path: Path) -> None:
    """A factor without a type is linear, and had another name once; YaRN's own numbers count."""
    text = prompt_of(45, seed=1)
    linear = original("llama_linear_positions")
    for keys in ({"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):

        def older(header: dict[str, Any], tensors: Any, keys: dict[str, float] = keys) -> None:
            for name in ("type", "factor"):
                del header[f"llama.rope.scaling.{name}"]
            header.update({f"llama.{key}": value for key, value in keys.items()})

        read = load_model(write_model(tmp_path / "m.gguf", linear, change=older), backend="native", dtype="float32")
        assert near(plain_logits(read.model, text), plain_logits(linear, text)), keys
    betas = {"beta_fast": 4.0, "beta_slow": 2.0}
    yarn = new_model("llama", rope_parameters={**YARN, **betas})

    def with_betas(header: dict[str, Any], tensors: Any) -> None:
        header.update({f"llama.rope.scaling.yarn_{name}": value for name, value in betas.items()})

    read = load_model(write_model(tmp_path / "y.gguf", yarn, change=with_betas), backend="native", dtype="float32")
    assert near(plain_logits(read.model, text), plain_logits(yarn, text))
    without = load_model(write_model(tmp_path / "w.gguf", yarn), backend="native", dtype="float32")
    assert not near(plain_logits(without.model, text), plain_logits(yarn, text)), "they make a difference"


@pytest.mark.parametrize("factor", [0.8, 3.0])
def test_the_attention_factor_of_longrope(tmp_path: Path, factor: float) -> None:
    model_type, values = FAMILIES["phi3_long"]
    model = new_model(model_type, **{**values, "rope_parameters": {**LONG, "attention_factor": factor}})
    change = partial(with_entry, "phi3.rope.scaling.attn_factor", factor)
    read = load_model(write_model(tmp_path / "m.gguf", model, change=change), backend="native", dtype="float32")
    usual = load_model(write_model(tmp_path / "u.gguf", model), backend="native", dtype="float32")
    for text in texts():
        expected = plain_logits(model, text)
        assert near(plain_logits(read.model, text), expected) and near(rows(read, text), rows(load_model(model), text))
        assert not near(plain_logits(usual.model, text), expected), "it makes a difference"


@pytest.mark.parametrize(("key", "value"), [("type", "yarn"), ("factor", 4.0)])
def test_longrope_and_another_scaling(tmp_path: Path, key: str, value: Any) -> None:
    change = partial(with_entry, f"phi3.rope.scaling.{key}", value)
    file = write_model(tmp_path / "m.gguf", original("phi3_long"), change=change)
    with pytest.raises(
        LoadError, match=r"m.gguf scales rotary positions by .* and by LongRoPE's factors, which is not"
    ):
        load_model(file, backend="native")


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_windows_by_layer_or_by_their_period(tmp_path: Path, name: str) -> None:
    model = original(name)
    types = model.config.layer_types
    text, key = prompt_of(45, seed=1), gguf_key(model, "attention.sliding_window_pattern")
    patterns: list[Any] = [[kind == "sliding_attention" for kind in types], types.index("full_attention") + 1]
    for pattern in patterns:
        change = partial(with_entry, key, pattern)
        read = load_model(write_model(tmp_path / "m.gguf", model, change=change), backend="native", dtype="float32")
        assert near(plain_logits(read.model, text), plain_logits(model, text)), pattern
    for pattern, words in (
        ([True], f"m.gguf has 1 values in {key} for {len(types)} layers: convert the model again"),
        (0, f"m.gguf has {key} 0, which is not supported here: "),
    ):
        file = write_model(tmp_path / "m.gguf", model, change=partial(with_entry, key, pattern))
        with pytest.raises(LoadError, match=words):
            load_model(file, backend="native")


@pytest.mark.skipif(not has_llama_cpp(), reason="llama-cpp-python is an extra (pip install 'foretoken[gguf]')")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_THERE])
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    from foretoken.models.other.llama_cpp_model import LlamaCppModel

    file = write_model(tmp_path / "m.gguf", original(name))
    reference, read = LlamaCppModel(file, cache_type="f32"), load_model(file, backend="native")
    for text in texts():
        expected = rows(reference, text)
        assert expected.shape == (len(text), VOCAB)
        rounding = 1e-3 if "gemma" in name else ROUNDING  # their table of GELU is in float16
        assert (rows(read, text) - expected).abs().max() < rounding * expected.abs().max()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "qwen3_moe"])
def test_quantised_files_are_their_numbers(tmp_path: Path, name: str, kind: str) -> None:
    """The model of a file equals one in float32 whose weights are what the ``gguf`` package reads in it."""
    import gguf

    model_type, values = FAMILIES[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = new_model(model_type, **{**values, **sizes}, experts_implementation="eager")
    file = write_model(tmp_path / "m.gguf", model, kind)

    def widen(header: dict[str, Any], tensors: dict[str, Stored]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = Stored(gguf.dequantize(tensor.data, tensor.kind).copy(), gguf.GGMLQuantizationType.F32)

    wide = write_model(tmp_path / "wide.gguf", model, kind, widen)
    expected = rows(load_model(wide, backend="native"), prompt_of(20))
    assert near(rows(load_model(file, backend="native", dtype="float32"), prompt_of(20)), expected)
    assert not torch.equal(expected, rows(load_model(write_model(tmp_path / "f.gguf", model)), prompt_of(20)))


def test_quantised_experts_are_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To the model's dtype, which is told in a line; unquantised experts keep their numbers without one."""
    import gguf

    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    model = new_model("qwen3_moe", **{**FAMILIES["qwen3_moe"][1], **sizes}, experts_implementation="eager")
    file = write_model(tmp_path / "m.gguf", model, "Q8_0")
    read = load_model(file, backend="native")
    lines = [record.message for record in caplog.records if "experts" in record.message]
    line = f"no kernel multiplies by them; those of {file} are in bfloat16: 0.0 GiB instead of 0.0"
    assert lines == [f"quantised experts: refused, {line}"]
    assert read.model.stored_as == "GGUF Q8_0 F32, with experts and activations in"
    tensors = gguf.GGUFReader(file).tensors
    numbers = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in tensors}
    for index, layer in enumerate(read.model.model.layers):
        gate, up, down = (numbers[f"blk.{index}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(layer.mlp.experts.gate_up_proj, torch.cat([gate, up], 1).bfloat16())
        assert torch.equal(layer.mlp.experts.down_proj, down.bfloat16())
    caplog.clear()
    plain = load_model(write_model(tmp_path / "p.gguf", model, "BF16"), backend="native")
    assert plain.model.stored_as == "GGUF BF16 F32, with activations in"
    assert torch.equal(
        plain.model.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj.bfloat16()
    )
    assert not [record for record in caplog.records if "experts" in record.message]


def test_activations_beyond_float16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights in F16 keep their numbers; only what float16 cannot hold is computed in bfloat16 by default."""
    model = original("gemma3")
    small = load_model(write_model(tmp_path / "small.gguf", model, "F16"), backend="native")
    assert small.model.dtype == torch.float16
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.data.fill_(3e4)
    file = write_model(tmp_path / "large.gguf", model, "F16")
    read = load_model(file, backend="native")
    line = f"float16: refused, the logits of {file} are not finite in it on a short text; activations are bfloat16"
    lines = [record.message for record in caplog.records if record.message.startswith("float16")]
    assert len(lines) == 1 and lines[0].startswith(line) and "\n" not in lines[0]
    assert read.model.dtype == torch.bfloat16 and read.model.stored_as == "GGUF F16, with activations in"
    text = prompt_of(9)
    expected = rows(load_model(file, backend="native", dtype="float32"), text)
    assert (rows(read, text) - expected).abs().max() < 0.1 * expected.abs().max()
    told = load_model(file, backend="native", dtype="float16")
    assert told.model.dtype == torch.float16 and not rows(told, text).isfinite().all()
