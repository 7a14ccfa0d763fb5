"""DSpark as DeepSpec, SpecForge and LFM2's drafters have it: DFlash's layout, a Markov head and a confidence head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from foretoken.methods.drafters.nets.dspark import DsparkConfig, DsparkNet
from foretoken.training.formats.dflash_plain import DflashPlain, DflashSpeculators
from foretoken.training.formats.values import flag, whole

W1 = "markov_head.markov_w1.weight"
TOP = 64
"""Candidates of a place: more than any draft of the published networks needs, and few of a large vocabulary."""


class DsparkPlain(DflashPlain):
    """Which heads there are is told by the tensors."""

    method = "dspark"
    net_config: ClassVar[type[Any]] = DsparkConfig
    net_class: ClassVar[type[Any]] = DsparkNet
    architecture = "DSparkDraftModel"

    def extras(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Both heads.

        Raises:
            ValueError: the Markov head is missing, or ``config.json`` names another one than there is.
        """
        if W1 not in tensors:
            raise ValueError(f"the checkpoint lacks the tensor {W1}: it is incomplete")
        heads = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        head = next((kind for name, kind in heads.items() if name in tensors), "vanilla")
        told = config.get("markov_head_type") or head
        if told != head:
            raise ValueError(f"config.json says markov_head_type {told!r}, and the tensors are those of {head!r}")
        rank = whole(config, "markov_rank", default=tensors[W1].shape[-1])
        reader, confidence = tensors.get("confidence_head.proj.weight"), ""
        if reader is not None:
            confidence = "both" if reader.shape[-1] == rank + whole(config, "hidden_size") else "state"
        return {
            "from_anchor": flag(config, "sample_from_anchor") is not False,
            "rank": rank,
            "top": whole(config, "markov_candidates", default=TOP),
            "head": head,
            "confidence": confidence,
        }

    def inner_keys(self, shape: Any) -> dict[str, Any]:
        """Further keys of ``dflash_config``."""
        return {
            "projector_type": "dspark",
            "markov_rank": shape.rank,
            "markov_head_type": shape.head,
            "markov_candidates": shape.top,
            "enable_confidence_head": bool(shape.confidence),
            "confidence_head_with_markov": shape.confidence == "both",
        }


class DsparkSpeculators(DflashSpeculators, DsparkPlain):
    """The same as vllm-project/speculators keeps it."""

    method = "dspark"
    architecture = "DSparkSpeculator"
