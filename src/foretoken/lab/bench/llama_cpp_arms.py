"""llama.cpp on the target's weights: plain, with its prompt lookup, and with a draft model.

The Python binding accepts any drafter of chains and includes prompt lookup.  The draft model here is a second llama.cpp
model that decodes greedily.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.lab.bench.arms import ArmSetup, ForeignArm, Generation
from foretoken.lab.bench.gguf_export import write_gguf
from foretoken.lab.timing import Stopwatch
from foretoken.loading import resolve
from foretoken.loading.gguf import is_gguf
from foretoken.models.other.llama_cpp_model import LlamaCppModel


def llama_package() -> Any:
    """The ``llama_cpp`` package.  Raises ``ValueError`` if it is not installed."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp" else f" ({error})"
        raise ValueError(f"the arm llama.cpp needs llama-cpp-python{reason}: pip install llama-cpp-python") from None
    return llama_cpp


def gguf_file(shared: ArmSetup) -> Path | None:
    """Path of the target's GGUF file, if it has one."""
    if isinstance(shared.target, LlamaCppModel):
        return shared.target.path
    source = shared.source
    return Path(source) if isinstance(source, str | Path) and is_gguf(source) else None


class LlamaCppArm(ForeignArm):
    """Plain decoding on ``threads`` CPU threads (default: PyTorch's number).

    A GGUF file is opened directly.  Weights of a Transformers model are written to a temporary GGUF file, which is
    removed after loading.  Raises ``ValueError`` if the package is missing or the architecture cannot be written.
    """

    def __init__(self, name: str, shared: ArmSetup, threads: int = 0) -> None:
        super().__init__(name, shared)
        llama_package()
        self.threads = threads
        self.eos = shared.target.eos_token_ids
        network = shared.target.model
        drafter = self.drafter(shared)
        file = gguf_file(shared)
        if file is not None:
            count = threads or shared.target.threads or torch.get_num_threads()
            # Bound the context: llama.cpp allocates its memory at once
            self.engine = open_file(file, min(shared.target.context_length, 8192), count, drafter)
        elif hasattr(network, "generate"):
            self.engine = open_llama(network, threads, drafter)
        else:
            raise ValueError(f"this arm needs a GGUF file or a Transformers target, not {type(shared.target).__name__}")
        self.calls, evaluate = 0, self.engine.eval

        def counted(tokens: Sequence[int]) -> None:
            self.calls += 1
            evaluate(tokens)

        self.engine.eval = counted

    def drafter(self, shared: ArmSetup) -> Any | None:
        """llama.cpp's draft model, if any."""
        return None

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Generation:
        """Decode one request from an empty cache; the prefill ends with the first token."""
        self.engine.reset()
        self.engine.set_seed(seed)
        tokens: list[int] = []
        times: list[float] = []
        self.calls = 0
        watch = Stopwatch()
        options = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        for token in self.engine.generate(list(prompt_ids), **options):
            tokens.append(int(token))
            times.append(watch.seconds)
            if len(tokens) >= max_new_tokens or (not self.shared.ignore_eos and token in self.eos):
                break
        rounds = self.calls - 1  # every round is one target call, and so is the prefill
        decoded = len(tokens) - 1
        length = decoded / rounds if rounds > 0 else None
        return Generation(tokens, times[-1] - times[0], decoded, times[0], length)


class LlamaCppPromptLookupArm(LlamaCppArm):
    """The binding's prompt lookup: ``k`` draft tokens per round after a match of at most ``n``."""

    def __init__(self, name: str, shared: ArmSetup, k: int = 10, n: int = 2, threads: int = 0) -> None:
        self.k, self.n = k, n
        super().__init__(name, shared, threads)

    def drafter(self, shared: ArmSetup) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(max_ngram_size=self.n, num_pred_tokens=self.k)


class DraftArm(LlamaCppArm):
    """A draft model in llama.cpp with greedy chains of ``k`` tokens: a GGUF file, folder or hub id; by default the
    built-in one, for the built-in target."""

    def __init__(
        self, name: str, shared: ArmSetup, draft: str = "", k: int = 4, dtype: str = "bfloat16", threads: int = 0
    ) -> None:
        self.draft, self.k, self.dtype = draft, k, dtype
        super().__init__(name, shared, threads)

    def drafter(self, shared: ArmSetup) -> Any:
        """A callable from the current token ids to draft tokens."""
        import numpy as np

        from foretoken.lab.bench.transformers_arms import load_draft

        if self.draft and is_gguf(self.draft):
            count = self.threads or torch.get_num_threads()
            model = open_file(resolve(self.draft), shared.target.context_length, count)
        else:
            model = open_llama(load_draft(self.draft, shared, self.dtype), self.threads)

        def propose(input_ids: Any, /, **_: Any) -> Any:
            drafted = []
            for token in model.generate(input_ids.tolist(), temp=0.0, repeat_penalty=1.0):
                drafted.append(token)
                if len(drafted) == self.k:
                    break
            return np.array(drafted, dtype=np.intc)

        return propose


def open_llama(network: Any, threads: int = 0, drafter: Any | None = None) -> Any:
    """Load the network into llama.cpp through a temporary file, removed once it is mapped."""
    config = network.config.get_text_config()
    count = threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="foretoken-gguf-") as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(network, file)
        return open_file(file, config.max_position_embeddings, count, drafter)


def open_file(file: str | Path, context: int, threads: int, drafter: Any | None = None) -> Any:
    """Open a GGUF file with llama.cpp's Python binding."""
    return llama_package().Llama(
        str(file),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=drafter,
        logits_all=drafter is not None,
        verbose=False,
    )


ARMS: dict[str, type[LlamaCppArm]] = {"plain": LlamaCppArm, "prompt_lookup": LlamaCppPromptLookupArm, "draft": DraftArm}
