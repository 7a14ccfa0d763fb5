"""GGUF files for tests, made on the fly; modules that use them skip where the packages are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toys import llama

WHY = "llama-cpp-python or gguf is not installed (make gguf compiles it for some minutes)"


def need_packages() -> None:
    """Skip the calling module where GGUF files cannot be read or written."""
    pytest.importorskip("llama_cpp", reason=WHY)
    pytest.importorskip("gguf", reason=WHY)


def toy(file: Path, **options: Any) -> Path:
    """A random llama of :func:`toys.llama` in float32, without a vocabulary."""
    import copy

    from foretoken.lab.bench.gguf_export import write_gguf

    write_gguf(copy.deepcopy(llama(**options)).float(), file)
    return file


def builtin(file: Path, role: str) -> Path:
    """The built-in target or draft model in float32, with its tokenizer."""
    from foretoken.lab.bench.gguf_export import write_gguf
    from foretoken.loading import load_model, load_tokenizer

    model: Any = load_model("builtin", role=role, dtype="float32")
    write_gguf(model.model, file, load_tokenizer("builtin"))
    return file


def write(file: Path, architecture: str, numbers: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A file without a vocabulary: numbers by key below the architecture's name, tensors by name."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    for key, value in numbers.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mamba(file: Path, vocab: int = 32, width: int = 32, layers: int = 2) -> Path:
    """A random model with recurrent layers only."""
    rng = np.random.default_rng(0)
    inner, state, rank, kernel = 2 * width, 16, 4, 4
    numbers = {
        "vocab_size": vocab,
        "context_length": 128,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": layers,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    tensors = {"token_embd.weight": rng.normal(size=(vocab, width)), "output_norm.weight": np.ones(width)}
    for i in range(layers):
        layer = {
            "attn_norm.weight": np.ones(width),
            "ssm_in.weight": rng.normal(size=(2 * inner, width)) / width**0.5,
            "ssm_conv1d.weight": rng.normal(size=(inner, kernel)) / 2,
            "ssm_conv1d.bias": np.zeros(inner),
            "ssm_x.weight": rng.normal(size=(rank + 2 * state, inner)) / inner**0.5,
            "ssm_dt.weight": rng.normal(size=(inner, rank)) / 2,
            "ssm_dt.bias": np.zeros(inner),
            "ssm_a": -np.ones((inner, state)),
            "ssm_d": np.ones(inner),
            "ssm_out.weight": rng.normal(size=(width, inner)) / inner**0.5,
        }
        tensors.update({f"blk.{i}.{name}": tensor for name, tensor in layer.items()})
    return write(file, "mamba", numbers, tensors)


def sentencepiece(file: Path) -> Path:
    """A vocabulary with spaces as ``▁``, all bytes and two special tokens, and no weights."""
    import gguf

    kinds = gguf.TokenType
    tokens = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL), ("</s>", 0.0, kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, kinds.BYTE) for byte in range(256)]
    words = ["▁", "▁h", "i", "h", "▁hi", "t", "e", "▁t", "he", "▁the"]
    tokens += [(word, -float(place), kinds.NORMAL) for place, word in enumerate(words)]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([name for name, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([int(kind) for _, _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}</s>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return file
