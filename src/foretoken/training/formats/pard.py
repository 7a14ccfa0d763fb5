"""PARD's layout: a Hugging Face folder of a causal language model whose ``config.json`` names a mask token."""

from __future__ import annotations

from pathlib import Path

from foretoken.methods.drafters.pard import MASK
from foretoken.registry import Spec
from foretoken.training.formats.base import Target
from foretoken.training.formats.folders import Found
from foretoken.training.formats.model import ModelFolder

TAPS = "warp_model.bin"
"""Where PARD-2 keeps the projection of the target's states, pickled."""


class PardFolder(ModelFolder):
    """Copied as it is."""

    method = "pard"

    def recognises(self, found: Found) -> bool:
        """A model with a mask token."""
        return MASK in found.config and super().recognises(found)

    def write_folder(self, spec: Spec, target: Target, folder: Path) -> None:
        """Check the model and its mask token, and copy it.

        Raises:
            ValueError: it names no mask token.
        """
        (source,) = self.inputs(spec, target.source)
        if MASK not in Found(source).config:
            raise ValueError(f"{source} is a draft model without a {MASK}: export it as model:{source}")
        super().write_folder(spec, target, folder)

    def read_folder(self, found: Found, target: Target, folder: Path) -> str:
        """The same the other way; a model that reads the target's states beside is used without them.

        Raises:
            ValueError: the mask token is none of its tokens.
        """
        mask, size = found.config[MASK], found.config.get("vocab_size")
        if type(mask) is not int or not 0 <= mask < (size if type(size) is int else mask + 1):
            raise ValueError(f"{MASK} must be one of the model's {size} tokens, not {mask!r}")
        if found.config.get("pard2") or (found.path / TAPS).exists():
            self.warnings.append(
                f"PARD-2's projection of the target's states ({TAPS}) is pickled, and is left out: the model was "
                "taught to draft without them, too, and accepts less so"
            )
        super().read_folder(found, target, folder)
        return "pard:{}"
