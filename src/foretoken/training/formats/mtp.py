"""Multi-token prediction modules of the target's own layer class: the layout of vllm-project/speculators and the native
ones of Qwen, DeepSeek and GLM.

The former's ``config.json`` has ``speculators_model_type: "mtp"`` and the target's text configuration.  Its tensors are
those of a native checkpoint under the names ``mtp_layers.{i}.*``, with stacked experts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.core.io.hub_ids import expanded
from foretoken.loading import has_drafter, read_head, resolve
from foretoken.methods.drafters.nets.decoder import LayerConfig
from foretoken.methods.drafters.nets.mtp import MtpConfig, module_for
from foretoken.methods.drafters.nets.store import WEIGHTS, load_weights, read_description, save_drafter
from foretoken.models.forward.heads.mtp import NEXTN, QWEN, TARGETS_OWN, target_layer_module, unfused
from foretoken.models.forward.heads.stacked import StackedModules
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
from foretoken.training.formats.values import whole

NAMES = {
    "input_proj.weight": "eh_proj.weight",
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "final_layernorm.weight": "norm.weight",
}
"""Our names of the tensors around the layer, by theirs."""
THEIRS = {ours: theirs for theirs, ours in NAMES.items()}
QWEN_FAMILIES, NEXTN_FAMILIES = ("qwen3_5", "qwen3_next"), ("deepseek_v3", "glm4_moe")
"""Families of the native layouts: prefixes of Qwen's names, and those with modules as layers after the target's."""
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
        """Export modules trained with ``layer=target``, or the target's own.  Raises ``ValueError`` for others."""
        parts, fingerprint = target.parts, target.parts.fingerprint()
        sources = self.inputs(spec, target.source)
        measured: dict[str, Any] = {}
        if sources:
            modules = trained_modules(sources[0], target)
            measured = read_description(sources[0], self.method, fingerprint)["measured"]
        else:
            modules = [target_layer_module(parts.network, head) for head in read_head(parts.network)]
        tensors = {
            f"mtp_layers.{number}.{THEIRS.get(name, name.removeprefix('layer.'))}": tensor
            for number, module in enumerate(modules)
            for name, tensor in stored(module).items()
        }
        write_tensors(folder / WEIGHTS, tensors)
        write_json(folder / "config.json", described(target, len(modules)))
        note = {"format": NOTE_VERSION, "method": self.method, "target": asdict(fingerprint), "measured": measured}
        write_json(folder / NOTE, note)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        """Import the modules, for a target of the same sizes."""
        source.check_whole()
        fingerprint = target.parts.fingerprint()
        measured = measured_for(source, self.method, fingerprint)
        inner = source.config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise ValueError("config.json lacks transformer_layer_config")
        check_sizes(inner, target)
        by_module = ours_of(unquantised(source, self.warnings))
        key, count = "num_nextn_predict_layers", len(by_module)
        if whole(source.config, key, default=count, least=0) > count:
            raise ValueError(f"config.json says {key} {source.config[key]}, and the checkpoint has tensors of {count}")
        modules = [target_layer_module(target.parts.network, tensors) for tensors in by_module]
        tensors = [tensor for module in by_module for tensor in module.values()]
        if any(tensor.is_floating_point() and tensor.dtype != DTYPE for tensor in tensors):
            self.warnings.append("the weights were rounded to bfloat16")
        experts = {any(".experts." in name for name in module) for module in by_module}
        if len(experts) > 1:
            raise ValueError("some of its prediction modules have experts and others have none")
        shape = asdict(LayerConfig.of_target(target.parts.config))
        config = MtpConfig(**shape, layer="target", feed="post_norm", experts=experts.pop(), modules=len(modules))
        net = StackedModules(modules) if len(modules) > 1 else modules[0]
        save_drafter(folder, self.method, asdict(config), net, fingerprint, measured)
        return f"{self.method}:{{}}"


def trained_modules(source: Path, target: Target) -> list[nn.Module]:
    """The trained modules of a folder, in step order.  Raises ``ValueError`` for another layer class or input than
    these layouts hold."""
    config = MtpConfig(**read_description(source, "mtp", target.parts.fingerprint())["config"])
    if (config.layer, config.feed) != ("target", "post_norm"):
        raise ValueError(
            f"{source} has layer={config.layer} and feed={config.feed}; this layout holds layer=target and "
            "feed=post_norm: train it with `--set layer=target --set feed=post_norm`"
        )
    net = module_for(config, target.parts.network)
    load_weights(source, net)
    return list(net.steps) if isinstance(net, StackedModules) else [net]


def ours_of(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors of every module by our names, without copies of the target's."""
    converted: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            if name.endswith((*TARGETS_OWN, "lm_head.weight")):
                continue
            raise ValueError(f"the checkpoint holds a tensor {name} that this network does not have")
        converted.setdefault(int(match[1]), {})[NAMES.get(match[2], f"layer.{match[2]}")] = tensor
    missing = next((number for number in range(len(converted)) if number not in converted), None)
    if missing is not None or not converted:
        raise ValueError(f"the checkpoint lacks the tensors mtp_layers.{missing or 0}.*: it is incomplete")
    return [converted[number] for number in range(len(converted))]


def described(target: Target, modules: int) -> dict[str, Any]:
    text = target.parts.network.config.get_text_config().to_dict()
    text = {key: value for key, value in text.items() if not key.startswith("_")}
    return {
        "architectures": ["MTPDraftModel"],
        KEY: "mtp",
        "num_nextn_predict_layers": modules,
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
        """By the note of an export: such a folder is a target."""
        note = source.json(NOTE) if source.path.is_dir() else {}
        return note.get("method") == self.method and KEY not in source.config

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Write the target's files with the modules' tensors added.  Raises ``ValueError`` for another family or layer
        than this layout supports, and for a target in several files."""
        (source,) = self.inputs(spec, target.source)
        config = target.parts.network.config.get_text_config()
        kind = str(config.model_type)
        if kind not in NEXTN_FAMILIES and not kind.startswith(QWEN_FAMILIES):
            families = " and ".join((*QWEN_FAMILIES, *NEXTN_FAMILIES))
            raise ValueError(f"the native layout is that of {families}, and the target is {kind}")
        modules = trained_modules(source, target)
        base = expanded(resolve(target.source))
        if not (base / WEIGHTS).exists():
            raise ValueError(f"{base} has no {WEIGHTS}: a target in one file is needed")
        if kind in NEXTN_FAMILIES:
            tensors = nextn_tensors([stored(module) for module in modules], int(config.num_hidden_layers), target)
            key = "num_nextn_predict_layers"
        else:
            if len(modules) > 1:
                raise ValueError(f"{source} has {len(modules)} modules, and this layout shares all but their layers")
            tensors, key = by_their_names(stored(modules[0])), "mtp_num_hidden_layers"
        write_tensors(folder / WEIGHTS, {**load_file(base / WEIGHTS), **tensors})
        base_config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**base_config, key: len(modules)})
        tokenizer = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
        for name in ("generation_config.json", *tokenizer, "chat_template.jinja"):
            if (base / name).exists():
                shutil.copyfile(base / name, folder / name)
        write_json(folder / NOTE, {"format": NOTE_VERSION, "method": self.method})  # --force replaces what has a note

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        raise ValueError(f"{source.path} is a target: use its head with --target {source.path} --drafter mtp")


def by_their_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shared = {ours: theirs for theirs, ours in QWEN.items()}
    return {shared.get(name, f"mtp.layers.0.{name.removeprefix('layer.')}"): tensor for name, tensor in tensors.items()}


def nextn_tensors(modules: Sequence[Mapping[str, Tensor]], num_layers: int, target: Target) -> dict[str, Tensor]:
    """Modules as layers after the target's own, each with the target's embedding and projection, as engines expect."""
    names = {ours: theirs for theirs, ours in NEXTN.items()}
    written: dict[str, Tensor] = {}
    for number, tensors in enumerate(modules, num_layers):
        own = {names.get(name, name.removeprefix("layer.")): tensor for name, tensor in unfused(tensors).items()}
        own["embed_tokens.weight"] = target.parts.embed.weight.detach().to(DTYPE).cpu().clone()
        own["shared_head.head.weight"] = target.head().clone()
        written.update({f"model.layers.{number}.{name}": tensor for name, tensor in own.items()})
    return written
