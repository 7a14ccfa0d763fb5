"""PARD's layout: a Hugging Face folder of a causal language model whose ``config.json`` names a mask token."""

from __future__ import annotations

from pathlib import Path

from foretoken.methods.drafters.pard import MASK
from foretoken.methods.drafters.target_states import FILE, read_projection
from foretoken.registry import Spec
from foretoken.training.formats.base import Target
from foretoken.training.formats.folders import Found, write_tensors
from foretoken.training.formats.model import ModelFolder

TAPS = "warp_model.bin"
"""Where PARD-2's own code reads the projection of the target's states from, pickled."""
APART = Path("..") / "pard_warp_model" / "model.safetensors"
"""Where its training writes the same beside the folder of the model."""


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
        """The same the other way.  Where only the pickle holds the projection of the target's states, the model is used
        without them.

        Raises:
            ValueError: the mask token is none of its tokens, or its projection is damaged.
        """
        mask, size = found.config[MASK], found.config.get("vocab_size")
        if type(mask) is not int or not 0 <= mask < (size if type(size) is int else mask + 1):
            raise ValueError(f"{MASK} must be one of the model's {size} tokens, not {mask!r}")
        super().read_folder(found, target, folder)
        if found.config.get("pard2") or (found.path / TAPS).exists():
            apart = next((file for file in (found.path / FILE, found.path / APART) if file.is_file()), None)
            if apart is None:
                self.warnings.append(
                    f"PARD-2's projection of the target's states ({TAPS}) is pickled, and is left out: the model was "
                    f"taught to draft without them, too, and accepts less so; write its tensors to {FILE} to keep it"
                )
            else:
                write_tensors(folder / FILE, read_projection(apart))
        return "pard:{}"
