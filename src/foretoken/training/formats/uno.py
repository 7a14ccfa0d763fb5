"""UNO's updates as a PEFT adapter, the layout in which they are published (folder ``adapter/``).

Ifm 2026 (arXiv 2609.04010).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import ADAPTER_CONFIG
from foretoken.loading.adapters import variants_of
from foretoken.methods.drafters.nets.uno import UnoConfig, UnoNet
from foretoken.models.network.taps import decoder_layers
from foretoken.models.variants.gated import linear_shapes
from foretoken.training.formats.base import Checkpoint, NetFormat, Target, Trained, by_names, renamed
from foretoken.training.formats.folders import NOTE, Found
from foretoken.training.formats.values import positive, whole

FACTOR = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)\.(lora_[AB])(?:\.\w+)?\.weight$")
"""An update's name, from whatever contains the decoder layers: its layer, linear layer and factor."""
NOISE = {"places": int, "noise": str, "mask_token": int}
PUBLISHED_PLACES = 16
"""Tokens per forward (B) that the published adapters were trained for; their files do not say it."""


class UnoPeft(NetFormat):
    """A LoRA without further parts.  PEFT has no keys for the noise: an export states them in its note."""

    _given: Any = None

    method = "uno"
    net_config = UnoConfig
    net_class = UnoNet
    config_file = ADAPTER_CONFIG
    weights = "adapter_model.safetensors"

    def recognises(self, source: Found) -> bool:
        return source.path.is_dir() and any(FACTOR.search(name) for name in source.names)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        self._given = source.json(NOTE).get("noise")
        return super().read_folder(source, target, folder)

    def noted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"noise": {key: config[key] for key in NOISE}}

    def write(self, trained: Trained, target: Target) -> Checkpoint:
        shape = UnoConfig(**trained.config)
        prefix = f"base_model.model.{_path(target)}"
        return Checkpoint(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": target.name,
                "r": shape.rank,
                "lora_alpha": shape.scale * shape.rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": sorted({name.rpartition(".")[2] for name in shape.shapes}),
                "inference_mode": True,
            },
            {f"{prefix}{name.removeprefix('layers')}.weight": value for name, value in trained.tensors.items()},
        )

    def read(self, checkpoint: Checkpoint, target: Target) -> Trained:
        config = checkpoint.config
        if config.get("peft_type") != "LORA":
            raise ValueError(f"{ADAPTER_CONFIG} has peft_type {config.get('peft_type')!r}: uno is read from a LORA")
        if variants := variants_of(config):
            raise ValueError(f"{ADAPTER_CONFIG} uses {variants}, and uno is read from a plain LORA")
        rank = whole(config, "r")
        alpha = positive(config, "lora_alpha", default=8.0) * (rank**0.5 if config.get("use_rslora") else 1)
        tensors = by_names(checkpoint.tensors, _ours)
        linears = {name.partition(".")[2].partition(".")[2].rpartition(".")[0] for name in tensors}
        have = linear_shapes(target.parts.network)
        if missing := sorted(linears - have.keys()):
            raise ValueError(
                f"the adapter updates {missing[0]}, which is no linear layer of every layer of this target"
            )
        shape = {
            "vocab_size": target.parts.vocab_size,
            "num_layers": target.parts.num_layers,
            "shapes": {name: have[name] for name in have if name in linears},
            "rank": rank,
            "alpha": alpha,
            **self._noise(target),
        }
        shapes = self.shapes(shape)
        return Trained(shape, renamed(tensors, shapes, {name: name for name in shapes}))

    def _noise(self, target: Target) -> dict[str, Any]:
        if isinstance(self._given, Mapping):
            given = {key: self._given[key] for key in NOISE if key in self._given}
            if any(type(value) is not NOISE[key] for key, value in given.items()):
                raise ValueError(f"{NOTE} is damaged: copy it again, or remove it")
            return given
        bound = min(len(target.tokenizer), target.parts.vocab_size) if target.tokenizer else target.parts.vocab_size
        self.warnings.append(
            f"a PEFT adapter does not say what was drafted: {PUBLISHED_PLACES} tokens a forward behind random tokens "
            f"below {bound} are taken, as published (an ordinary LoRA is no drafter: load it as MODEL)"
        )
        return {"places": PUBLISHED_PLACES, "noise": "random", "mask_token": bound}


def _path(target: Target) -> str:
    """Where the decoder layers are in the target's network, ``model.layers``."""
    layers = decoder_layers(target.parts.network)
    return next(name for name, module in target.parts.network.named_modules() if module is layers)


def _ours(name: str) -> str:
    """Our name of a factor.  Raises ``ValueError`` for a tensor that is no update of a decoder layer."""
    match = FACTOR.search(name)
    if match is None:
        raise ValueError(f"the adapter holds {name}, which is no update of a linear layer of the decoder's layers")
    return f"layers.{match[1]}.{match[2]}.{match[3]}"
