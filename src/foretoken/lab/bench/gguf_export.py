"""Export of a Llama-like target to GGUF in its own dtype, so that llama.cpp runs the same weights.

Without a tokenizer the file has no vocabulary, and prompts and outputs are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.models.gguf.architectures import LLAMA

KINDS = {"BF16": 32, "F16": 1, "Q8_0": 7, "Q4_K_M": 15, "Q4_0": 2, "Q5_K_M": 17, "Q6_K": 18}
"""``llama_ftype`` of :func:`quantize_gguf` by name."""


def write_gguf(model: Any, file: Path, tokenizer: Any | None = None) -> None:
    """Write the weights of a ``PreTrainedModel`` of the Llama family (packed layers too), one tensor in memory at a
    time.

    The tokenizer must be a byte-level BPE that splits words as GPT-2 does, like the built-in one.  Raises
    ``ValueError`` for other tokenizers and architectures, and for settings that such a file does not record.
    """
    import gguf
    import numpy as np

    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    families = ("llama", "mistral")
    if config.model_type not in families or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"cannot write a {config.model_type} model with {rope.get('rope_type', 'default')} positions as GGUF: "
            f"only {' and '.join(families)} with default ones"
        )
    _check_fields(config)
    vocabulary = None if tokenizer is None else _vocabulary(tokenizer, int(config.vocab_size), gguf)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(_file_type(model.model.embed_tokens.weight.dtype, gguf))
    _describe(writer, config)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_tokenizer(writer, tokenizer, *vocabulary)
    for name, shape, dtype in ((name, tensor.shape, tensor.dtype) for name, tensor in tensors(model)):
        kind, item = _kind(dtype, gguf)
        in_bytes = (*shape[:-1], shape[-1] * item)
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), item * shape.numel(), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in tensors(model):
            writer.write_tensor_data(_bytes(tensor))
    finally:
        writer.close()


def _check_fields(config: Any) -> None:
    """Refuse what llama.cpp would run differently: its ``llama`` has full attention and SiLU."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"cannot write a {config.model_type} model with sliding_window={window} as GGUF: only full attention is "
            f"recorded; set max_position_embeddings to {window}, within which a window makes no difference"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"cannot write a model with hidden_act={config.hidden_act} as GGUF: only silu is recorded")


def tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's tensor names with weights, made one at a time; norms are float32."""
    config = model.config.get_text_config()
    yield "token_embd.weight", model.model.embed_tokens.weight.detach()
    for i, layer in enumerate(model.model.layers):
        for module, name in LLAMA.items():
            submodule = layer.get_submodule(module)
            for part in ("weight", "bias"):
                tensor = getattr(submodule, part, None)
                if tensor is not None:
                    yield f"blk.{i}.{name}.{part}", _ordered(name, tensor.detach(), config)
    yield "output_norm.weight", model.model.norm.weight.detach().float()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach()


def _ordered(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Interleave the two halves of every query and key head: llama.cpp rotates neighbours for this family."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if heads is not None:
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() if tensor.dim() == 1 else tensor


def _describe(writer: Any, config: Any) -> None:
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _vocabulary(tokenizer: Any, size: int, gguf: Any) -> tuple[list[str], list[int], list[str]]:
    """Names and types of ``size`` tokens, and the merges."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = backend.get("pre_tokenizer") or {}
    plain = splitter.get("type") == "ByteLevel" and splitter.get("use_regex") and not splitter.get("add_prefix_space")
    if backend["model"]["type"] != "BPE" or not plain or backend.get("normalizer"):
        raise ValueError("only a byte-level BPE tokenizer that splits as GPT-2 does can be written into a GGUF file")
    kinds = gguf.TokenType
    names, types = [f"[PAD{i}]" for i in range(size)], [int(kinds.UNUSED)] * size
    special = set(tokenizer.all_special_ids)
    for name, index in tokenizer.get_vocab().items():
        names[index], types[index] = name, int(kinds.CONTROL if index in special else kinds.NORMAL)
    merges = [m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]]
    return names, types, merges


def _add_tokenizer(writer: Any, tokenizer: Any, names: list[str], types: list[int], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _kind(dtype: torch.dtype, gguf: Any) -> tuple[Any, int]:
    """GGUF type and bytes per number."""
    kinds = gguf.GGMLQuantizationType
    types = {torch.bfloat16: (kinds.BF16, 2), torch.float16: (kinds.F16, 2), torch.float32: (kinds.F32, 4)}
    if dtype not in types:
        raise ValueError(f"llama.cpp does not support {dtype} weights: load the target with dtype=bfloat16 or float32")
    return types[dtype]


def _file_type(dtype: torch.dtype, gguf: Any) -> Any:
    kinds = gguf.LlamaFileType
    types = {torch.bfloat16: kinds.MOSTLY_BF16, torch.float16: kinds.MOSTLY_F16}
    return types.get(dtype, kinds.ALL_F32)


def _bytes(tensor: Tensor) -> Any:
    """The numbers as bytes, in rows."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy()


def quantize_gguf(source: Path, file: Path, kind: str, threads: int = 1) -> None:
    """Quantize a GGUF file (bfloat16, float16 or float32) with llama.cpp; ``kind`` is one of :data:`KINDS`.  Raises
    ``ValueError`` for another kind, an unreadable file, or if llama-cpp-python is missing."""
    from foretoken.models.other.llama_cpp import library

    if kind not in KINDS:
        raise ValueError(f"unknown kind of weights {kind!r}: choose one of {', '.join(KINDS)}")
    llama = library()
    options = llama.c.llama_model_quantize_default_params()
    options.ftype, options.nthread = KINDS[kind], threads
    llama.errors.clear()
    if llama.c.llama_model_quantize(str(source).encode(), str(file).encode(), options) != 0:
        raise ValueError(f"llama.cpp cannot write {kind} weights of {source}: {llama.reason()}")
