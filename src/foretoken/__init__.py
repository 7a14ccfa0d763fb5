"""foretoken: every speculative decoding method for Hugging Face causal language models, exact and measured.

Heavy modules are imported on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from foretoken import _moved

if TYPE_CHECKING:
    from foretoken.core.io.fetching import fetch as fetch
    from foretoken.engine.background import AsyncLlm as AsyncLlm
    from foretoken.hub import CustomGenerate as CustomGenerate
    from foretoken.hub import custom_generate as custom_generate
    from foretoken.llm import Llm as Llm
    from foretoken.llm import Output as Output
    from foretoken.llm import Piece as Piece
    from foretoken.llm import load as load
    from foretoken.registry import methods as methods

__version__ = "0.2.0"

# On Linux with transparent huge pages on request, this makes PyTorch request them for large tensors: products of a few
# rows, which mostly read weights, take .84 to .89 of their time with pages of 4 KB (docs/log.md). PyTorch reads the
# variable at its first large tensor; a user's setting is kept.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_moved.install()

_HOMES = {
    name: f"foretoken.{module}"
    for module, names in {
        "registry": ("methods",),
        "llm": ("load", "Llm", "Output", "Piece"),
        "core.io.fetching": ("fetch",),
        "hub": ("custom_generate", "CustomGenerate"),
        "engine.background": ("AsyncLlm",),
        "engine.loop": ("Engine",),
        "engine.request": ("Request",),
        "engine.stats": ("SpecStats",),
        "core.sampling": ("SamplingParams",),
        "core": ("TokenTree", "Kind", "Budget", "Context", "Scores", "Verdict", "Rng"),
        "methods.drafters.base": ("Drafter", "Traits"),
        "methods.verifiers.base": ("Verifier",),
        "methods.controllers.base": ("Controller",),
        "models.base": ("LanguageModel", "CapabilityError"),
        "models.other.table": ("TableModel",),
    }.items()
    for name in names
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
