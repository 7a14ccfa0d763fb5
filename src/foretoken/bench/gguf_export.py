"""A Llama-like target as a GGUF file, in its own dtype, for llama.cpp to run the same weights.

Prompts and outputs are token ids, so that the file holds no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "mistral")
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Transformers' module below a layer -> llama.cpp's tensor below ``blk.N``."""


def write_gguf(model: Any, file: Path) -> None:
    """Write the weights, one tensor in memory at a time.

    Args:
        model: a ``PreTrainedModel`` of the Llama family (packed layers too).
        file: written anew.

    Raises:
        ValueError: another architecture, or the ``gguf`` package is missing.
        OSError: the file cannot be written.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in FAMILIES or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"cannot write a {config.model_type} model with {rope.get('rope_type', 'default')} positions as GGUF: "
            f"only {' and '.join(FAMILIES)} with default ones"
        )
    gguf = gguf_package()
    writer = gguf.GGUFWriter(file, "llama")
    _describe(writer, config, gguf)
    for name, shape, dtype in ((name, tensor.shape, tensor.dtype) for name, tensor in tensors(model)):
        kind, item = _kind(dtype, gguf)
        size = item * shape.numel()
        writer.add_tensor_info(name, _byte_shape(shape, item), _uint8(), size, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in tensors(model):
            writer.write_tensor_data(_bytes(tensor))
    finally:
        writer.close()


def gguf_package() -> Any:
    """The ``gguf`` package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("writing a GGUF file needs the gguf package: pip install gguf") from None
    return gguf


def tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's names and the weights, made one after the other; norms are float32."""
    config = model.config.get_text_config()
    yield "token_embd.weight", model.model.embed_tokens.weight.detach()
    for i, layer in enumerate(model.model.layers):
        for module, name in NAMES.items():
            found = layer.get_submodule(module)
            for part in ("weight", "bias"):
                tensor = getattr(found, part, None)
                if tensor is not None:
                    yield f"blk.{i}.{name}.{part}", _ordered(name, tensor.detach(), config)
    yield "output_norm.weight", model.model.norm.weight.detach().float()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach()


def _ordered(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Queries and keys with the two halves of every head interleaved: llama.cpp rotates neighbours for this family."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if heads is not None:
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() if tensor.dim() == 1 else tensor


def _describe(writer: Any, config: Any, gguf: Any) -> None:
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
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
    writer.add_tokenizer_model("no_vocab")


def _kind(dtype: torch.dtype, gguf: Any) -> tuple[Any, int]:
    """GGUF's type and the bytes of one number."""
    kinds = gguf.GGMLQuantizationType
    known = {torch.bfloat16: (kinds.BF16, 2), torch.float16: (kinds.F16, 2), torch.float32: (kinds.F32, 4)}
    if dtype not in known:
        raise ValueError(f"llama.cpp runs no {dtype} weights: load the target with dtype=bfloat16 or float32")
    return known[dtype]


def _uint8() -> Any:
    import numpy as np

    return np.dtype(np.uint8)


def _byte_shape(shape: torch.Size, item: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * item)


def _bytes(tensor: Tensor) -> Any:
    """The numbers as bytes, in rows."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy()
