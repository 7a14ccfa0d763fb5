"""Medusa's heads in the layouts of vLLM up to 0.32, and of FasterDecoding/Medusa and TGI.

Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from foretoken.methods.drafters.nets.medusa import MedusaConfig, MedusaHeads
from foretoken.training.formats.base import Checkpoint, NetFormat, Target, Trained, by_names, check_sizes, renamed
from foretoken.training.formats.folders import Found
from foretoken.training.formats.values import flag, positive, whole

BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight")
SHARED, MAP = "lm_head.weight", "token_map"
LINEAR = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")


class MedusaVllm(NetFormat):
    """``blocks.{head}.layers.{block}``, and one or several projections.

    A shared projection is the target's, written once and marked ``original_lm_head``; biases are always written.
    """

    method = "medusa"
    net_config = MedusaConfig
    net_class = MedusaHeads

    def recognises(self, source: Found) -> bool:
        return any(BLOCK.fullmatch(name) for name in source.names)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = MedusaConfig(**trained.config)
        tensors = {their_name(name): value for name, value in trained.tensors.items()}
        if not shape.own_projection:
            tensors[SHARED] = target.head(tensors.get(MAP))
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "truncated_vocab_size": shape.draft_vocab_size or shape.vocab_size,
            "num_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not shape.own_projection,
            "torch_dtype": "bfloat16",
        }
        if not shape.own_projection and target.parts.scale not in (None, 1.0):  # the scale of the target's logits
            config["logit_scale"] = target.parts.scale
        return Checkpoint(config, tensors)

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        check_sizes(checkpoint.config, target)
        tensors = by_names(checkpoint.tensors, lambda name: name.removeprefix("medusa_heads."))
        token_map = token_map_of(tensors.pop(MAP, None), checkpoint.config, target)
        heads, blocks = sizes_of(tensors, BLOCK, checkpoint.config, ("num_heads", "num_hidden_layers"))
        if flag(checkpoint.config, "medusa_fc_bias") and not any(name.endswith(".bias") for name in tensors):
            raise ValueError("the checkpoint lacks the tensor blocks.0.layers.0.bias: it is incomplete")
        is_shared = flag(checkpoint.config, "original_lm_head") or "lm_heads.0.weight" not in tensors
        shared = tensors.pop(SHARED, tensors.get("lm_heads.0.weight")) if is_shared else None
        tensors.pop(SHARED, None)
        if shared is not None:
            tensors.update({f"lm_heads.{i}.weight": shared for i in range(heads)})
        scale = positive(checkpoint.config, "logit_scale", default=1.0)
        return joined(tensors, (heads, blocks), their_name, target, self, scale, token_map)


def sizes_of(
    names: Collection[str], pattern: re.Pattern[str], config: Mapping[str, Any], keys: tuple[str, str]
) -> tuple[int, int]:
    """Numbers of heads and of blocks per head, by the tensors.  Raises ``ValueError`` if ``config.json`` says more; the
    original code's published files hold more heads than it says."""
    numbers = [(int(match[1]), int(match[2])) for name in names if (match := pattern.fullmatch(name))]
    heads, blocks = (1 + max(column) for column in zip(*numbers, strict=True))
    for key, count in zip(keys, (heads, blocks), strict=True):
        if whole(config, key, default=count) > count:
            raise ValueError(f"config.json says {key} {config[key]}, and the checkpoint has tensors of {count}")
    return heads, blocks


def token_map_of(stored: Tensor | None, config: Mapping[str, Any], target: Target) -> Tensor | None:
    """[V_d] the target's ids of the heads' rows; ``None``: all tokens.  As in vLLM, ``truncated_vocab_size`` decides
    whether they have a vocabulary of their own.

    Raises:
        ValueError: no map for a truncated vocabulary, or not one of this size over the target's ids.
    """
    vocab = target.parts.vocab_size
    size = whole(config, "truncated_vocab_size", default=whole(config, "vocab_size", default=vocab))
    if size >= whole(config, "vocab_size", default=vocab):
        return None
    if stored is None:
        raise ValueError(f"the checkpoint lacks the tensor {MAP} for its {size} tokens: it is incomplete")
    ids = [] if stored.is_floating_point() else stored.flatten().tolist()
    if len(set(ids)) != size or len(ids) != size or not all(0 <= token < vocab for token in ids):
        raise ValueError(f"{MAP} must be {size} (truncated_vocab_size) different token ids below {vocab}")
    return torch.tensor(ids)


def their_name(ours: str) -> str:
    if ours == "vocabulary":
        return MAP
    kind, head, part = ours.split(".", 2)
    return f"blocks.{head}.layers.{part}" if kind == "blocks" else f"lm_heads.{head}.{part}"


def joined(
    tensors: dict[str, Tensor],
    sizes: tuple[int, int],
    rename: Callable[[str], str],
    target: Target,
    layout: NetFormat,
    scale: float = 1.0,
    token_map: Tensor | None = None,
) -> Trained:
    """Heads with one projection each, shared if all are the target's.

    Args:
        sizes: the number of heads, and of blocks per head.
        scale: factor of the heads' logits; another one than the target's is multiplied into the projections.
        token_map: [V_d] the tokens that they predict, if not all; projections may hold their rows only, or all.
    """
    vocab, size = target.parts.vocab_size, target.parts.hidden_size
    config: dict[str, Any] = {
        "hidden_size": size,
        "vocab_size": vocab,
        "heads": sizes[0],
        "layers": sizes[1],
        "own_projection": True,
    }
    if token_map is not None:
        config["draft_vocab_size"], tensors[MAP] = len(token_map), token_map
    names = {name: rename(name) for name in layout.shapes(config)}
    projections = [names[name] for name in names if name.startswith("projections.")]
    for theirs in projections:
        if theirs in tensors and (token_map is None or len(tensors[theirs]) == len(token_map)):
            tensors[theirs] = tensors[theirs][:vocab]  # the rest is padding
        elif theirs in tensors and token_map is not None and len(tensors[theirs]) > int(token_map.max()):
            tensors[theirs] = tensors[theirs][token_map]
    biases = [theirs for theirs in names.values() if theirs.endswith(".bias")]
    if not tensors.keys() & set(biases):  # trained without any
        tensors.update({theirs: torch.zeros(size) for theirs in biases})
    converted = renamed(tensors, layout.shapes(config), names)
    if all(target.is_head(tensors[theirs], token_map) for theirs in projections) and scale in (1.0, target.parts.scale):
        config["own_projection"] = False
        converted = {name: value for name, value in converted.items() if not name.startswith("projections.")}
    elif scale != 1.0:
        converted |= {name: value * scale for name, value in converted.items() if name.startswith("projections.")}
    return Trained(asdict(MedusaConfig(**config)), converted)


class MedusaOriginal(NetFormat):
    """Each head is a list: ``{head}.{block}.linear``, then ``{head}.{n}``.

    This layout has no shared projection: the target's is written once per head.
    """

    method = "medusa"
    net_config = MedusaConfig
    net_class = MedusaHeads
    weights = "medusa_lm_head.safetensors"

    def recognises(self, source: Found) -> bool:
        return any(LINEAR.fullmatch(name) for name in source.names)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = MedusaConfig(**trained.config)
        if shape.draft_vocab_size:
            raise ValueError(f"the heads predict {shape.draft_vocab_size} tokens, and this layout holds all: use vllm")
        tensors = {original_name(name, shape.layers): value for name, value in trained.tensors.items()}
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

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        check_sizes(checkpoint.config, target)
        tensors = by_names(checkpoint.tensors, lambda name: name.removeprefix("medusa_head."))
        keys = ("medusa_num_heads", "medusa_num_layers")
        heads, blocks = sizes_of(tensors, LINEAR, checkpoint.config, keys)
        return joined(tensors, (heads, blocks), lambda name: original_name(name, blocks), target, self)


def original_name(ours: str, blocks: int) -> str:
    """A tensor's name in this layout, for heads with this number of blocks."""
    kind, head, tail = ours.split(".", 2)
    if kind == "projections":
        return f"{head}.{blocks}.{tail}"
    block, part = tail.split(".")
    return f"{head}.{block}.linear.{part}"
