"""GGUF files: how they are told from other checkpoints, and which options they take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.loading.checkpoints import LoadError
from foretoken.loading.checkpoints import is_gguf as is_gguf

if TYPE_CHECKING:
    from foretoken.models.llama_cpp_model import LlamaCppModel
    from foretoken.models.llama_cpp_tokenizer import LlamaCppTokenizer

REASONS = {
    "dtype": "its weights are stored as they run; choose a file with other weights",
    "device": "it runs where llama.cpp was built for",
    "exact": "its kernels round as they do (docs/gguf.md says how much)",
    "inflate": "inflate the model that it was made of, and convert that (docs/gguf.md)",
    "quantize": "llama.cpp's own tools quantise such files (docs/gguf.md)",
    "pack": "llama.cpp arranges its weights itself",
}
"""Why a GGUF file does not take an option."""
USUAL = (None, "", "auto", False)
"""Values of an option that ask for nothing."""


def load_gguf(path: str | Path, **options: Any) -> LlamaCppModel:
    """The model of a GGUF file.

    Args:
        path: the file.
        options: what the caller was asked for; a GGUF file takes none of them but ``device="cpu"``.

    Raises:
        LoadError: an option that a GGUF file does not take, a missing, damaged or unknown file, or llama-cpp-python is
            not installed.
    """
    from foretoken.models.llama_cpp_model import LlamaCppModel
    from foretoken.models.llama_cpp import GgufError

    for name, value in options.items():
        usual = (*USUAL, "cpu") if name == "device" else (*USUAL, "distribution", "approximate")
        if str(value) not in map(str, usual):
            raise LoadError(f"a GGUF file takes no {name}={value}: {REASONS[name]}")
    try:
        return LlamaCppModel(path)
    except GgufError as error:
        raise LoadError(str(error)) from None


def load_gguf_tokenizer(path: str | Path) -> LlamaCppTokenizer | None:
    """The tokenizer inside a GGUF file; ``None`` where it holds no vocabulary.

    Raises:
        LoadError: as :func:`load_gguf`.
    """
    from foretoken.models.llama_cpp_tokenizer import LlamaCppTokenizer, has_vocabulary
    from foretoken.models.llama_cpp import GgufError, Weights

    try:
        weights = Weights(path, vocab_only=True)
    except GgufError as error:
        raise LoadError(str(error)) from None
    return LlamaCppTokenizer(weights) if has_vocabulary(weights) else None
