"""A target with its multi-token prediction module in one checkpoint, as Qwen3-Next and Qwen3.5 are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from foretoken.loading import drafter_folder, resolve
from foretoken.methods.drafters.nets.mtp import MtpConfig, module_for
from foretoken.methods.drafters.nets.store import WEIGHTS, load_weights, read_description
from foretoken.models.forward.heads.mtp import QWEN
from foretoken.registry import Spec
from foretoken.training.formats.base import Format, Target, stored
from foretoken.training.formats.folders import Found, write_json, write_tensors

SHARED = {ours: theirs for theirs, ours in QWEN.items()}
DECLARED = "mtp_num_hidden_layers"
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
          "merges.txt", "chat_template.jinja")  # fmt: skip
"""What is taken over from the target's folder beside its configuration and weights."""


class MtpNative(Format):
    """Written only: what is in the target's own checkpoint is used where it is, as ``mtp``."""

    method = "mtp"

    def recognises(self, found: Found) -> bool:
        """Never: such a folder is a target."""
        return False

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        """The drafter's folder."""
        if spec.options:
            raise ValueError(f"options of {self.method} are not exported: leave out {', '.join(spec.options)}")
        return [drafter_folder(self.method, spec.path, target)]

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """The target's files with the module's tensors in them.

        Raises:
            ValueError: another family or layer than this layout is for, or a target in several files.
        """
        (source,) = self.inputs(spec, target.source)
        kind = target.parts.network.config.get_text_config().model_type
        if not kind.startswith(("qwen3_5", "qwen3_next")):
            raise ValueError(f"the native layout is that of qwen3_5 and qwen3_next, and the target is {kind}")
        config = MtpConfig(**read_description(source, self.method, target.parts.fingerprint())["config"])
        if config.modules > 1:
            raise ValueError(f"{source} has {config.modules} modules, and this layout shares all but their layers")
        if (config.layer, config.feed) != ("target", "post_norm"):
            raise ValueError(f"{source} must be trained with `--set layer=target --set feed=post_norm` for this layout")
        place = Path(resolve(target.source)).expanduser()
        if not (place / WEIGHTS).exists():
            raise ValueError(f"{place} has no {WEIGHTS}: a target in one file is needed")
        module = module_for(config, target.parts.network)
        load_weights(source, module)
        write_tensors(folder / WEIGHTS, {**load_file(place / WEIGHTS), **named(stored(module))})
        told = json.loads((place / "config.json").read_text(encoding="utf-8"))
        write_json(folder / "config.json", {**told, DECLARED: 1})
        for name in COPIED:
            if (place / name).exists():
                shutil.copyfile(place / name, folder / name)

    def read_folder(self, found: Found, target: Target, folder: Path) -> str:
        """There is nothing to read.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{found.path} is a target: use its head with --target {found.path} --drafter mtp")


def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors by the checkpoint's names."""
    return {SHARED.get(name, f"mtp.layers.0.{name.removeprefix('layer.')}"): tensor for name, tensor in tensors.items()}
