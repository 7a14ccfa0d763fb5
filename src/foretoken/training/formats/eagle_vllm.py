"""EAGLE-1 and EAGLE-2 as vLLM reads them: its ``fc`` has no bias, so the bias moves into the attention.

With x = fc(...) + b the layer computes x + O A(Qx, Kx, Vx) and nothing else reads x: Q(y + b) = Qy + Qb, and the b of
the residual can be added behind O.  The function is the same; vLLM has such biases under ``attention_bias``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.training.formats.base import DTYPE, Checkpoint, Target, Trained
from foretoken.training.formats.eagle_plain import EaglePlain
from foretoken.training.formats.folders import Found

READERS = ("q_proj", "k_proj", "v_proj")
LAYER = "layers.0.self_attn"


class EagleVllm(EaglePlain):
    """A head whose bias is zero is written without any."""

    architecture = "EagleLlamaForCausalLM"

    def recognises(self, found: Found) -> bool:
        """A bias behind the attention and none of ``fc``; without both it is read as the plain layout."""
        folded = f"{LAYER}.o_proj.bias" in found.names and "fc.bias" not in found.names
        return folded and super().recognises(found)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        """The plain layout, with the bias folded."""
        plain = super().write(trained, target)
        bias = plain.tensors.pop("fc.bias")
        if bool(bias.any()):
            plain.tensors[f"{LAYER}.o_proj.bias"] = bias
            plain.tensors.update(folded(bias, plain.tensors))
            plain.config["attention_bias"] = True
        return plain

    def read(self, found: Checkpoint, target: Target) -> Trained:
        """The bias behind the attention is that of ``fc``.

        Raises:
            ValueError: the biases are no folded ones.
        """
        tensors = dict(found.tensors)
        if tensors.get(f"{LAYER}.o_proj.bias") is None:
            return super().read(found, target)
        bias = tensors.pop(f"{LAYER}.o_proj.bias")
        for name, wanted in folded(bias, tensors).items():
            have = tensors.pop(name, torch.zeros(0))
            scale = float(wanted.abs().max()) + 1e-6
            if have.shape != wanted.shape or not torch.allclose(have.float(), wanted.float(), atol=scale / 64):
                raise ValueError(f"{name} is a bias of its own, and our layer has none")
        tensors["fc.bias"] = bias
        return super().read(Checkpoint({**found.config, "attention_bias": False}, tensors), target)


def folded(bias: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the readers of the attention make of the bias [D].

    Raises:
        ValueError: the checkpoint lacks one of them.
    """
    found = {}
    for name in READERS:
        weight = tensors.get(f"{LAYER}.{name}.weight")
        if weight is None or weight.shape[-1] != len(bias):
            raise ValueError(f"the checkpoint lacks the tensor {LAYER}.{name}.weight: it is incomplete")
        found[f"{LAYER}.{name}.bias"] = (weight.double() @ bias.double()).to(DTYPE)
    return found
