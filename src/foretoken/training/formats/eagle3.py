"""EAGLE-3 as written by EAGLE, SpecForge and AngelSlim, and read by vLLM, SGLang and llama.cpp: bare names,
``midlayer``.

Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.nets.eagle3 import LAST, Eagle3Config, Eagle3Net
from foretoken.training.formats.base import (
    EMBEDDING,
    OWN_EMBEDDING,
    Checkpoint,
    NetFormat,
    Target,
    Trained,
    check_sizes,
    renamed,
)
from foretoken.training.formats.engines import DEPTH
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import (
    interleave_warning,
    layer_config,
    layer_keys,
    layer_names,
    length_warning,
    with_biases,
)
from foretoken.training.formats.values import flag, listed, merged, whole

IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Switches of the network's norms."""
NUMBERED = re.compile(r"layers\.(\d+)\.")
UNREAD = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")
KEY = "speculators_model_type"
READ = ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
"""Supported types of speculators checkpoints."""
VERSION = "0.9.0"
"""Version of speculators whose layout is written."""


class Eagle3Plain(NetFormat):
    """The head is always written, even the target's own."""

    method = "eagle3"
    net_config: ClassVar[type[Eagle3Config]] = Eagle3Config
    net_class: ClassVar[type[Eagle3Net]] = Eagle3Net
    layer = "midlayer"
    learns_embedding: ClassVar[bool] = False
    """Whether training changes the embedding, as a rule."""

    def recognises(self, source: Found) -> bool:
        norms = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return bool(norms & source.names)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = self.net_config(**trained.config)
        return Checkpoint(self.described(shape, target), self.tensors(shape, trained, target))

    def described(self, shape: Eagle3Config, target: Target) -> dict[str, Any]:
        """``config.json``. vLLM counts the layers that have run; SGLang gives the index of the last of them."""
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layers_of(shape, target),
            "draft_vocab_size": shape.num_draft_ids,
            "target_hidden_size": shape.hidden_size,
            **{key: getattr(shape, key) for key in NORMS},
        }
        if shape.layers == LAST:
            return {**config, "eagle_config": {"use_aux_hidden_state": False}}
        ids = layer_ids(shape)
        inner = {"use_aux_hidden_state": True, IDS: [number - 1 for number in ids]}
        return {**config, "num_aux_hidden_states": len(ids), IDS: ids, "eagle_config": inner}

    def refusal(self, engine: str, folder: Path, target: Target) -> str | None:
        """SGLang captures what a layer of the target reads; nothing reads the last one's output."""
        ids = listed(nested_config(Found(folder).config), IDS) or []
        last = target.parts.num_layers - 1
        if engine != "sglang" or all(0 <= i < last for i in ids):
            return None
        depths = ",".join(str(i + 1) for i in ids)
        return f"the network fuses the depths {depths}, and SGLang reads 1 to {last}: train with others"

    def tensors(self, shape: Eagle3Config, trained: Trained, target: Target) -> dict[str, Tensor]:
        """Tensors by their names; without vocabulary maps if the draft vocabulary is the whole one."""
        layer = self.layer if shape.num_layers == 1 else "layers.0"
        tensors = {theirs: trained.tensors[ours] for ours, theirs in self.names(shape, layer).items()}
        rows = trained.tensors["d2t"] + torch.arange(shape.num_draft_ids)
        tensors["lm_head.weight"] = target.head(rows) if shape.share_head else trained.tensors["lm_head.weight"]
        if shape.num_draft_ids < shape.vocab_size:
            tensors["d2t"], tensors["t2d"] = trained.tensors["d2t"], trained.tensors["t2d"]
        return tensors

    def names(self, shape: Any, layer: str) -> dict[str, str]:
        """Their names by ours, except for the head and the vocabulary maps; ``layer`` is theirs of the wide layer."""
        outer = ["norm.weight", *["fc.weight"] * (shape.layers != LAST), *[EMBEDDING] * shape.own_embedding]
        names = {name: name for name in outer}
        if shape.norm_before_fc:
            names["fused_norms.0.weight"] = "input_norm.weight"
        if shape.fc_norm:
            names |= {f"fused_norms.{i}.weight": f"fc_norm.{i}.weight" for i in range(len(shape.taps))}
        names |= {f"{name}.weight": f"{layer}.{name}.weight" for name in ("input_layernorm", "hidden_norm")}
        names |= layer_names("midlayer", layer, shape, shape.head_norms)
        for index in range(1, shape.num_layers):
            ours, theirs = f"layers.{index - 1}", f"layers.{index}"
            names[f"{ours}.input_layernorm.weight"] = f"{theirs}.input_layernorm.weight"
            names |= layer_names(ours, theirs, shape, shape.head_norms)
        return names

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Rename the tensors; a head or an embedding equal to the target's is shared again."""
        check_target(checkpoint.config, target)
        # vLLM makes this norm for every layer, and reads only that of the wide one.
        tensors = {name: value for name, value in checkpoint.tensors.items() if not UNREAD.fullmatch(name)}
        biases, tensors = with_biases(checkpoint.config, tensors)
        layer = next((name for name in ("midlayer", "layers.0") if f"{name}.hidden_norm.weight" in tensors), self.layer)
        embedding = self._embedding(tensors.pop(EMBEDDING, None), checkpoint.config, target)
        if embedding is not None:
            tensors[EMBEDDING] = embedding
        maps = vocabulary(tensors, whole(checkpoint.config, "draft_vocab_size", default=0, least=0), target)
        num_draft_ids = len(maps["d2t"])
        head = tensors.get("lm_head.weight")
        config = {
            **layer_config(checkpoint.config),
            **biases,
            **variant(checkpoint.config, tensors),
            **self.more(checkpoint.config, target),
            "vocab_size": target.parts.vocab_size,
            "draft_vocab": 0 if num_draft_ids == target.parts.vocab_size else num_draft_ids,
            "layers": fused(checkpoint.config, tensors, target),
            "share_head": head is not None and target.is_head(head, maps["d2t"] + torch.arange(num_draft_ids)),
            "own_embedding": embedding is not None,
        }
        shape = self.net_config(**config)
        self.warnings += length_warning(shape) + interleave_warning(checkpoint.config)
        weights = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        theirs = {**self.names(shape, layer), "lm_head.weight": "lm_head.weight"}
        converted = renamed(weights, self.shapes({**config, "share_head": False}), theirs)
        if shape.share_head:
            del converted["lm_head.weight"]
        return Trained(config, {**converted, **maps})

    def more(self, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """Further arguments of the network's configuration."""
        return {}

    def _embedding(self, weight: Tensor | None, config: Mapping[str, Any], target: Target) -> Tensor | None:
        """A checkpoint's own embedding, with a warning unless it was learned."""
        own = target.own_embedding(weight)
        if own is not None and not (self.learns_embedding or flag(config, "embed_requires_grad")):
            self.warnings.append(OWN_EMBEDDING)
        return own


def layer_ids(shape: Eagle3Config) -> list[int]:
    """Depths of the target that are fused: k is the output of its first k layers."""
    return [int(part) for part in shape.layers.split(",")]


def check_target(config: Mapping[str, Any], target: Target) -> None:
    """Raise ``ValueError`` for other sizes than the target's."""
    check_sizes(config, target)
    size = config.get("target_hidden_size") or target.parts.hidden_size
    if size != target.parts.hidden_size:
        raise ValueError(f"the checkpoint is for a target of hidden size {size}, not {target.parts.hidden_size}")


def variant(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Number of layers, and the norms of a variant of the network.  Raises ``ValueError`` for another number of layers
    than in ``config.json``."""
    count = 1 + max((int(match[1]) for name in tensors if (match := NUMBERED.match(name))), default=0)
    stated = whole(config, "num_hidden_layers", default=count)
    if stated != count:
        raise ValueError(f"the checkpoint has tensors of {count} layers, and config.json says {stated}")
    nested = nested_config(config)
    norms = {key: bool(flag(config, key)) or bool(flag(nested, key)) for key in NORMS}
    return {"num_layers": count, "head_norms": any(name.endswith(".q_norm.weight") for name in tensors), **norms}


def nested_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def fused(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> str:
    """The value of ``layers``."""
    if flag(nested_config(config), "use_aux_hidden_state") is False or flag(config, "use_aux_hidden_state") is False:
        return LAST
    return ",".join(map(str, fused_layers(config, tensors, target)))


def fused_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> Sequence[int]:
    """Fused depths: vLLM's numbers, else SGLang's plus one, else the paper's.  Raises ``ValueError`` for depths that
    the target does not have, and if ``fc`` reads another number of them."""
    count, nested = target.parts.num_layers, listed(nested_config(config), IDS)
    depths = listed(config, IDS) or [i + 1 if type(i) is int else i for i in nested or ()] or [2, count // 2, count - 3]
    if not all(type(i) is int and 0 <= i <= count for i in depths):
        raise ValueError(f"the checkpoint fuses the layers {depths}, and the target has depths 0 to {count}")
    if "fc.weight" in tensors and tensors["fc.weight"].shape[1] != len(depths) * target.parts.hidden_size:
        width = tensors["fc.weight"].shape[1]
        raise ValueError(
            f"fc.weight reads {width} numbers, and {len(depths)} layers have {target.parts.hidden_size} each"
        )
    return depths


def vocabulary(tensors: Mapping[str, Tensor], num_draft_ids: int, target: Target) -> dict[str, Tensor]:
    """``d2t``, and ``t2d`` computed from it.  Raises ``ValueError`` for tokens outside of the target's vocabulary, for
    duplicates, and if the checkpoint's own ``t2d`` has other tokens."""
    vocab, offsets = target.parts.vocab_size, tensors.get("d2t")
    if offsets is None and num_draft_ids not in (0, vocab):
        raise ValueError(f"the checkpoint lacks the tensor d2t, the ids of its {num_draft_ids} draft tokens")
    if offsets is not None and offsets.is_floating_point():
        raise ValueError(f"d2t holds {offsets.dtype} and must hold whole numbers, the offsets d2t[i] = id - i")
    offsets = torch.zeros(vocab, dtype=torch.int64) if offsets is None else offsets.to(torch.int64)
    if offsets.dim() != 1 or (num_draft_ids and len(offsets) != num_draft_ids):
        raise ValueError(f"d2t is {list(offsets.shape)} and must be [{num_draft_ids}]")
    tokens = offsets + torch.arange(len(offsets))
    if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise ValueError(
            f"d2t names tokens outside the target's vocabulary of {vocab}: it holds offsets, id = i + d2t[i]"
        )
    if len(tokens.unique()) < len(tokens):
        raise ValueError("d2t names a token twice: it holds offsets, id = i + d2t[i]")
    in_draft_vocab = torch.zeros(vocab, dtype=torch.bool)
    in_draft_vocab[tokens] = True
    stated = tensors.get("t2d")
    is_filled = stated is not None and stated.shape == (vocab,) and bool(stated.any())  # some are saved as zeros
    if stated is not None and is_filled and not torch.equal(stated.bool(), in_draft_vocab):
        raise ValueError("d2t and t2d name other tokens: d2t holds offsets, id = i + d2t[i]")
    return {"d2t": offsets, "t2d": in_draft_vocab}


def layers_of(shape: Eagle3Config, target: Target) -> dict[str, Any]:
    """The decoder layers in Llama's keys, or in Qwen3's if their heads have norms."""
    kind = "qwen3" if shape.head_norms else "llama"
    return {**layer_keys(shape, target), "model_type": kind, "num_hidden_layers": shape.num_layers}


class Eagle3Speculators(Eagle3Plain):
    """The layout of vllm-project/speculators: one ``config.json`` with serving settings, ``layers.0``.

    ``norm_before_residual`` is always written: its default differs between vLLM and the package.
    """

    layer = "layers.0"

    def recognises(self, source: Found) -> bool:
        """By its own key.  Raises ``ValueError`` for an unsupported type of drafter."""
        kind = source.config.get(KEY)
        if kind not in (None, *READ):
            kinds = ", ".join(READ)
            raise ValueError(f"{source.path} is a speculators checkpoint of the type {kind!r}: {kinds} can be imported")
        return kind == "eagle3"

    def described(self, shape: Eagle3Config, target: Target) -> dict[str, Any]:
        """``config.json``.  Raises ``ValueError`` for a network that fuses no depths."""
        if shape.layers == LAST:
            raise ValueError("a network that reads the last state only (layers=last) has no place in this format")
        return {
            "architectures": ["Eagle3Speculator"],
            KEY: "eagle3",
            "speculators_version": VERSION,
            "speculators_config": target.speculators_config(
                "eagle3", speculative_tokens=DEPTH, verifier_accept_k=1, accept_tolerance=0.0
            ),
            "transformer_layer_config": layers_of(shape, target),
            "draft_vocab_size": shape.num_draft_ids,
            "target_hidden_size": shape.hidden_size,
            IDS: layer_ids(shape),
            **{key: getattr(shape, key) for key in NORMS},
            "embed_requires_grad": shape.own_embedding,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Read the plain layout, with the layer's configuration merged into the rest."""
        inner = checkpoint.config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise ValueError("config.json lacks transformer_layer_config")
        if checkpoint.config.get("norm_before_residual") is None:
            raise ValueError("config.json lacks norm_before_residual, whose default differs between projects")
        return super().read(Checkpoint(merged(inner, checkpoint.config), checkpoint.tensors), target)
