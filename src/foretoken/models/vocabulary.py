"""Detection of a vocabulary resized (``resize_token_embeddings``) after the model was loaded."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import LanguageModel


def check_vocabulary(model: LanguageModel) -> None:
    """Raise ``ValueError`` if the vocabulary was resized: drafters, verifiers and prompt checks use the original
    one."""
    config: Any = getattr(model, "config", None)
    wide = getattr(config, "vocab_size", model.vocab_size)
    if wide != model.vocab_size:
        raise ValueError(f"the vocabulary has changed from {model.vocab_size} to {wide}: load the model again")
