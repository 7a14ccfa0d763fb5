"""GGUF architectures in Transformers: configurations and tensor names.

Header keys and tensor names are those of ``gguf/constants.py`` in llama.cpp's ``gguf`` package;
:mod:`foretoken.models.gguf.network` undoes the weight changes of its converters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foretoken.models.gguf.file import GgufError, GgufFile, UncoveredError
from foretoken.models.gguf.grouped import numbers_of

Options = dict[str, Any]

ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
SANDWICH = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OLMO = {
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LLAMA = {**ATTENTION, **MLP, **NORMS}
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Stacked experts: parameter below ``experts`` -> the tensors that it concatenates."""

YARN = {"attn_factor": 1, "ext_factor": 1, "log_multiplier": 0}
"""Numbers of YaRN that are read with one value only."""


@dataclass(frozen=True)
class Architecture:
    """One model architecture.

    Attributes:
        model_type: its name in Transformers.
        names: module of a layer -> tensor of a block, without ``.weight``.
        options: configuration values beyond the common ones.
        permuted: whether query and key rows are stored for rotation of neighbours instead of halves.
        norm_offset: addend already included in the norm weights.
        router: the module of a layer that selects experts; empty without experts.
    """

    model_type: str
    names: Mapping[str, str] = field(repr=False)
    options: Callable[[GgufFile], Options] = lambda file: {}
    permuted: bool = False
    norm_offset: float = 0.0
    router: str = ""


def _llama(file: GgufFile) -> Options:
    biased = [f"blk.0.attn_{name}.bias" in file.tensors for name in ("q", "k", "v", "output")]
    if any(biased) and not all(biased):
        raise UncoveredError(f"{file.path} has biases in only some attention projections, which is not supported here")
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _granite(file: GgufFile) -> Options:
    return {
        **_llama(file),
        "attention_multiplier": file.need("attention.scale"),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
    }


def _experts(file: GgufFile) -> Options:
    return {"num_local_experts": file.need("expert_count"), "num_experts_per_tok": file.need("expert_used_count")}


def _granite_moe(file: GgufFile) -> Options:
    if file.get("expert_shared_feed_forward_length"):
        raise UncoveredError(f"{file.path} has shared experts, which are not supported here")
    return {**{k: v for k, v in _granite(file).items() if k != "mlp_bias"}, **_experts(file)}


def _qwen3_moe(file: GgufFile) -> Options:
    return {
        **_olmoe(file),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # not in the header; llama.cpp always does it
    }


def _olmoe(file: GgufFile) -> Options:
    return {"num_experts": file.need("expert_count"), "num_experts_per_tok": file.need("expert_used_count")}


def _gemma_scale(file: GgufFile) -> int:
    """Square of the attention's divisor; in the 27B models, recognised by their layers, it depends on the model's
    width."""
    if file.need("block_count") == {"gemma2": 46, "gemma3": 62}[file.architecture]:
        return int(file.need("embedding_length")) // int(file.need("attention.head_count"))
    return head_dim(file)


def _gemma2(file: GgufFile) -> Options:
    return {
        "query_pre_attn_scalar": _gemma_scale(file),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "sliding_window": file.get("attention.sliding_window", 4096),
        "layer_types": _windows(file, 2),
    }


def _gemma3(file: GgufFile) -> Options:
    return {
        "query_pre_attn_scalar": _gemma_scale(file),
        "sliding_window": file.need("attention.sliding_window"),
        "layer_types": _windows(file, 6),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope_of(file, 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": _positive(file, "rope.freq_base_swa", 10000.0)},
        },
    }


def _olmo3(file: GgufFile) -> Options:
    return {
        "sliding_window": file.need("attention.sliding_window"),
        "layer_types": _windows(file, 4),
        # Only layers with full attention scale their positions.
        "rope_parameters": {
            "full_attention": _rope_of(file),
            "sliding_attention": {"rope_type": "default", "rope_theta": _positive(file, "rope.freq_base", 10000.0)},
        },
    }


def _windows(file: GgufFile, every: int) -> list[str]:
    """Layer types, stored as a list that says which layers have windows, or as a number: one in ``every`` has none."""
    key = "attention.sliding_window_pattern"
    count, pattern = int(file.need("block_count")), file.get(key, every)
    if isinstance(pattern, list):
        if len(pattern) != count:
            raise GgufError(
                f"{file.path} has {len(pattern)} values in {file.architecture}.{key} for {count} layers: convert the "
                "model again"
            )
        return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    every = int(pattern)
    if every < 1:
        raise UncoveredError(f"{file.path} has {file.architecture}.{key} {every}, which is not supported here")
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def _phi3(file: GgufFile) -> Options:
    window = int(file.get("attention.sliding_window", 0))
    return {
        "sliding_window": window if 0 < window < file.need("context_length") else None,
        "original_max_position_embeddings": file.get(
            "rope.scaling.original_context_length", file.need("context_length")
        ),
        "rope_parameters": _rope_of(file, partial=int(file.get("rope.dimension_count", 0)) / head_dim(file) or 1.0),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", LLAMA, _llama, permuted=True),
    "qwen2": Architecture("qwen2", LLAMA, lambda file: {"use_sliding_window": False}),
    "qwen3": Architecture("qwen3", {**LLAMA, **HEAD_NORMS}),
    "gemma": Architecture("gemma", LLAMA, norm_offset=1.0),
    "gemma2": Architecture("gemma2", {**ATTENTION, **MLP, **SANDWICH}, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", {**ATTENTION, **HEAD_NORMS, **MLP, **SANDWICH}, _gemma3, norm_offset=1.0),
    "phi3": Architecture(
        "phi3",
        {
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            **NORMS,
        },
        _phi3,
    ),
    "granite": Architecture("granite", LLAMA, _granite, permuted=True),
    "olmo2": Architecture("olmo2", OLMO),
    "olmo3": Architecture("olmo3", OLMO, _olmo3),
    "mixtral": Architecture("mixtral", {**ATTENTION, **NORMS}, _experts, permuted=True, router="mlp.gate"),
    "qwen3moe": Architecture("qwen3_moe", {**ATTENTION, **HEAD_NORMS, **NORMS}, _qwen3_moe, router="mlp.gate"),
    "olmoe": Architecture("olmoe", {**ATTENTION, **HEAD_NORMS, **NORMS}, _olmoe, router="mlp.gate"),
    "granitemoe": Architecture(
        "granitemoe", {**ATTENTION, **NORMS}, _granite_moe, permuted=True, router="block_sparse_moe.router"
    ),
}
UNNAMED = ("mixtral", "olmo3")
"""Architectures that have another name in the header: ``llama`` with experts, and ``olmo2`` with windows."""


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.  Raises ``UncoveredError`` if it is unsupported."""
    name = file.architecture
    with header_faults(file):
        if name == "llama" and int(file.get("expert_count", 0)):
            name = "mixtral"
        if name == "olmo2" and file.get("attention.sliding_window"):
            name = "olmo3"
    if name not in ARCHITECTURES:
        covered = ", ".join(key for key in ARCHITECTURES if key not in UNNAMED)
        raise UncoveredError(f"{file.path} has the architecture {name!r}, and only {covered} are supported here")
    return ARCHITECTURES[name]


def config_of(file: GgufFile, architecture: Architecture) -> Any:
    """The Transformers configuration for a header."""
    with header_faults(file):
        return _config(file, architecture)


@contextmanager
def header_faults(file: GgufFile) -> Iterator[None]:
    """Convert the various errors that Transformers raises for bad header values to ``GgufError``."""
    try:
        yield
    except (GgufError, ImportError):
        raise
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:120]
        raise GgufError(
            f"the header of {file.path} does not describe a valid {file.architecture} model ({cause}): convert the "
            "model again"
        ) from error


def _config(file: GgufFile, architecture: Architecture) -> Any:
    from transformers import AutoConfig

    if file.get("attention.causal") is False:
        raise GgufError(
            f"{file.path} ({file.architecture}) is not a causal language model: give one that generates from left to "
            "right"
        )
    count = int(file.need("block_count"))
    if count < 1 or not any(name.startswith(f"blk.{count - 1}.") for name in file.tensors):
        raise GgufError(f"{file.path} lacks tensors of layer {count} of {count}: it is incomplete, copy it again")
    width = head_dim(file)
    heads = int(_single(file, "attention.head_count"))
    shared = int(_single(file, "attention.head_count_kv", heads))
    if shared < 1 or heads % shared:
        key = f"{file.architecture}.attention.head_count_kv"
        raise GgufError(f"{file.path} has {key} {shared} for {heads} heads: convert the model again")
    values: Options = {
        "vocab_size": _vocabulary(file),
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": _single(file, "feed_forward_length"),
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": width,
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": _positive(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "pad_token_id": None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope_of(file),
        "_name_or_path": str(file.path),
    }
    values.update(architecture.options(file))
    for kind in ("", "_swa"):
        rotated = int(file.get(f"rope.dimension_count{kind}", width))
        if rotated != width and (kind or "partial_rotary_factor" not in values["rope_parameters"]):
            raise UncoveredError(
                f"{file.path} rotates {rotated} of {width} dimensions of a head, which is not supported here"
            )
    return AutoConfig.for_model(architecture.model_type, **values)


def head_dim(file: GgufFile) -> int:
    width = int(file.get("attention.key_length", 0))
    heads = int(_single(file, "attention.head_count"))
    if heads < 1:
        raise GgufError(f"{file.path} has {file.architecture}.attention.head_count {heads}: convert the model again")
    width = width or int(file.need("embedding_length")) // heads
    if int(file.get("attention.value_length", width)) != width:
        raise UncoveredError(f"{file.path} has keys and values of different widths, which are not supported here")
    return width


def _rope_of(file: GgufFile, base: float = 10000.0, partial: float = 1.0) -> Options:
    rope: Options = {"rope_type": "default", "rope_theta": _positive(file, "rope.freq_base", base)}
    if partial != 1.0:
        rope["partial_rotary_factor"] = partial
    # Older files use another name for the factor, without a type, which is linear.
    factor = _positive(file, "rope.scaling.factor", _positive(file, "rope.scale_linear", 1.0))
    kind = file.get("rope.scaling.type", "linear")
    if "rope_factors_long.weight" in file.tensors:
        return {**rope, **_longrope_of(file, kind, factor)}
    _check_usual(file, {"rope.scaling.attn_factor": 1})
    if kind in ("linear", "yarn") and factor != 1.0:
        rope.update(rope_type=kind, factor=factor)
    elif kind not in ("none", "linear", "yarn"):
        raise UncoveredError(f"{file.path} scales rotary positions by {kind!r}, which is not supported here")
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = int(file.need("rope.scaling.original_context_length"))
        rope.update(_yarn_of(file))
    return rope


def _longrope_of(file: GgufFile, kind: str, factor: float) -> Options:
    """LongRoPE parameters.  llama.cpp applies the header's type and factor in addition to the frequencies' factors."""
    if kind not in ("none", "linear", "longrope") or factor != 1.0:
        raise UncoveredError(
            f"{file.path} scales rotary positions by {kind!r} {factor:g} and by LongRoPE's factors, which is not "
            "supported here"
        )
    rope: Options = {
        f"{name}_factor": numbers_of(file.tensors[f"rope_factors_{name}.weight"]).float().tolist()
        for name in ("long", "short")
    }
    if file.get("rope.scaling.attn_factor") is not None:  # without it, it follows from the context lengths
        rope["attention_factor"] = _positive(file, "rope.scaling.attn_factor")
    original = int(file.need("rope.scaling.original_context_length"))
    return {**rope, "rope_type": "longrope", "original_max_position_embeddings": original}


def _yarn_of(file: GgufFile) -> Options:
    """YaRN parameters that differ from the defaults."""
    keys = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    overrides = {name: _positive(file, key) for name, key in keys.items() if file.get(key)}
    _check_usual(file, {f"rope.scaling.yarn_{name}": usual for name, usual in YARN.items()})
    return overrides


def _check_usual(file: GgufFile, usual: Mapping[str, float]) -> None:
    """Refuse other values of keys below the architecture's name."""
    for key, value in usual.items():
        if float(file.get(key, value)) != value:
            raise UncoveredError(
                f"{file.path} has {file.architecture}.{key} {file.get(key)}, which is not supported here"
            )


def _positive(file: GgufFile, key: str, usual: float | None = None) -> float:
    value = float(file.need(key) if usual is None else file.get(key, usual))
    if not 0 < value < math.inf:
        raise GgufError(f"{file.path} has {file.architecture}.{key} {value}: convert the model again")
    return value


def _vocabulary(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GgufError(f"{file.path} lacks token_embd.weight [vocabulary, width]: it is incomplete, copy it again")
    return table.shape[0]


def _single(file: GgufFile, key: str, default: Any = None) -> Any:
    """A value that may be a list with one number per layer; all must be equal."""
    value = file.need(key) if default is None else file.get(key, default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UncoveredError(f"{file.path} has layers with different {key}, which are not supported here")
    return value[0]
