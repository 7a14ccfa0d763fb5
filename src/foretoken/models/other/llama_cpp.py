"""llama.cpp's C interface through llama-cpp-python's low-level module: opening GGUF files, with reasons for failures.

llama.cpp reports errors to a log; they become the line of an exception, and the rest is dropped.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.core.io.checkpoints import gguf_fault
from foretoken.core.io.hub_ids import expanded
from foretoken.models.gguf.file import GgufError as GgufError

log = logging.getLogger(__name__)


class MissingLlamaCppError(GgufError):
    """llama-cpp-python is not installed."""


class LlamaLibrary:
    """The loaded library and its logged errors.

    Attributes:
        c: module ``llama_cpp.llama_cpp``.
        errors: the last log lines of level ``error``.
    """

    def __init__(self, module: Any) -> None:
        self.c = module
        self.errors: deque[str] = deque(maxlen=8)
        self._callback = module.llama_log_callback(self._log)  # the library keeps no reference
        module.llama_log_set(self._callback, ctypes.c_void_p(0))
        module.llama_backend_init()
        if b"AMX_INT8 = 1" in module.llama_print_system_info():
            log.warning(
                "this llama.cpp was compiled with AMX, where it can end the process with an illegal instruction "
                "(llama.cpp, pull request 26954): compile it again with `make gguf`, which leaves AMX out"
            )

    def _log(self, level: int, text: bytes, _: Any) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            self.errors.append(text.decode(errors="replace").strip())

    def reason(self) -> str:
        """The last informative error, without names of C functions."""
        messages = [
            line.rpartition("error loading model: ")[2] for line in self.errors if "failed to load model" not in line
        ]
        last = (messages or list(self.errors) or ["no reason given"])[-1]
        head, colon, rest = last.partition(": ")
        return rest if colon and head.isidentifier() else last


@cache
def library() -> LlamaLibrary:
    """The library, loaded on first use."""
    try:
        from llama_cpp import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp"
        raise MissingLlamaCppError(
            f"running a GGUF file with llama.cpp needs llama-cpp-python{'' if absent else f' ({error})'}: "
            "pip install 'foretoken[gguf]' (or `make gguf`), which takes minutes to compile"
        ) from None
    return LlamaLibrary(llama_cpp)


class Weights:
    """An opened GGUF file (the first, if split); without its weights if ``vocab_only``.

    Attributes:
        handle: ``llama_model *``.
        vocab: ``llama_vocab *``.

    Raises:
        GgufError: the file is missing, not GGUF, truncated or damaged, its architecture is unknown to llama.cpp, or
            llama-cpp-python is missing.
    """

    def __init__(self, path: str | Path, *, vocab_only: bool = False) -> None:
        self.path = expanded(path)
        fault = gguf_fault(self.path)
        if fault is not None:
            raise GgufError(fault)
        self.library = library()
        c = self.library.c
        options = c.llama_model_default_params()
        options.vocab_only = vocab_only
        self.library.errors.clear()
        self.handle = c.llama_model_load_from_file(str(self.path).encode(), options)
        if not self.handle:
            raise GgufError(_refusal(self.path, self.library))
        weakref.finalize(self, c.llama_model_free, self.handle)
        self.vocab = c.llama_model_get_vocab(self.handle)

    def metadata(self, key: str) -> str | None:
        """A header value as text; ``None`` if it is missing."""
        c, size = self.library.c, 1 << 12
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = c.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < size:
                return None if length < 0 else buffer.value.decode(errors="replace")
            size = length + 1

    @property
    def architecture(self) -> str:
        return self.metadata("general.architecture") or "unknown"


def _refusal(path: Path, llama: LlamaLibrary) -> str:
    messages = " ".join(llama.errors)
    if any(
        words in messages for words in ("not within the file bounds", "failed to read", "exceeds remaining file size")
    ):
        return f"{path} is cut off or damaged ({llama.reason()}): copy it again"
    if "unknown model architecture" in messages or "unsupported model architecture" in messages:
        return (
            f"{path} has an architecture that this llama.cpp does not know ({llama.reason()}): update llama-cpp-python"
        )
    return f"llama.cpp cannot load {path}: {llama.reason()}"
