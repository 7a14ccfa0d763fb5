"""EAGLE-1 and EAGLE-2 in the layout of SafeAILab/EAGLE and SGLang: ``fc`` with its bias, one layer, no head.

Li et al. 2024 (arXiv 2401.15077).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.training.formats.base import (
    DTYPE,
    EMBEDDING,
    Checkpoint,
    NetFormat,
    Target,
    Trained,
    check_sizes,
    renamed,
)
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import (
    interleave_warning,
    layer_config,
    layer_keys,
    layer_names,
    length_warning,
    with_biases,
)
from foretoken.training.formats.values import number

LAYER = "layers.0.self_attn"


class EaglePlain(NetFormat):
    """No ``bias`` key is written: EAGLE's default is true, and SGLang would give the attention a bias."""

    method = "eagle"
    net_config = EagleConfig
    net_class = EagleNet
    architecture = "LlamaForCausalLMEagle"

    def recognises(self, source: Found) -> bool:
        """Whether there are ``fc`` and one layer, but no norm of hidden states (as in EAGLE-3)."""
        names = source.names
        return (
            {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
            and "layers.0.hidden_norm.weight" not in names
            and "speculators_model_type" not in source.config
        )

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = EagleConfig(**trained.config)
        config = {"architectures": [self.architecture], **layer_keys(shape, target)}
        return Checkpoint(config, {theirs: trained.tensors[ours] for ours, theirs in names(shape).items()})

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        check_sizes(checkpoint.config, target)
        if number(checkpoint.config, "num_hidden_layers", default=1) != 1:
            count = checkpoint.config["num_hidden_layers"]
            raise ValueError(f"the checkpoint has {count} layers, and this network has one")
        biases, tensors = with_biases(checkpoint.config, checkpoint.tensors)
        config = {**layer_config(checkpoint.config), **biases}
        shape = EagleConfig(**config)
        self.warnings += length_warning(shape) + interleave_warning(checkpoint.config)
        tensors.setdefault("fc.bias", torch.zeros(config["hidden_size"]))
        check_borrowed(tensors, target)
        # Some checkpoints hold these: no reader uses the norm, and the others are the target's.
        ignored = ("layers.0.input_layernorm.weight", EMBEDDING, "lm_head.weight")
        return Trained(config, renamed(tensors, self.shapes(config), names(shape), ignored))


def names(shape: EagleConfig) -> dict[str, str]:
    """Their names by ours."""
    return {"fc.weight": "fc.weight", "fc.bias": "fc.bias", **layer_names("layer", "layers.0", shape)}


def check_borrowed(tensors: dict[str, Tensor], target: Target) -> None:
    """Raise ``ValueError`` for an embedding or a head other than the target's, which our drafters use."""
    head = tensors.get("lm_head.weight")
    if target.own_embedding(tensors.get(EMBEDDING)) is not None:
        raise ValueError(f"{EMBEDDING} is not the target's embedding, and an EAGLE head uses the target's")
    if head is not None and not target.is_head(head[: target.parts.vocab_size]):
        raise ValueError("lm_head.weight is not the target's projection, and an EAGLE head uses the target's")


class EagleVllm(EaglePlain):
    """The layout of vLLM, whose ``fc`` has no bias.  The bias moves into the attention; a bias of zero is not written.

    With x = fc(...) + b the layer computes x + O A(Qx, Kx, Vx) and nothing else reads x: Q(y + b) = Qy + Qb, and the b
    of the residual can be added after O. The function is the same; vLLM has such biases under ``attention_bias``.
    """

    architecture = "EagleLlamaForCausalLM"

    def recognises(self, source: Found) -> bool:
        """Whether there is a bias after the attention and none of ``fc``; a checkpoint without both has the plain
        layout."""
        folded = f"{LAYER}.o_proj.bias" in source.names and "fc.bias" not in source.names
        return folded and super().recognises(source)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        plain = super().write(trained, target)
        bias = plain.tensors.pop("fc.bias")
        if bool(bias.any()):
            biases = {f"{LAYER}.o_proj.bias": bias, **folded(bias, plain.tensors)}
            for name, value in biases.items():  # beside those of the layer's own, if it has any
                own = plain.tensors.get(name, torch.zeros(()))
                plain.tensors[name] = (own.float() + value.float()).to(DTYPE)
            plain.config["attention_bias"] = True
        return plain

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Move the bias after the attention back to ``fc``, if the others are what it was folded into; else they are
        the attention's own."""
        tensors = dict(checkpoint.tensors)
        bias = tensors.pop(f"{LAYER}.o_proj.bias", None)
        if bias is None or not _are_folded(bias, tensors):
            return super().read(checkpoint, target)
        for name in folded(bias, tensors):
            del tensors[name]
        tensors["fc.bias"] = bias
        return super().read(Checkpoint({**checkpoint.config, "attention_bias": False}, tensors), target)


def _are_folded(bias: Tensor, tensors: dict[str, Tensor]) -> bool:
    for name, expected in folded(bias, tensors).items():
        have = tensors.get(name, torch.zeros(0))
        scale = float(expected.abs().max()) + 1e-6
        if have.shape != expected.shape or not torch.allclose(have.float(), expected.float(), atol=scale / 64):
            return False
    return True


def folded(bias: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Biases of the attention's query, key and value projections that are equivalent to the bias [D]."""
    biases = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors.get(f"{LAYER}.{name}.weight")
        if weight is None or weight.shape[-1] != len(bias):
            raise ValueError(f"the checkpoint lacks the tensor {LAYER}.{name}.weight: it is incomplete")
        biases[f"{LAYER}.{name}.bias"] = (weight.double() @ bias.double()).to(DTYPE)
    return biases
