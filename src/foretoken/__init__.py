"""foretoken: every speculative decoding method for Hugging Face causal language models, exact and measured.

Nothing heavy is imported until it is used.
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

# Where Linux gives pages of 2 MB to whoever asks, PyTorch then asks for its large tensors: products of a few rows,
# which mostly read weights, take .84 to .89 of their time with pages of 4 KB (docs/log.md).  PyTorch reads this when it
# makes its first large tensor; a user's own setting stays.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_moved.install()

_HOMES = {
    "methods": "foretoken.registry",
    "load": "foretoken.llm",
    "fetch": "foretoken.core.io.fetching",
    "Llm": "foretoken.llm",
    "Output": "foretoken.llm",
    "Piece": "foretoken.llm",
    "custom_generate": "foretoken.hub",
    "CustomGenerate": "foretoken.hub",
    "AsyncLlm": "foretoken.engine.background",
    "Engine": "foretoken.engine.loop",
    "Request": "foretoken.engine.request",
    "SpecStats": "foretoken.engine.stats",
    "SamplingParams": "foretoken.core.sampling",
    "TokenTree": "foretoken.core",
    "Kind": "foretoken.core",
    "Budget": "foretoken.core",
    "Context": "foretoken.core",
    "Scores": "foretoken.core",
    "Verdict": "foretoken.core",
    "Rng": "foretoken.core",
    "Drafter": "foretoken.methods.drafters.base",
    "Traits": "foretoken.methods.drafters.base",
    "Verifier": "foretoken.methods.verifiers.base",
    "Controller": "foretoken.methods.controllers.base",
    "LanguageModel": "foretoken.models.base",
    "CapabilityError": "foretoken.models.base",
    "TableModel": "foretoken.models.other.table",
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
