"""EAGLE-3 as vllm-project/speculators keeps it: one ``config.json`` that says how to serve it, ``layers.0``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.methods.drafters.nets.eagle3 import Eagle3Config
from foretoken.training.formats.base import Checkpoint, Target, Trained
from foretoken.training.formats.eagle3_plain import IDS, OFF, Eagle3Plain, layer_ids
from foretoken.training.formats.engines import DEPTH
from foretoken.training.formats.folders import Found
from foretoken.training.formats.llama_layer import layer_keys

KEY = "speculators_model_type"
READ = ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
"""Types of such checkpoints that are read."""
VERSION = "0.9.0"
"""The version whose layout this is."""


class Eagle3Speculators(Eagle3Plain):
    """``norm_before_residual`` is always written: its default differs between vLLM and the package."""

    layer = "layers.0"

    def recognises(self, found: Found) -> bool:
        """By its own key.

        Raises:
            ValueError: it is a drafter of another kind.
        """
        kind = found.config.get(KEY)
        if kind not in (None, *READ):
            known = ", ".join(READ)
            raise ValueError(f"{found.path} is a speculators checkpoint of the type {kind!r}: {known} can be imported")
        return kind == "eagle3"

    def described(self, shape: Eagle3Config, target: Target) -> dict[str, Any]:
        """``config.json``."""
        return {
            "architectures": ["Eagle3Speculator"],
            KEY: "eagle3",
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": DEPTH,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": target.name, "architectures": target.architectures},
            },
            "transformer_layer_config": layer_keys(shape, target),
            "draft_vocab_size": shape.guessed,
            "target_hidden_size": shape.hidden_size,
            IDS: layer_ids(shape),
            **dict.fromkeys(OFF, False),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def read(self, found: Checkpoint, target: Target) -> Trained:
        """The plain layout, once the layer's own configuration is laid beside the rest."""
        inner = found.config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise ValueError("config.json lacks transformer_layer_config")
        if "norm_before_residual" not in found.config:
            raise ValueError("config.json lacks norm_before_residual, whose default differs from reader to reader")
        return super().read(Checkpoint({**inner, **found.config}, found.tensors), target)
