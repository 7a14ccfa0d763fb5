"""P-EAGLE's checkpoints: EAGLE-3's tensors, more layers, and ``mask_hidden`` (arXiv 2602.01469)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foretoken.methods.drafters.nets.peagle import DEEPEST, PeagleConfig, PeagleNet
from foretoken.training.formats.base import Checkpoint, Target, Trained, renamed
from foretoken.training.formats.eagle3 import KEY, Eagle3Plain, Eagle3Speculators
from foretoken.training.formats.engines import DRAFTED, drafted
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_names
from foretoken.training.formats.values import whole

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token; the first present one counts."""
MASK_HIDDEN, EMBEDDING = "mask_hidden", "embed_tokens.weight"
NUMBERED = re.compile(r"layers\.(\d+)\.")


class ParallelParts(Eagle3Plain):
    """The parts beyond EAGLE-3's that both layouts have; ``layers.0`` is the wide layer."""

    method = "peagle"
    net_config = PeagleConfig
    net_class = PeagleNet
    layer = "layers.0"

    def tensors(self, shape: Any, trained: Trained, target: Target) -> dict[str, Tensor]:
        more = {**further_names(shape.num_layers), MASK_HIDDEN: MASK_HIDDEN}
        if shape.own_embedding:
            more[EMBEDDING] = EMBEDDING
        further = {theirs: trained.tensors[ours] for ours, theirs in more.items()}
        return {**super().tensors(shape, trained, target), **further}

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Read EAGLE-3's part and the rest.  Raises ``ValueError`` without a learned state or mask token, and for
        another number of layers than in ``config.json``."""
        tensors = dict(checkpoint.tensors)
        hidden = tensors.pop(MASK_HIDDEN, None)
        if hidden is None:
            raise ValueError(f"the checkpoint lacks the tensor {MASK_HIDDEN}: without it, import it as eagle3")
        embedding = tensors.pop(EMBEDDING, None)
        inner = checkpoint.config.get("transformer_layer_config")
        merged = {**inner, **checkpoint.config} if isinstance(inner, Mapping) else checkpoint.config
        count = _layers(merged, tensors)
        further = {name: tensors.pop(name) for name in list(tensors) if _number(name) > 0}
        own_embedding = embedding if embedding is not None and not target.is_embedding(embedding) else None
        plain = {**checkpoint.config, "num_hidden_layers": 1}
        if isinstance(inner, Mapping):
            plain["transformer_layer_config"] = {**inner, "num_hidden_layers": 1}
        base = super().read(Checkpoint(plain, tensors), target)
        more = {
            "num_layers": count,
            "places": self._places(merged),
            "mask_token": _mask(merged),
            "own_embedding": own_embedding is not None,
        }
        config = {**base.config, **more}
        shapes = self.shapes({**config, "share_head": False})
        further[MASK_HIDDEN] = hidden.reshape(1, 1, -1)
        names = {**further_names(count), MASK_HIDDEN: MASK_HIDDEN}
        if own_embedding is not None:
            further[EMBEDDING], names[EMBEDDING] = own_embedding, EMBEDDING
        return Trained(config, {**base.tensors, **renamed(further, shapes, names)})

    def _places(self, config: Mapping[str, Any]) -> int:
        count = drafted(config, 8)
        if count > DEEPEST:
            self.warnings.append(f"the checkpoint drafts {count} tokens, and this drafter {DEEPEST} at most")
        return min(count, DEEPEST)


class PeaglePlain(ParallelParts):
    """The layout with bare names."""

    def recognises(self, source: Found) -> bool:
        return MASK_HIDDEN in source.names and KEY not in source.config and super().recognises(source)

    def described(self, shape: Any, target: Target) -> dict[str, Any]:
        """``config.json``; readers use different keys for the mask token."""
        config = super().described(shape, target)
        config |= {"architectures": ["PEagleDraftModel"], "num_hidden_layers": shape.num_layers, DRAFTED: shape.places}
        return {**config, **dict.fromkeys(MASKS, shape.mask_token)}


class PeagleSpeculators(ParallelParts, Eagle3Speculators):
    """The layout of vllm-project/speculators, with everything in one ``config.json``."""

    def recognises(self, source: Found) -> bool:
        return source.config.get(KEY) == "peagle"

    def described(self, shape: Any, target: Target) -> dict[str, Any]:
        config = super().described(shape, target)
        config["speculators_config"] |= {"algorithm": "peagle"}
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = shape.places
        config["transformer_layer_config"]["num_hidden_layers"] = shape.num_layers
        config |= {KEY: "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": shape.mask_token}
        return {**config, "embed_requires_grad": shape.own_embedding}


def further_names(count: int) -> dict[str, str]:
    """Their names of the layers after the wide one, by our names."""
    names: dict[str, str] = {}
    for index in range(1, count):
        ours, theirs = f"layers.{index - 1}", f"layers.{index}"
        norm = {f"{ours}.input_layernorm.weight": f"{theirs}.input_layernorm.weight"}
        names |= {**layer_names(ours, theirs), **norm}
    return names


def _number(name: str) -> int:
    match = NUMBERED.match(name)
    return int(match[1]) if match else 0


def _layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    count = 1 + max((_number(name) for name in tensors), default=0)
    stated = whole(config, "num_hidden_layers", default=count, least=1)
    if stated != count:
        raise ValueError(f"the checkpoint has tensors of {count} layers, and config.json says {stated}")
    return count


def _mask(config: Mapping[str, Any]) -> int:
    key = next((key for key in MASKS if config.get(key) is not None), None)
    if key is None:
        raise ValueError(f"config.json has no mask token: it needs one of {', '.join(MASKS)}")
    return whole(config, key, least=0)
