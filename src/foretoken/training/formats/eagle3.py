"""EAGLE-3 as written by EAGLE, SpecForge and AngelSlim, and read by vLLM, SGLang and llama.cpp: bare names,
``midlayer``.

Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretoken.methods.drafters.nets.eagle3 import Eagle3Config, Eagle3Net
from foretoken.training.formats.base import Checkpoint, NetFormat, Target, Trained, check_sizes, renamed
from foretoken.training.formats.engines import DEPTH
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_config, layer_keys, layer_names
from foretoken.training.formats.values import listed, whole

IDS = "eagle_aux_hidden_state_layer_ids"
OFF = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants that our network does not support."""
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

    def recognises(self, source: Found) -> bool:
        norms = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return bool(norms & source.names)

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = self.net_config(**trained.config)
        return Checkpoint(self.described(shape, target), self.tensors(shape, trained, target))

    def described(self, shape: Eagle3Config, target: Target) -> dict[str, Any]:
        """``config.json``. vLLM counts the layers that have run; SGLang gives the index of the last of them."""
        ids = layer_ids(shape)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_keys(shape, target),
            "draft_vocab_size": shape.guessed,
            "target_hidden_size": shape.hidden_size,
            "num_aux_hidden_states": len(ids),
            IDS: ids,
            "eagle_config": {"use_aux_hidden_state": True, IDS: [number - 1 for number in ids]},
            **dict.fromkeys(OFF, False),
        }

    def tensors(self, shape: Eagle3Config, trained: Trained, target: Target) -> dict[str, Tensor]:
        """Tensors by their names; without vocabulary maps if the draft vocabulary is the whole one."""
        tensors = {theirs: trained.tensors[ours] for ours, theirs in names(self.layer).items()}
        rows = trained.tensors["d2t"] + torch.arange(shape.guessed)
        tensors["lm_head.weight"] = target.head(rows) if shape.share_head else trained.tensors["lm_head.weight"]
        if shape.guessed < shape.vocab_size:
            tensors["d2t"], tensors["t2d"] = trained.tensors["d2t"], trained.tensors["t2d"]
        return tensors

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Rename the tensors; a head equal to the target's is shared again."""
        check_variant(checkpoint.config, target)
        tensors = dict(checkpoint.tensors)
        target.check_embedding(tensors.pop("embed_tokens.weight", None))
        layer = next((name for name in ("midlayer", "layers.0") if f"{name}.hidden_norm.weight" in tensors), self.layer)
        maps = vocabulary(tensors, whole(checkpoint.config, "draft_vocab_size", default=0, least=0), target)
        guessed = len(maps["d2t"])
        rows = maps["d2t"] + torch.arange(guessed)
        head = tensors.get("lm_head.weight")
        config = {
            **layer_config(checkpoint.config),
            "vocab_size": target.parts.vocab_size,
            "draft_vocab": 0 if guessed == target.parts.vocab_size else guessed,
            "layers": ",".join(map(str, fused_layers(checkpoint.config, tensors, target))),
            "share_head": head is not None and target.is_head(head, rows),
        }
        weights = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        theirs = {**names(layer), "lm_head.weight": "lm_head.weight"}
        converted = renamed(weights, self.shapes({**config, "share_head": False}), theirs)
        if config["share_head"]:
            del converted["lm_head.weight"]
        return Trained(config, {**converted, **maps})


def names(layer: str) -> dict[str, str]:
    """Their names by ours, except for the head and the vocabulary maps."""
    norms = {f"{name}.weight": f"{layer}.{name}.weight" for name in ("input_layernorm", "hidden_norm")}
    return {"fc.weight": "fc.weight", "norm.weight": "norm.weight", **norms, **layer_names("midlayer", layer)}


def layer_ids(shape: Eagle3Config) -> list[int]:
    """Depths of the target that are fused: k is the output of its first k layers."""
    return [int(part) for part in shape.layers.split(",")]


def check_variant(config: Mapping[str, Any], target: Target) -> None:
    """Raise ``ValueError`` for other sizes and variants of the network."""
    check_sizes(config, target)
    inner = config.get("eagle_config")
    nested = inner if isinstance(inner, dict) else {}
    for key in OFF:
        if config.get(key) or nested.get(key):
            raise ValueError(f"the checkpoint has {key}, a variant of EAGLE-3 that is not supported")
    if nested.get("use_aux_hidden_state", True) is False:
        raise ValueError(
            "the checkpoint reads the last hidden state only (use_aux_hidden_state is false), which is not supported"
        )
    size = config.get("target_hidden_size") or target.parts.hidden_size
    if size != target.parts.hidden_size:
        raise ValueError(f"the checkpoint is for a target of hidden size {size}, not {target.parts.hidden_size}")


def fused_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target) -> Sequence[int]:
    """Fused depths: vLLM's numbers, else SGLang's plus one, else the paper's.  Raises ``ValueError`` for depths that
    the target does not have, and if ``fc`` reads another number of them."""
    count, inner = target.parts.num_layers, config.get("eagle_config")
    nested = listed(inner, IDS) if isinstance(inner, dict) else None
    depths = listed(config, IDS) or [i + 1 if type(i) is int else i for i in nested or ()] or [2, count // 2, count - 3]
    if not all(type(i) is int and 0 <= i <= count for i in depths):
        raise ValueError(f"the checkpoint fuses the layers {depths}, and the target has depths 0 to {count}")
    if "fc.weight" in tensors and tensors["fc.weight"].shape[1] != len(depths) * target.parts.hidden_size:
        width = tensors["fc.weight"].shape[1]
        raise ValueError(
            f"fc.weight reads {width} numbers, and {len(depths)} layers have {target.parts.hidden_size} each"
        )
    return depths


def vocabulary(tensors: Mapping[str, Tensor], guessed: int, target: Target) -> dict[str, Tensor]:
    """``d2t``, and ``t2d`` computed from it.  Raises ``ValueError`` for tokens outside of the target's vocabulary, and
    for duplicates."""
    vocab, offsets = target.parts.vocab_size, tensors.get("d2t")
    if offsets is None and guessed not in (0, vocab):
        raise ValueError(f"the checkpoint lacks the tensor d2t, the ids of its {guessed} draft tokens")
    offsets = torch.zeros(vocab, dtype=torch.int64) if offsets is None else offsets.to(torch.int64)
    if offsets.dim() != 1 or (guessed and len(offsets) != guessed):
        raise ValueError(f"d2t is {list(offsets.shape)} and must be [{guessed}]")
    tokens = offsets + torch.arange(len(offsets))
    if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise ValueError(
            f"d2t names tokens outside the target's vocabulary of {vocab}: it holds offsets, id = i + d2t[i]"
        )
    if len(tokens.unique()) < len(tokens):
        raise ValueError("d2t names a token twice: it holds offsets, id = i + d2t[i]")
    is_guessed = torch.zeros(vocab, dtype=torch.bool)
    is_guessed[tokens] = True
    return {"d2t": offsets, "t2d": is_guessed}


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
        return {
            "architectures": ["Eagle3Speculator"],
            KEY: "eagle3",
            "speculators_version": VERSION,
            "speculators_config": target.speculators_config(
                "eagle3", speculative_tokens=DEPTH, verifier_accept_k=1, accept_tolerance=0.0
            ),
            "transformer_layer_config": layer_keys(shape, target),
            "draft_vocab_size": shape.guessed,
            "target_hidden_size": shape.hidden_size,
            IDS: layer_ids(shape),
            **dict.fromkeys(OFF, False),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Read the plain layout, with the layer's configuration merged into the rest."""
        inner = checkpoint.config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise ValueError("config.json lacks transformer_layer_config")
        if "norm_before_residual" not in checkpoint.config:
            raise ValueError("config.json lacks norm_before_residual, whose default differs between projects")
        return super().read(Checkpoint({**inner, **checkpoint.config}, checkpoint.tensors), target)
