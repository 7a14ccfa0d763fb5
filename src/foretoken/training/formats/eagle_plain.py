"""EAGLE-1 and EAGLE-2 as SafeAILab/EAGLE and SGLang read them: ``fc`` with its bias, one layer, no head.

Li et al. 2024 (arXiv 2401.15077).
"""

from __future__ import annotations

import torch

from foretoken.methods.drafters.nets.eagle import EagleConfig, EagleNet
from foretoken.training.formats.base import Checkpoint, NetFormat, Target, Trained, check_sizes, renamed
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_config, layer_keys, layer_names

NAMES = {"fc.weight": "fc.weight", "fc.bias": "fc.bias", **layer_names("layer", "layers.0")}
UNUSED = ("layers.0.input_layernorm.weight", "embed_tokens.weight", "lm_head.weight")
"""Some checkpoints hold them: the norm is skipped by all who read it, the others are the target's."""


class EaglePlain(NetFormat):
    """No ``bias`` key is written: EAGLE takes it as true, and SGLang would give the attention one."""

    method = "eagle"
    net_config = EagleConfig
    net_class = EagleNet
    architecture = "LlamaForCausalLMEagle"

    def recognises(self, found: Found) -> bool:
        """``fc`` beside one layer, and no norm of hidden states (which EAGLE-3 has)."""
        names = found.names
        return (
            {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
            and "layers.0.hidden_norm.weight" not in names
            and "speculators_model_type" not in found.config
        )

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        """A rename."""
        config = {"architectures": [self.architecture], **layer_keys(EagleConfig(**trained.config), target)}
        return Checkpoint(config, {theirs: trained.tensors[ours] for ours, theirs in NAMES.items()})

    def read(self, found: Checkpoint, target: Target) -> Trained:
        """A rename; a missing bias is zero."""
        check_sizes(found.config, target)
        config, tensors = layer_config(found.config), dict(found.tensors)
        tensors.setdefault("fc.bias", torch.zeros(config["hidden_size"]))
        check_borrowed(tensors, target)
        return Trained(config, renamed(tensors, self.shapes(config), NAMES, UNUSED))


def check_borrowed(tensors: dict[str, torch.Tensor], target: Target) -> None:
    """An embedding or a head in the checkpoint must be the target's, which is what we use.

    Raises:
        ValueError: it is another.
    """
    embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    if embedding is not None and not target.is_embedding(embedding):
        raise ValueError("embed_tokens.weight is not the target's embedding: give the --target it was trained for")
    if head is not None and not target.is_head(head[: target.parts.vocab_size]):
        raise ValueError("lm_head.weight is not the target's projection, and an EAGLE head uses the target's")
