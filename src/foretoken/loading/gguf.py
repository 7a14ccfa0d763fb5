"""GGUF files: recognising them, choosing what runs them, and checking their options.

Files of covered architectures become Transformers models with the file's own numbers (:mod:`foretoken.models.gguf`).
llama.cpp runs the others, and any file on request.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.core import with_article
from foretoken.core.io.checkpoints import LoadError, cause_of, resolve
from foretoken.core.io.checkpoints import is_gguf as is_gguf

BACKENDS = ("auto", "native", "llama.cpp")
"""Backends for a GGUF file.  ``auto`` is our own reader if it covers the file, else llama.cpp."""
REASONS = {
    "dtype": "its weights run as they are stored; choose a file with other weights",
    "device": "it runs where llama.cpp was built for",
    "exact": "its kernels round as they do (docs/gguf.md says how much)",
    "inflate": "inflate the model that it was converted from, and convert that (docs/gguf.md)",
    "quantize": "llama.cpp's own tools quantise such files (docs/gguf.md)",
    "pack": "llama.cpp arranges its weights itself",
}
"""Reasons why llama.cpp's models do not take an option."""
OWN_REASONS = {
    "device": "its weights are multiplied on the cpu; leave device out",
    "inflate": "inflate the model that it was converted from, and convert that (docs/gguf.md)",
    "quantize": "its weights keep their bits; use a file with fewer",
}
"""The same for our own reader."""
SAMPLING = "general.sampling."
"""Beginning of the header keys of sampling defaults."""
USUAL = (None, "", "auto", False)
"""Values that leave an option unset."""


def check_backend(backend: str, source: Any) -> None:
    """Raise ``ValueError`` for an unknown backend, or a backend for a source that is no GGUF file."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend != "auto" and not is_gguf(source):
        description = source if isinstance(source, str | Path) else with_article(type(source).__name__)
        raise ValueError(f"backend={backend} is for GGUF files, and {description} is not one: leave backend out")


def load_gguf(path: str | Path, backend: str = "auto", **options: Any) -> Any:
    """The model of a GGUF file: a ``PreTrainedModel`` from our own reader, or a :class:`LanguageModel` of llama.cpp.
    Raises ``LoadError`` if the file cannot be run, or not with these options.

    Args:
        options: options of the caller: ``dtype``, ``device``, ``exact``, ``inflate``, ``pack``, ``quantize``.
    """
    from foretoken.models.gguf.file import GgufError, UncoveredError
    from foretoken.models.refusals import refusal

    path = resolve(path)
    try:
        if backend != "llama.cpp":
            return _read_network(path, options)
    except UncoveredError as error:
        if backend == "native" or not has_llama_cpp():
            raise LoadError(f"{error}: {remedy(backend)}") from None
        refusal("GGUF reader", str(error), "llama.cpp runs it, without heads and the bitwise promise")
    except GgufError as error:
        raise LoadError(str(error)) from None
    from foretoken.models.other.llama_cpp_model import LlamaCppModel

    _check_options(options, REASONS, (*USUAL, "distribution", "approximate"))
    try:
        return LlamaCppModel(path)
    except GgufError as error:
        raise LoadError(str(error)) from None


def sampling_of(path: str | Path) -> dict[str, Any]:
    """The sampling defaults in a file's header, by llama.cpp's names; empty also for a file that cannot be read, which
    loading reports."""
    from foretoken.models.gguf.file import GgufError, read_gguf

    try:
        metadata = read_gguf(resolve(path), header_only=True).metadata
    except GgufError:
        return {}
    return {key.removeprefix(SAMPLING): value for key, value in metadata.items() if key.startswith(SAMPLING)}


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def remedy(backend: str) -> str:
    """Advice for a file that our reader does not cover."""
    if has_llama_cpp():
        return "load it with backend=llama.cpp"
    alternative = "llama.cpp may run it" if backend == "auto" else "backend=llama.cpp may run it"
    return (
        f"{alternative} (pip install 'foretoken[gguf]', which compiles it), or give a Transformers folder of the model"
    )


def _check_options(options: Mapping[str, Any], reasons: Mapping[str, str], usual: Sequence[Any]) -> None:
    for name, reason in reasons.items():
        value = str(options.get(name)).removeprefix("torch.")
        if value not in (*map(str, usual), *(["cpu"] if name == "device" else [])):
            raise LoadError(f"a GGUF file takes no {name}={value}: {reason}")


def _read_network(path: str | Path, options: Mapping[str, Any]) -> Any:
    from foretoken.models.gguf.experts import GIB, quantised_expert_bytes
    from foretoken.models.gguf.file import read_gguf
    from foretoken.models.gguf.network import build_network
    from foretoken.models.machine import free_bytes
    from foretoken.models.network.alone import BUILDING
    from foretoken.models.refusals import refusal

    _check_options(options, OWN_REASONS, USUAL)
    dtype = options.get("dtype")
    if dtype == torch.float64:
        raise LoadError("a GGUF file takes no dtype=float64: its numbers are float32 at most; use dtype=float32")
    with BUILDING:
        file = read_gguf(path)
        network = build_network(file, dtype, free_bytes())
        if dtype is None and network.dtype == torch.float16 and not _is_finite_on_text(network):
            why = f"the logits of {path} are not finite in it on a short text"
            refusal("float16", why, "activations are bfloat16, and every product widens the weights, which is slower")
            network = build_network(file, torch.bfloat16, free_bytes())
    stored, widened = quantised_expert_bytes(file, network.dtype)
    if stored:
        name = str(network.dtype).removeprefix("torch.")
        costs = f"those of {path} are in {name}: {widened / GIB:.1f} GiB instead of {stored / GIB:.1f}"
        refusal("quantised experts", "no kernel multiplies by them", costs)
    return network


@torch.inference_mode()
def _is_finite_on_text(network: Any) -> bool:
    """Whether a network's logits are finite on a short text, which begins as its prompts do: activations of first
    tokens are the largest."""
    from foretoken.models.checks.judging import ordinary_ids

    config = network.config
    first = [config.bos_token_id] if isinstance(config.bos_token_id, int) else []
    ids = torch.tensor([[*first, *ordinary_ids(config.vocab_size, 16)]]) % config.vocab_size
    try:
        return bool(network(input_ids=ids, use_cache=False).logits.isfinite().all())
    except RuntimeError:  # experts in a dtype that their kernel lacks: using the model raises it again
        return True


def load_gguf_tokenizer(path: str | Path, backend: str = "auto") -> Any | None:
    """The tokenizer inside a GGUF file; ``None`` if it holds no vocabulary.  Raises ``LoadError`` if it cannot be
    read."""
    from foretoken.models.gguf.file import GgufError, UncoveredError, read_gguf
    from foretoken.models.gguf.tokenizer import build_tokenizer
    from foretoken.models.refusals import refusal

    path = resolve(path)
    try:
        if backend != "llama.cpp":
            return build_tokenizer(read_gguf(path, header_only=True))
    except UncoveredError as error:
        if backend == "native" or not has_llama_cpp():
            raise LoadError(f"{error}: pass tokenizer=FOLDER, or {remedy(backend)}") from None
        refusal("GGUF tokenizer", str(error), "llama.cpp's own is used instead")
    except GgufError as error:
        raise LoadError(str(error)) from None
    except Exception as error:  # a damaged vocabulary fails in many ways, some with custom exceptions
        raise LoadError(
            f"{path} holds a vocabulary that cannot be read ({cause_of(error)}): convert the model again, or pass "
            "tokenizer=FOLDER"
        ) from error
    from foretoken.models.other.llama_cpp import Weights
    from foretoken.models.other.llama_cpp_tokenizer import LlamaCppTokenizer, has_vocabulary

    try:
        weights = Weights(path, vocab_only=True)
    except GgufError as error:
        raise LoadError(str(error)) from None
    return LlamaCppTokenizer(weights) if has_vocabulary(weights) else None
