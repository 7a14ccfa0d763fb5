"""Drafters from the target's own layers: an exit layer (also as Hugging Face's ``assistant_early_exit``) and skip
sets."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from foretoken.core.io.hub_ids import expanded
from foretoken.loading import LoadingContext
from foretoken.methods.drafters.early_exit import EarlyExitDrafter
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.own_layers import num_layers_of
from foretoken.methods.drafters.skip_sets import FORMAT, fingerprint, load_skips, save_skips
from foretoken.registry import Spec, convert_options
from foretoken.training.formats.base import Format, Target
from foretoken.training.formats.folders import Found, write_json

FILE, GENERATION, SKIPS = "early_exit.json", "generation_config.json", "layer_skip.json"
EXIT_FORMAT, VERSION = "foretoken early exit", 1
KEY = "assistant_early_exit"


class EarlyExit(Format):
    """The exit layer E is the number of layers that run, in both formats."""

    method = "early_exit"

    def recognises(self, source: Found) -> bool:
        """Whether it is our file, or a generation config with an exit layer and no weights."""
        if source.path.is_dir():
            return (source.path / FILE).exists() or (bool(source.json(GENERATION).get(KEY)) and not source.names)
        content = source.json("")
        return content.get("format") == EXIT_FORMAT or KEY in content

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        if spec.path is not None:
            raise ValueError("early_exit takes no path: export early_exit,layer=E")
        return []

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        options = convert_options("drafter", self.method, EarlyExitDrafter, spec.options)
        layer = EarlyExitDrafter(target.model, **options).layer
        self._write(layer, target, folder)
        generation = copy.deepcopy(target.parts.network.generation_config)
        setattr(generation, KEY, layer)
        generation.save_pretrained(folder)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        name = FILE if (source.path / FILE).exists() else GENERATION
        content = source.json(name)
        layer = content.get(KEY, content.get("layer"))
        if content.get("format") == EXIT_FORMAT:
            self._check(content, source, target)
        if type(layer) is not int:
            raise ValueError(f"{source.path} has no exit layer ({KEY} or layer)")
        self._write(EarlyExitDrafter(target.model, layer).layer, target, folder)
        return f"early_exit,layer={layer}"

    def _check(self, content: dict[str, Any], source: Found, target: Target) -> None:
        if content.get("version") != VERSION:
            raise ValueError(
                f"{source.path} has version {content.get('version')}, and only version {VERSION} is supported"
            )
        if content.get("target") != fingerprint(target.model):
            raise ValueError(f"{source.path} was made for another target")

    def _write(self, layer: int, target: Target, folder: Path) -> None:
        content = {"format": EXIT_FORMAT, "version": VERSION, "target": fingerprint(target.model), "layer": layer}
        write_json(folder / FILE, {**content, "layers": num_layers_of(target.model)})


class LayerSkip(Format):
    """``{"format", "version", "target", "attention": [...], "mlp": [...]}``, layers counted from 0."""

    method = "layer_skip"

    def recognises(self, source: Found) -> bool:
        if source.path.is_dir():
            return (source.path / SKIPS).exists()
        return source.json("").get("format") == FORMAT

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        return [] if spec.path is None else [expanded(spec.path).parent]

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        options = convert_options("drafter", self.method, LayerSkipDrafter, spec.options)
        drafter = LayerSkipDrafter.build(spec.path, LoadingContext(target.model, target.source), **options)
        save_skips(folder / SKIPS, drafter.skips, target.model)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        file = source.path / SKIPS if source.path.is_dir() else source.path
        skips = load_skips(file, target.model)
        skips.check(target.model)
        save_skips(folder / SKIPS, skips, target.model)
        return f"layer_skip:{{}}/{SKIPS}"
