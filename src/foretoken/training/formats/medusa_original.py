"""Medusa as FasterDecoding/Medusa and TGI keep it: every head a list, ``{head}.{block}.linear``, then ``{head}.{n}``.

Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

import re

from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.training.formats.base import Checkpoint, NetFormat, Target, Trained, check_sizes
from foretoken.training.formats.folders import Found
from foretoken.training.formats.medusa_vllm import joined

LINEAR = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")


class MedusaOriginal(NetFormat):
    """This layout has no shared projection: the target's is written out once per head."""

    method = "medusa"
    net_config = MedusaConfig
    net_class = MedusaHeads
    weights = "medusa_lm_head.safetensors"

    def recognises(self, found: Found) -> bool:
        """By the names of the blocks."""
        return any(LINEAR.fullmatch(name) for name in found.names)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        """A rename."""
        shape = MedusaConfig(**trained.config)
        tensors = {their_name(name, shape.layers): value for name, value in trained.tensors.items()}
        if not shape.own_projection:
            tensors.update({f"{head}.{shape.layers}.weight": target.head() for head in range(shape.heads)})
        config = {
            "medusa_num_heads": shape.heads,
            "medusa_num_layers": shape.layers,
            "base_model_name_or_path": target.name,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
        }
        return Checkpoint(config, tensors)

    def read(self, found: Checkpoint, target: Target) -> Trained:
        """A rename; projections that are all the target's are shared again."""
        check_sizes(found.config, target)
        tensors = {name.removeprefix("medusa_head."): value for name, value in found.tensors.items()}
        places = [(int(match[1]), int(match[2])) for name in tensors if (match := LINEAR.fullmatch(name))]
        heads, blocks = (1 + max(numbers) for numbers in zip(*places, strict=True))
        return joined(tensors, (heads, blocks), lambda name: their_name(name, blocks), target, self)


def their_name(ours: str, blocks: int) -> str:
    """A tensor's name in this layout, for heads of so many blocks."""
    kind, head, rest = ours.split(".", 2)
    if kind == "projections":
        return f"{head}.{blocks}.{rest}"
    block, part = rest.split(".")
    return f"{head}.{block}.linear.{part}"
