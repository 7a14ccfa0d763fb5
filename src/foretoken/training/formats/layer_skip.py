"""Which sublayers a target leaves out when it drafts: the JSON file of ``foretoken tune layer-skip``."""

from __future__ import annotations

from pathlib import Path

from foretoken.loading import LoadingContext
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.skip_sets import FORMAT, load_skips, save_skips
from foretoken.registry import Spec, convert_options
from foretoken.training.formats.base import Format, Target
from foretoken.training.formats.folders import Found

FILE = "layer_skip.json"


class LayerSkip(Format):
    """``{"format", "version", "target", "attention": [...], "mlp": [...]}``, layers counted from 0."""

    method = "layer_skip"

    def recognises(self, found: Found) -> bool:
        """By the file's name in a folder, by its content alone."""
        if found.path.is_dir():
            return (found.path / FILE).exists()
        return found.json("").get("format") == FORMAT

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        """The folder of a file of sets, if one is given."""
        return [] if spec.path is None else [Path(spec.path).expanduser().parent]

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """The set of a spec ``layer_skip[:FILE][,attention=...,mlp=...]``."""
        options = convert_options("drafter", self.method, LayerSkipDrafter, spec.options)
        drafter = LayerSkipDrafter.build(spec.path, LoadingContext(target.model, target.source), **options)
        save_skips(folder / FILE, drafter.skips, target.model)

    def read_folder(self, found: Found, target: Target, folder: Path) -> str:
        """The same set, checked against the target."""
        file = found.path / FILE if found.path.is_dir() else found.path
        skips = load_skips(file, target.model)
        skips.check(target.model)
        save_skips(folder / FILE, skips, target.model)
        return f"layer_skip:{{}}/{FILE}"
