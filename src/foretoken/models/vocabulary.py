"""Vocabularies that are resized (``resize_token_embeddings``) after a model was loaded."""

from __future__ import annotations

from typing import Any

from foretoken.models.base import LanguageModel


def check_vocabulary(model: LanguageModel) -> None:
    """Refuse a vocabulary that was resized: drafters, rules and checks of prompts were made for that of the load."""
    config: Any = getattr(model, "config", None)
    wide = getattr(config, "vocab_size", model.vocab_size)
    if wide != model.vocab_size:
        raise ValueError(f"the vocabulary has changed from {model.vocab_size} to {wide}: load the model again")
