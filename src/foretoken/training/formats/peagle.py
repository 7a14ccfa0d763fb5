"""P-EAGLE's checkpoints: EAGLE-3's tensors, more layers, and ``mask_hidden`` (arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.methods.drafters.nets.peagle import DEEPEST, PeagleConfig, PeagleNet
from foretoken.training.formats.base import Checkpoint, Target, Trained
from foretoken.training.formats.eagle3 import KEY, Eagle3Plain, Eagle3Speculators
from foretoken.training.formats.engines import DRAFTED, drafted
from foretoken.training.formats.folders import Found
from foretoken.training.formats.values import whole

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token; the first present one counts."""
MASK_HIDDEN = "mask_hidden"


class ParallelParts(Eagle3Plain):
    """The parts beyond EAGLE-3's that both layouts have; ``layers.0`` is the wide layer."""

    method = "peagle"
    net_config = PeagleConfig
    net_class = PeagleNet
    layer = "layers.0"
    learns_embedding = True

    def names(self, shape: Any, layer: str) -> dict[str, str]:
        return {**super().names(shape, layer), MASK_HIDDEN: MASK_HIDDEN}

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        """Read EAGLE-3's part and the rest.  Raises ``ValueError`` without a learned state or mask token."""
        hidden = checkpoint.tensors.get(MASK_HIDDEN)
        if hidden is None:
            raise ValueError(f"the checkpoint lacks the tensor {MASK_HIDDEN}: without it, import it as eagle3")
        tensors = {**checkpoint.tensors, MASK_HIDDEN: hidden.reshape(1, 1, -1)}
        return super().read(Checkpoint(checkpoint.config, tensors), target)

    def more(self, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
        return {"places": self._places(config), "mask_token": _mask(config)}

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
        config |= {"architectures": ["PEagleDraftModel"], DRAFTED: shape.places}
        return {**config, **dict.fromkeys(MASKS, shape.mask_token)}


class PeagleSpeculators(ParallelParts, Eagle3Speculators):
    """The layout of vllm-project/speculators, with everything in one ``config.json``."""

    def recognises(self, source: Found) -> bool:
        return source.config.get(KEY) == "peagle"

    def described(self, shape: Any, target: Target) -> dict[str, Any]:
        config = super().described(shape, target)
        config["speculators_config"] |= {"algorithm": "peagle"}
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = shape.places
        config |= {KEY: "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": shape.mask_token}
        return config


def _mask(config: Mapping[str, Any]) -> int:
    key = next((key for key in MASKS if config.get(key) is not None), None)
    if key is None:
        raise ValueError(f"config.json has no mask token: it needs one of {', '.join(MASKS)}")
    return whole(config, key, least=0)
