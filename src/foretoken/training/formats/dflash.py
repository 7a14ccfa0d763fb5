"""Block drafters in the layouts of z-lab, SpecForge and speculators: bare names, ``dflash_config``, no embedding, no
head.

DFlash is Chen, Liang, Liu 2026 (arXiv 2602.06036).  DFlash2 adds convolutions and a selector, DSpark a Markov head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.core.io.drafter_folders import block_kind
from foretoken.methods.drafters.nets.block import BlockConfig, BlockNet
from foretoken.methods.drafters.nets.dflash2 import Dflash2Config, Dflash2Net
from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.training.formats.base import (
    EMBEDDING,
    OWN_EMBEDDING,
    Checkpoint,
    NetFormat,
    Target,
    Trained,
    renamed,
)
from foretoken.training.formats.block_layout import (
    by_our_names,
    check_scales,
    in_halves,
    is_interleaved,
    nested,
    shape_of,
)
from foretoken.training.formats.eagle3 import KEY, VERSION, vocabulary
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_keys, length_warning, with_biases
from foretoken.training.formats.values import flag, whole

KERNEL, MOVING = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"
CODEBOOK = "candidate_selector.predecessor_codebook"
W1 = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"


class DflashPlain(NetFormat):
    """The layout that vLLM reads."""

    method = "dflash"
    net_config: ClassVar[type[Any]] = BlockConfig
    net_class: ClassVar[type[Any]] = BlockNet
    architecture: ClassVar[str] = "DFlashDraftModel"

    def recognises(self, source: Found) -> bool:
        return block_kind(source.names) == self.method and KEY not in source.config

    def extras(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Arguments of the network's configuration beyond those of a block."""
        return {"from_anchor": bool(flag(config, "sample_from_anchor"))}

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Rename the tensors; a projection equal to the target's is shared."""
        config = nested(checkpoint.config)
        biases, tensors = with_biases(config, by_our_names(checkpoint.tensors, config))
        shape = {**shape_of(config, tensors, target), **biases, **self.extras(config, tensors)}
        check_scales(config, target)
        if is_interleaved(config):
            share = (shape["rope"] or {}).get("partial_rotary_factor", 1.0)
            tensors = in_halves(tensors, shape["head_dim"], int(shape["head_dim"] * share))
        if "mask_embedding" in tensors:
            tensors["mask_embedding"] = tensors["mask_embedding"].flatten()
        embedding = target.own_embedding(tensors.pop(EMBEDDING, None))
        if embedding is not None:
            tensors[EMBEDDING] = embedding
            self.warnings.append(OWN_EMBEDDING)
        maps = vocabulary(tensors, whole(config, "draft_vocab_size", default=0, least=0), target)
        tensors = {name: value for name, value in tensors.items() if name not in maps}
        ids = maps["d2t"] + torch.arange(len(maps["d2t"]))
        reduced = len(ids) < target.parts.vocab_size
        head = tensors.get("lm_head.weight")
        own_head = head is not None and not target.is_head(head, ids)
        if head is not None and not own_head:
            del tensors["lm_head.weight"]
        shape |= {"draft_vocab": len(ids) if reduced else 0, "own_head": own_head}
        shape["own_embedding"] = embedding is not None
        shapes = self.shapes(shape)
        self.warnings += length_warning(self.net_config(**shape))
        names = {name: name for name in shapes if name not in maps}
        return Trained(shape, {**renamed(tensors, shapes, names), **(maps if reduced else {})})

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = self.net_config(**trained.config)
        return Checkpoint(self.described(shape, target), dict(trained.tensors))

    def described(self, shape: Any, target: Target) -> dict[str, Any]:
        """``config.json``.  Raises ``ValueError`` for a network that fuses depths without a number in this layout."""
        depths = depths_of(shape, target.parts.num_layers - 1, "; speculators holds the last one, too")
        inner = {"target_layer_ids": [depth - 1 for depth in depths], **self.block_keys(shape)}
        return {
            "architectures": [self.architecture],
            **layers_of(shape, target),
            "block_size": shape.block,
            "num_target_layers": target.parts.num_layers,
            "draft_vocab_size": shape.num_draft_ids,
            "dflash_config": inner,
        }

    def block_keys(self, shape: Any) -> dict[str, Any]:
        """Keys of the block that both layouts have."""
        return {
            "mask_token_id": shape.mask_token,
            "block_size": shape.block,
            **_causality(shape),
            "input_embedding_scale": shape.input_scale,
            "sample_from_anchor": shape.from_anchor,
            **({"attention_sink": True} if shape.sinks else {}),
            **self.inner_keys(shape),
        }

    def inner_keys(self, shape: Any) -> dict[str, Any]:
        """Further keys of ``dflash_config``."""
        return {}


class DflashSpeculators(DflashPlain):
    """The layout of vllm-project/speculators, whose layer numbers are one higher."""

    architecture = "DFlashSpeculator"

    def recognises(self, source: Found) -> bool:
        return source.config.get(KEY) == self.method

    def described(self, shape: Any, target: Target) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            KEY: self.method,
            "speculators_version": VERSION,
            "speculators_config": target.speculators_config(
                self.method, speculative_tokens=shape.drafts, verifier_accept_k=1, accept_tolerance=0.0
            ),
            "transformer_layer_config": layers_of(shape, target),
            "draft_vocab_size": shape.num_draft_ids,
            "target_hidden_size": shape.hidden_size,
            "aux_hidden_state_layer_ids": depths_of(shape, target.parts.num_layers),
            **self.block_keys(shape),
            "torch_dtype": "bfloat16",
        }


def depths_of(shape: BlockConfig, last: int, more: str = "") -> list[int]:
    """The fused depths.  Raises ``ValueError``, with ``more`` as its end, for others than 1 to ``last``."""
    depths = [int(part) for part in shape.taps.split(",")]
    if not all(1 <= depth <= last for depth in depths):
        raise ValueError(f"the network fuses the depths {shape.taps}, and this format holds 1 to {last}{more}")
    return depths


def layers_of(shape: BlockConfig, target: Target) -> dict[str, Any]:
    """The layers in Qwen3's configuration keys.  Raises ``ValueError`` for layers with different windows."""
    windows = {reach for reach in shape.reaches if reach}
    if len(windows) > 1:
        raise ValueError(f"the layers have windows of {shape.reach} tokens, and this format has one window for all")
    kinds = ["sliding_attention" if reach else "full_attention" for reach in shape.reaches]
    return {
        **layer_keys(shape, target),
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "layer_types": kinds,
        "sliding_window": windows.pop() + 1 if windows else None,
        "use_sliding_window": bool(windows) or "sliding_attention" in kinds,
    }


def _causality(shape: BlockConfig) -> dict[str, Any]:
    """Keys for causal layers.  Raises ``ValueError`` if some are causal, but not exactly those with a window."""
    if len(set(shape.causals)) == 1:
        return {"causal": shape.causals[0]}
    if list(shape.causals) != [bool(reach) for reach in shape.reaches]:
        raise ValueError(f"causal={shape.causal}: in this format all layers are causal, none, or those with a window")
    return {}


class Dflash2Plain(DflashPlain):
    """Sizes missing in ``config.json`` are taken from the tensors."""

    method = "dflash2"
    net_config: ClassVar[type[Any]] = Dflash2Config
    net_class: ClassVar[type[Any]] = Dflash2Net
    architecture = "DFlash2DraftModel"

    def extras(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Convolutions and selector.  Raises ``ValueError`` if one of them is missing."""
        for name in (CODEBOOK, KERNEL, MOVING):
            if name not in tensors:
                raise ValueError(f"the checkpoint lacks the tensor {name}: it is incomplete")
        size, numbers, moving = whole(config, "hidden_size"), tensors[KERNEL].numel(), tensors[MOVING].numel()
        return {
            **super().extras(config, tensors),
            "conv": whole(config, "conv_kernel_size", default=numbers // (2 * size)),
            "group": whole(config, "conv_group_size", default=numbers * size // max(1, moving)),
            "rank": whole(config, "selector_rank", default=tensors[CODEBOOK].shape[-1]),
            "top": whole(config, "selector_top_k", default=16),
        }

    def inner_keys(self, shape: Any) -> dict[str, Any]:
        return {
            "conv_kernel_size": shape.conv,
            "conv_group_size": shape.group,
            "selector_rank": shape.rank,
            "selector_top_k": shape.top,
        }


class Dflash2Speculators(DflashSpeculators, Dflash2Plain):
    """The same in the layout of vllm-project/speculators."""

    method = "dflash2"
    architecture = "DFlash2Speculator"


class DsparkPlain(DflashPlain):
    """The tensors determine which heads exist."""

    method = "dspark"
    net_config: ClassVar[type[Any]] = DsparkConfig
    net_class: ClassVar[type[Any]] = DsparkNet
    architecture = "DSparkDraftModel"

    def extras(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Both heads.  Raises ``ValueError`` if the Markov head is missing, or differs from the one in
        ``config.json``."""
        if W1 not in tensors:
            raise ValueError(f"the checkpoint lacks the tensor {W1}: it is incomplete")
        heads = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        head = next((kind for name, kind in heads.items() if name in tensors), "vanilla")
        stated = config.get("markov_head_type") or head
        if stated != head:
            raise ValueError(f"config.json says markov_head_type {stated!r}, and the tensors are those of {head!r}")
        rank = whole(config, "markov_rank", default=tensors[W1].shape[-1])
        reader, confidence = tensors.get(CONFIDENCE), ""
        if reader is None and flag(config, "enable_confidence_head"):
            raise ValueError(f"the checkpoint lacks the tensor {CONFIDENCE}: it is incomplete")
        if reader is not None:
            confidence = "both" if reader.shape[-1] == rank + whole(config, "hidden_size") else "state"
        return {
            "from_anchor": flag(config, "sample_from_anchor") is not False,
            "rank": rank,
            # More candidates than any draft of the published networks needs, and few of a large vocabulary
            "top": whole(config, "markov_candidates", default=64),
            "head": head,
            "confidence": confidence,
        }

    def inner_keys(self, shape: Any) -> dict[str, Any]:
        return {
            "projector_type": "dspark",
            "markov_rank": shape.rank,
            "markov_head_type": shape.head,
            "markov_candidates": shape.top,
            "enable_confidence_head": bool(shape.confidence),
            "confidence_head_with_markov": shape.confidence == "both",
        }


class DsparkSpeculators(DflashSpeculators, DsparkPlain):
    """The same in the layout of vllm-project/speculators."""

    method = "dspark"
    architecture = "DSparkSpeculator"
