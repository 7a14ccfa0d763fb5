"""A small hybrid language model, optionally started from a trained Llama: every second layer is recurrent.

The layers are those of Qwen3.5 (Gated DeltaNet, arXiv 2412.06464, and gated full attention).  A model with 2 L layers
started from a Llama with L layers computes nearly the same function: its full-attention layers are the Llama's, and its
recurrent layers add nothing yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.loading.networks import from_pretrained

if TYPE_CHECKING:
    from foretoken.training.config import LmConfig

DECAYS = (0.02, 1.0)
"""exp(A_log) of the first and the last recurrent head: the first remembers hundreds of tokens, the last a few."""


ROTATION = "rope_parameters"
FUNCTION = (ROTATION, "rms_norm_eps", "tie_word_embeddings", "head_dim", "hidden_act")
"""Configuration keys that change what the same weights compute."""


def build_hybrid(config: LmConfig, eos_token_id: int) -> Any:
    """A freshly initialised text-only ``Qwen3_5ForCausalLM`` (float32, tied embeddings) with an even number of
    layers."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    if config.layers % 2:
        raise ValueError(
            f"a hybrid has a full-attention layer after every recurrent one: layers={config.layers} must be even"
        )
    head_dim = config.hidden // config.heads
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **common_shape(config, eos_token_id),
            layer_types=["linear_attention", "full_attention"] * (config.layers // 2),
            head_dim=head_dim,
            linear_num_key_heads=config.heads,
            linear_num_value_heads=config.heads,
            # Width of a recurrent layer's keys, as a share of its values'
            linear_key_head_dim=round(head_dim * 0.5),
            linear_value_head_dim=head_dim,
            max_position_embeddings=max(config.context, 1024),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        )
    )


def common_shape(config: LmConfig, eos_token_id: int) -> dict[str, Any]:
    """Configuration keys that a hybrid and a Llama share."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_token_id),
    }


@torch.no_grad()
def start_from_llama(model: Any, source: Path, tokens: NDArray[Any]) -> None:
    """Copy the Llama in the folder ``source`` into the hybrid ``model``, which has twice its layers.

    A gate of sigmoid(0) is undone by doubling the output projection.  The norms of queries and keys, which a Llama
    lacks, get the mean size of its queries and keys on the beginning of ``tokens`` [n].  Raises ``ValueError`` for a
    model that is no Llama, has other widths or biases, or computes another function of the same weights.
    """
    llama = from_pretrained(str(source), torch.float32, None).eval()
    hybrid, other = model.config, llama.config
    for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"):
        if other.model_type != "llama" or getattr(hybrid, key) != getattr(other, key):
            raise ValueError(
                f"{source} is not a Llama with {key}={getattr(hybrid, key)}: a hybrid cannot start from it"
            )
    if hybrid.num_hidden_layers != 2 * other.num_hidden_layers:
        raise ValueError(f"a hybrid that starts from {source} must have {2 * other.num_hidden_layers} layers")
    if other.attention_bias or other.mlp_bias:
        raise ValueError(f"{source} has biases in its layers, which a hybrid lacks: training cannot start from it")
    check_same_function(hybrid, other, source)
    model.model.embed_tokens.weight.copy_(llama.model.embed_tokens.weight)
    _norm(model.model.norm, llama.model.norm)
    sizes = _head_sizes(llama, torch.from_numpy(tokens[:1024].astype("int64"))[None])
    for index, layer in enumerate(llama.model.layers):
        recurrent, full = model.model.layers[2 * index], model.model.layers[2 * index + 1]
        for new_layer in (recurrent, full):
            _norm(new_layer.input_layernorm, layer.input_layernorm)
            _norm(new_layer.post_attention_layernorm, layer.post_attention_layernorm)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(new_layer.mlp, name).weight.copy_(getattr(layer.mlp, name).weight)
        recurrent.mlp.down_proj.weight.zero_()
        recurrent.linear_attn.out_proj.weight.zero_()
        decays = torch.logspace(math.log10(DECAYS[0]), math.log10(DECAYS[1]), len(recurrent.linear_attn.A_log))
        recurrent.linear_attn.A_log.copy_(decays.log())
        recurrent.linear_attn.dt_bias.zero_()
        _attention(full.self_attn, layer.self_attn, sizes[index])


def is_llama(folder: Path) -> bool:
    file = folder / "config.json"
    return file.exists() and json.loads(file.read_text(encoding="utf-8")).get("model_type") == "llama"


def check_same_function(config: Any, source: Any, folder: Path) -> None:
    """Raise ``ValueError`` if the configuration of the model in ``folder``, ``source``, differs from ``config`` so that
    the same weights compute another function."""
    for key in FUNCTION:
        present, stored = (getattr(side, key, None) for side in (config, source))
        if key == ROTATION:
            present, stored = _rotation(present), _rotation(stored)
        if present != stored:
            raise ValueError(other_function(folder, key, stored, present))


def other_function(folder: Path, key: str, stored: Any, present: Any) -> str:
    """Error message for a model in ``folder`` whose configuration has another value than the model to train."""
    return f"{folder} has {key}={stored}, and the model to train {key}={present}: training cannot start from it"


def _rotation(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rotary parameters without those that say nothing."""
    usual = {"partial_rotary_factor": 1.0, "type": (rope or {}).get("rope_type")}  # the older name
    return {key: value for key, value in (rope or {}).items() if usual.get(key, ...) != value}


def _attention(attention: Any, source: Any, sizes: Sequence[float]) -> None:
    dim = attention.head_dim
    queries = source.q_proj.weight.view(-1, dim, source.q_proj.in_features)
    attention.q_proj.weight.copy_(torch.cat([queries, torch.zeros_like(queries)], 1).flatten(0, 1))
    attention.k_proj.weight.copy_(source.k_proj.weight)
    attention.v_proj.weight.copy_(source.v_proj.weight)
    attention.o_proj.weight.copy_(2 * source.o_proj.weight)
    for norm, size in zip((attention.q_norm, attention.k_norm), sizes, strict=True):
        norm.weight.fill_(size - 1)


def _norm(norm: Any, source: Any) -> None:
    """A zero-centred norm multiplies by 1 + weight."""
    norm.weight.copy_(source.weight - 1)


def _head_sizes(llama: Any, tokens: Tensor) -> list[tuple[float, float]]:
    """Mean root mean square of queries and keys per layer."""
    by_layer: list[list[float]] = [[] for _ in llama.model.layers]
    hooks = []
    dim = llama.config.head_dim
    for layer, sizes in zip(llama.model.layers, by_layer, strict=True):
        for name in ("q_proj", "k_proj"):
            linear = getattr(layer.self_attn, name)
            hooks.append(
                linear.register_forward_hook(
                    lambda _, __, out, sizes=sizes: sizes.append(
                        float(out.unflatten(-1, (-1, dim)).pow(2).mean(-1).sqrt().mean())
                    )
                )
            )
    try:
        llama.model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [(sizes[0], sizes[1]) for sizes in by_layer]
