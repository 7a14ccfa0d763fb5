"""Tiny GGUF files of the families that we read, in the layout that llama.cpp's converters give them.

Names of tensors and keys of the header come from the ``gguf`` package's own tables, not from ours.  What the converters
change beside names: queries and keys of llama-like families hold the halves of a head interleaved, Gemma's norms hold
one more, and stacked experts are cut into gates and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}
"""``model_type`` of Transformers -> the architecture's name in GGUF."""
INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "granitemoe")
ONE_MORE = ("gemma", "gemma2", "gemma3_text")
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
}
"""Where in a block of a type its float16 numbers begin."""

Change = Callable[[dict[str, Any], dict[str, "Stored"]], None]


class Stored:
    """A tensor of a file: numbers, or the bytes of a type."""

    def __init__(self, data: np.ndarray[Any, Any], kind: Quant) -> None:
        self.data, self.kind = data, kind


def random_bytes(kind: str, out: int, width: int, seed: int = 0, size: float = 0.05) -> np.ndarray[Any, Any]:
    """Any bytes [out, k] of a quantised type, but for scales, which are about ``size``."""
    rng = np.random.default_rng(seed)
    block, in_bytes = gguf.GGML_QUANT_SIZES[Quant[kind]]
    data = rng.integers(0, 256, (out * width // block, in_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = rng.normal(0, size, len(data)).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(out, -1)


def stored(numbers: Tensor, kind: str) -> Stored:
    """A tensor in a type that the ``gguf`` package can write."""
    wide = numbers.detach().float().numpy().copy()
    if kind == "F32":
        return Stored(wide, Quant.F32)
    return Stored(gguf.quantize(wide, Quant[kind]), Quant[kind])


def write_model(file: Path, model: Any, kind: str = "F32", change: Change | None = None) -> Path:
    """A Transformers model as a file without a vocabulary; ``change`` may alter header and tensors before.

    Matrices are stored as ``kind``, vectors as float32.
    """
    return write_file(file, header_of(model), dict(_tensors(model, kind)), change)


def write_file(
    file: Path, header: Mapping[str, Any], tensors: Mapping[str, Stored], change: Change | None = None
) -> Path:
    """A file of a header and tensors."""
    header, tensors = dict(header), dict(tensors)
    if change is not None:
        change(header, tensors)
    writer = gguf.GGUFWriter(file, header.pop("general.architecture"))
    for key, value in header.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=None if tensor.kind == Quant.F32 else tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def header_of(model: Any) -> dict[str, Any]:
    """What llama.cpp's converters say of a model."""
    config, keys = model.config, gguf.Keys
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    below: dict[str, Any] = {
        keys.LLM.VOCAB_SIZE: config.vocab_size,
        keys.LLM.CONTEXT_LENGTH: config.max_position_embeddings,
        keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
        keys.LLM.BLOCK_COUNT: config.num_hidden_layers,
        keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
        keys.Attention.HEAD_COUNT: config.num_attention_heads,
        keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
        keys.Attention.KEY_LENGTH: head,
        keys.Attention.VALUE_LENGTH: head,
        keys.Attention.LAYERNORM_RMS_EPS: float(config.rms_norm_eps),
        **_rope(config, head),
        **_special(config),
    }
    header = {key.format(arch=name): value for key, value in below.items() if value is not None}
    return {"general.architecture": name, "tokenizer.ggml.model": "no_vocab", **header}


def _rope(config: Any, head: int) -> dict[str, Any]:
    keys, rope = gguf.Keys.Rope, config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    fields = {
        keys.FREQ_BASE: float(rope["rope_theta"]),
        keys.DIMENSION_COUNT: int(head * rope.get("partial_rotary_factor", 1.0)),
    }
    if local is not None:
        fields[keys.FREQ_BASE_SWA] = float(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        fields[keys.SCALING_TYPE], fields[keys.SCALING_FACTOR] = rope["rope_type"], float(rope["factor"])
        fields[keys.SCALING_ORIG_CTX_LEN] = rope.get("original_max_position_embeddings")
    elif rope["rope_type"] == "longrope":
        fields[keys.SCALING_ORIG_CTX_LEN] = config.original_max_position_embeddings
    return fields


def _special(config: Any) -> dict[str, Any]:
    """Keys of some families."""
    llm, attention, kind = gguf.Keys.LLM, gguf.Keys.Attention, config.model_type
    fields: dict[str, Any] = {}
    if kind in ("granite", "granitemoe"):
        fields |= {
            attention.SCALE: float(config.attention_multiplier),
            llm.EMBEDDING_SCALE: float(config.embedding_multiplier),
            llm.RESIDUAL_SCALE: float(config.residual_multiplier),
            llm.LOGIT_SCALE: float(config.logits_scaling),
        }
    if kind in ("gemma2", "gemma3_text", "olmo3", "phi3"):
        fields[attention.SLIDING_WINDOW] = config.sliding_window
    if kind == "olmo3":
        fields[attention.SLIDING_WINDOW_PATTERN] = [t == "sliding_attention" for t in config.layer_types]
    if kind == "gemma2":
        fields[llm.ATTN_LOGIT_SOFTCAPPING] = float(config.attn_logit_softcapping)
        fields[llm.FINAL_LOGIT_SOFTCAPPING] = float(config.final_logit_softcapping)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        fields |= {llm.EXPERT_COUNT: experts, llm.EXPERT_USED_COUNT: config.num_experts_per_tok}
    if kind == "qwen3_moe":
        fields[llm.EXPERT_FEED_FORWARD_LENGTH] = config.moe_intermediate_size
    return fields


def _tensors(model: Any, kind: str) -> Iterator[tuple[str, Stored]]:
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for key, weight in model.named_parameters():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, part in _parts(key, weight, names):
            yield name, stored(_laid_out(name, part, config), kind if part.dim() > 1 and "inp" not in name else "F32")
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", stored(torch.tensor(rope[f"{length}_factor"]), "F32")
    if rope.get("rope_type") == "llama3":
        # The converters write what every frequency is divided by.
        plain = rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        yield "rope_freqs.weight", stored(1 / (plain * model.model.rotary_emb.inv_freq), "F32")


def _parts(key: str, weight: Tensor, names: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that a parameter becomes; experts are stacked in both layouts."""
    module, _, leaf = key.rpartition(".")
    if leaf in ("weight", "bias"):
        name = names.get_name(module) or names.get_name(f"{module}.layer")  # as Granite's routers were called
        yield f"{name}.{leaf}", weight
        return
    block = key.split(".")[2]
    if leaf == "down_proj":
        yield f"blk.{block}.ffn_down_exps.weight", weight
        return
    gate, up = weight.chunk(2, 1)
    yield f"blk.{block}.ffn_gate_exps.weight", gate
    yield f"blk.{block}.ffn_up_exps.weight", up


def _laid_out(name: str, weight: Tensor, config: Any) -> Tensor:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type in INTERLEAVED and heads is not None:
        return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if config.model_type in ONE_MORE and name.endswith("norm.weight"):
        return weight.float() + 1
    return weight
