"""Draft models as Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path

from foretoken.core.io.hub_ids import expanded
from foretoken.loading import build_draft_model, check_folder, resolve
from foretoken.methods.drafters.pard import MASK, MASKS
from foretoken.methods.drafters.target_states import FILE, read_projection
from foretoken.registry import Spec
from foretoken.training.formats.base import NOTE_VERSION, Format, Target
from foretoken.training.formats.folders import MODEL_FILES, NOTE, Found, write_json, write_tensors
from foretoken.training.formats.values import class_of

TAPS = "warp_model.bin"
"""File with the pickled projection of the target's states in PARD-2's own code."""
APART = Path("..") / "pard_warp_model" / "model.safetensors"
"""Path where PARD-2's training writes the same, relative to the model's folder."""


class ModelFolder(Format):
    """A plain copy, with the target's tokenizer if it has none."""

    method = "model"

    def recognises(self, source: Found) -> bool:
        causal = class_of(source.config).endswith(("ForCausalLM", "LMHeadModel"))
        return causal and any(
            name.endswith("lm_head.weight") or "embed" in name or "wte" in name for name in source.names
        )

    def inputs(self, spec: Spec, target: str) -> list[Path]:
        if spec.options:
            raise ValueError(f"options of a draft model are not exported: leave out {', '.join(spec.options)}")
        if spec.path is None and target != "builtin":
            raise ValueError("give the draft model to export, model:FOLDER")
        folder = expanded(resolve(spec.path or "builtin", "draft"))
        check_folder(folder)
        return [folder]

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        (source,) = self.inputs(spec, target.source)
        self._copy(source, target, folder)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        check_folder(source.path)
        self._copy(source.path, target, folder)
        if source.inside is not None:
            self.warnings.append(f"its subfolder {source.inside.name} holds a drafter: import {source.inside} for that")
        return "model:{}"

    def _copy(self, source: Path, target: Target, folder: Path) -> None:
        draft = build_draft_model(str(source), target.model, target.source, target.tokenizer, None)
        if draft.vocab_size != target.model.vocab_size:
            self.warnings.append(
                f"the draft model has {draft.vocab_size} logits and the target {target.model.vocab_size}: vLLM needs "
                "them to be equal"
            )
        for pattern in MODEL_FILES:  # others of its folder are not copied
            for file in sorted(source.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
        tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
        if target.tokenizer is not None and not any((source / name).exists() for name in tokenizers):
            target.tokenizer.save_pretrained(folder)
            self.warnings.append("the draft model has no tokenizer: the target's was written beside it")
        if not (folder / "generation_config.json").exists():
            write_json(folder / "generation_config.json", {})
        write_json(folder / NOTE, {"format": NOTE_VERSION, "method": self.method})  # --force replaces what has a note


class PardFolder(ModelFolder):
    """AMD's PARD: a plain copy of a model with a mask token."""

    method = "pard"

    def recognises(self, source: Found) -> bool:
        return MASK in source.config and super().recognises(source)

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Check the model and its mask token, and copy it.  Raises ``ValueError`` if it has no mask token."""
        (source,) = self.inputs(spec, target.source)
        if MASK not in Found(source).config:
            raise ValueError(f"{source} is a draft model without a {MASK}: export it as model:{source}")
        if Found(source).config.get(MASKS, 1) != 1:
            raise ValueError(f"{source} has distinct masks ({MASKS}), and this layout has one for all positions")
        super().write_folder(spec, target, folder)

    def read_folder(self, source: Found, target: Target, folder: Path) -> str:
        """Check and copy it.  If the projection of the target's states is only pickled, the model is used without it.
        Raises ``ValueError`` if the mask token is not in its vocabulary, or its projection is damaged."""
        mask, size = source.config[MASK], source.config.get("vocab_size")
        if type(mask) is not int or not 0 <= mask < (size if type(size) is int else mask + 1):
            raise ValueError(f"{MASK} must be one of the model's {size} tokens, not {mask!r}")
        super().read_folder(source, target, folder)
        if source.config.get("pard2") or (source.path / TAPS).exists():
            apart = next((file for file in (source.path / FILE, source.path / APART) if file.is_file()), None)
            if apart is None:
                self.warnings.append(
                    f"PARD-2's projection of the target's states ({TAPS}) is pickled, and is left out: the model also "
                    f"drafts without them, with fewer accepted tokens; write its tensors to {FILE} to keep it"
                )
            else:
                write_tensors(folder / FILE, read_projection(apart))
        return "pard:{}"
