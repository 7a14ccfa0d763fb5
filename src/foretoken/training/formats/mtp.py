"""Multi-token prediction modules of the target's own layer class: the layout of vllm-project/speculators and Qwen's
native one.

The former's ``config.json`` has ``speculators_model_type: "mtp"`` and the target's text configuration.  Its tensors are
those of a native checkpoint under the names ``mtp_layers.0.*``, with stacked experts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from foretoken.loading import has_drafter, read_head, resolve
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.mtp import MtpConfig, module_for
from foretoken.methods.drafters.nets.store import WEIGHTS, load_weights, read_description, save_drafter
from foretoken.models.forward.heads.mtp import QWEN, TARGETS_OWN, target_layer_module
from foretoken.registry import Spec
from foretoken.training.formats.base import (
    DTYPE,
    NOTE_VERSION,
    Format,
    Target,
    check_sizes,
    measured_for,
    stored,
    unquantised,
)
from foretoken.training.formats.eagle3 import KEY, VERSION
from foretoken.training.formats.engines import DEPTH
from foretoken.training.formats.folders import NOTE, Found, write_json, write_tensors

NAMES = {
    "input_proj.weight": "eh_proj.weight",
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "final_layernorm.weight": "norm.weight",
}
"""Our names of the tensors around the layer, by theirs."""
THEIRS = {ours: theirs for theirs, ours in NAMES.items()}
TENSOR = re.compile(r"mtp_layers\.(\d+)\.(.+)")


class MtpSpeculators(Format):
    """The input order is [embedding; state] in both; a step reads the state after the module's norm."""

    method = "mtp"

    def recognises(self, source: Found) -> bool:
        return source.config.get(KEY) == "mtp"

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        """The drafter's folder; none for the head in the target's own checkpoint."""
        native = spec.path is None and not spec.options and not has_drafter(self.method, target)
        return [] if native else super().inputs(spec, target)

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Export a module trained with ``layer=target``, or the target's own.  Raises ``ValueError`` for several
        modules, and for others."""
        parts, fingerprint = target.parts, target.parts.fingerprint()
        sources = self.inputs(spec, target.source)
        if sources:
            description = read_description(sources[0], self.method, fingerprint)
            config = MtpConfig(**description["config"])
            if config.modules > 1:
                raise ValueError(f"{sources[0]} has {config.modules} modules, and this layout holds one")
            if (config.layer, config.feed) != ("target", "post_norm"):
                raise ValueError(
                    f"{sources[0]} has layer={config.layer} and feed={config.feed}; this layout holds layer=target and "
                    "feed=post_norm: train it with `--set layer=target --set feed=post_norm`"
                )
            module = module_for(config, parts.network)
            load_weights(sources[0], module)
        else:
            heads = read_head(parts.network)
            if len(heads) > 1:
                raise ValueError(f"the target has {len(heads)} prediction modules, and this layout holds one")
            module = target_layer_module(parts.network, heads[0])
        tensors = {
            f"mtp_layers.0.{THEIRS.get(name, name.removeprefix('layer.'))}": tensor
            for name, tensor in stored(module).items()
        }
        write_tensors(folder / WEIGHTS, tensors)
        write_json(folder / "config.json", described(target))
        write_json(folder / NOTE, {"format": NOTE_VERSION, "method": self.method, "target": asdict(fingerprint)})

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        """Import one module, for a target of the same sizes."""
        source.check_whole()
        fingerprint = target.parts.fingerprint()
        measured = measured_for(source, self.method, fingerprint)
        inner = source.config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise ValueError("config.json lacks transformer_layer_config")
        check_sizes(inner, target)
        tensors = ours_of(unquantised(source, self.warnings))
        module = target_layer_module(target.parts.network, tensors)
        if any(tensor.is_floating_point() and tensor.dtype != DTYPE for tensor in tensors.values()):
            self.warnings.append("the weights were rounded to bfloat16")
        experts = any(".experts." in name for name in tensors)
        shape = asdict(LayerConfig.of_target(target.parts.config))
        config = asdict(MtpConfig(**shape, layer="target", feed="post_norm", experts=experts))
        save_drafter(folder, self.method, config, module, fingerprint, measured)
        return f"{self.method}:{{}}"


def ours_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one module by our names, without copies of the target's."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            if name.endswith((*TARGETS_OWN, "lm_head.weight")):
                continue
            raise ValueError(f"the checkpoint holds a tensor {name} that this network does not have")
        if match[1] != "0":
            raise ValueError("the checkpoint has several prediction modules, and one can be imported")
        converted[NAMES.get(match[2], f"layer.{match[2]}")] = tensor
    return converted


def described(target: Target) -> dict[str, Any]:
    text = target.parts.network.config.get_text_config().to_dict()
    text = {key: value for key, value in text.items() if not key.startswith("_")}
    return {
        "architectures": ["MTPDraftModel"],
        KEY: "mtp",
        "speculators_version": VERSION,
        "speculators_config": target.speculators_config("mtp", speculative_tokens=DEPTH),
        "transformer_layer_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


class MtpTargetCheckpoint(Format):
    """Export only: a head in the target's own checkpoint is used from there, as ``mtp``."""

    method = "mtp"

    def recognises(self, source: Found) -> bool:
        """Never: such a folder is a target."""
        return False

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Write the target's files with the module's tensors added.  Raises ``ValueError`` for another family or layer
        than this layout supports, and for a target in several files."""
        (source,) = self.inputs(spec, target.source)
        kind = target.parts.network.config.get_text_config().model_type
        if not kind.startswith(("qwen3_5", "qwen3_next")):
            raise ValueError(f"the native layout is that of qwen3_5 and qwen3_next, and the target is {kind}")
        config = MtpConfig(**read_description(source, self.method, target.parts.fingerprint())["config"])
        if config.modules > 1:
            raise ValueError(f"{source} has {config.modules} modules, and this layout shares all but their layers")
        if (config.layer, config.feed) != ("target", "post_norm"):
            raise ValueError(f"{source} must be trained with `--set layer=target --set feed=post_norm` for this layout")
        base = Path(resolve(target.source)).expanduser()
        if not (base / WEIGHTS).exists():
            raise ValueError(f"{base} has no {WEIGHTS}: a target in one file is needed")
        module = module_for(config, target.parts.network)
        load_weights(source, module)
        write_tensors(folder / WEIGHTS, {**load_file(base / WEIGHTS), **by_their_names(stored(module))})
        base_config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**base_config, "mtp_num_hidden_layers": 1})
        tokenizer = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
        for name in ("generation_config.json", *tokenizer, "chat_template.jinja"):
            if (base / name).exists():
                shutil.copyfile(base / name, folder / name)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        raise ValueError(f"{source.path} is a target: use its head with --target {source.path} --drafter mtp")


def by_their_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shared = {ours: theirs for theirs, ours in QWEN.items()}
    return {shared.get(name, f"mtp.layers.0.{name.removeprefix('layer.')}"): tensor for name, tensor in tensors.items()}
