"""A llama.cpp context with one cache for all sequences: decoding, and moving of sequence ids."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.other.llama_cpp import GgufError, Weights

PIECE = 512
"""Maximum tokens per decode."""
SCORED = 256
"""Maximum tokens per decode that need logits; llama.cpp reserves this many rows."""
CACHE_TYPES = {"f16": 1, "f32": 0, "q8_0": 8}
"""``ggml_type`` by name."""
MOST_IDS = 256
"""``LLAMA_MAX_SEQ``: maximum number of sequence ids in the library."""


class LlamaContext:
    """``llama_context``.

    Args:
        cells: capacity of the cache in tokens, over all sequences.
        num_ids: number of sequence ids, at most :data:`MOST_IDS`.
        cache_type: type of keys and values, a key of :data:`CACHE_TYPES`.

    Raises:
        GgufError: llama.cpp cannot create it (mostly for lack of memory).
    """

    def __init__(self, weights: Weights, cells: int, num_ids: int, threads: int, cache_type: str = "f16") -> None:
        self.weights, self.num_ids = weights, num_ids
        c = self._c = weights.library.c
        options = c.llama_context_default_params()
        options.n_ctx, options.n_seq_max = cells, num_ids
        options.n_batch = options.n_ubatch = PIECE
        options.n_outputs_max = SCORED
        options.type_k = options.type_v = CACHE_TYPES[cache_type]
        if cache_type == "f32":
            options.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it would round them to float16
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True  # one cache: a shared prefix is stored and read once
        options.swa_full = True  # sliding-window layers keep what a rollback needs
        options.no_perf = True
        weights.library.errors.clear()
        handle = c.llama_init_from_model(weights.handle, options)
        if not handle:
            raise GgufError(
                f"llama.cpp cannot make a cache of {cells} tokens for {weights.path} ({weights.library.reason()}): "
                "give a smaller context_length"
            )
        self._handle = handle
        self.close = weakref.finalize(self, c.llama_free, handle)
        self.cells = int(c.llama_n_ctx(handle))
        self._memory = c.llama_get_memory(handle)
        self.vocab_size = int(c.llama_vocab_n_tokens(weights.vocab))
        self._buffers = _Batch(c, PIECE, num_ids)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], scored: Sequence[bool]
    ) -> Tensor:
        """Run tokens in as few calls as possible.

        Args:
            tokens: n token ids, parents before children.
            ids: sequence ids of each token; it sees the cells of the first.
            scored: whether each token needs logits.

        Returns:
            [w, V] float32 logits of the w scored tokens.
        """
        size = SCORED if any(scored) else PIECE
        rows = []
        for start in range(0, len(tokens), size):
            piece = slice(start, start + size)
            rows.append(self._decode(tokens[piece], positions[piece], ids[piece], scored[piece]))
        return rows[0] if len(rows) == 1 else torch.cat([torch.empty(0, self.vocab_size), *rows])

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], scored: Sequence[bool]
    ) -> Tensor:
        code = self._c.llama_decode(self._handle, self._buffers.filled(tokens, positions, ids, scored))
        if code != 0:
            full = "its cache is full" if code == 1 else self.weights.library.reason()
            raise RuntimeError(f"llama.cpp could not run {len(tokens)} tokens (code {code}): {full}")
        count = sum(scored)
        if not count:
            return torch.empty(0, self.vocab_size)
        rows = self._c.llama_get_logits(self._handle)
        logits = np.ctypeslib.as_array(rows, shape=(count, self.vocab_size))
        return torch.from_numpy(logits.copy())  # the next call overwrites them

    def join(self, source: int, target: int, start: int, end: int) -> None:
        """Add cells of ``source`` at positions ``start`` to ``end`` (exclusive) to ``target``."""
        self._c.llama_memory_seq_cp(self._memory, source, target, start, end)

    def leave(self, sequence: int, start: int) -> None:
        """Remove an id from its cells from position ``start`` on; cells without ids are free."""
        if not self._c.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RuntimeError(f"llama.cpp cannot roll back the end of a sequence in {self.weights.path}")

    def saved(self, sequence: int) -> Any:
        """State of one id as bytes, for :meth:`restore` in another context with these weights."""
        size = self._c.llama_state_seq_get_size(self._handle, sequence)
        state = (ctypes.c_uint8 * size)()
        self._c.llama_state_seq_get_data(self._handle, state, size, sequence)
        return state

    def restore(self, state: Any, sequence: int) -> None:
        """Set the state of an id to one saved in another context.  Raises ``RuntimeError`` if llama.cpp rejects it."""
        if not self._c.llama_state_seq_set_data(self._handle, state, len(state), sequence):
            raise RuntimeError(
                f"llama.cpp could not move a sequence to a larger cache: {self.weights.library.reason()}"
            )


class _Batch:
    def __init__(self, c: Any, size: int, num_ids: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.zeros(size, np.int32)
        self._ids = np.zeros((size, num_ids), np.int32)
        self._scored = np.zeros(size, np.int8)
        starts = self._ids.ctypes.data + np.arange(size, dtype=np.uint64) * np.uint64(self._ids.strides[0])
        self._starts = starts.astype(np.uint64)
        self._batch = c.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=ctypes.cast(self._starts.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=_pointer(self._scored, ctypes.c_int8),
        )

    def filled(
        self, tokens: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], scored: Sequence[bool]
    ) -> Any:
        count = len(tokens)
        self._tokens[:count], self._positions[:count], self._scored[:count] = tokens, positions, scored
        self._counts[:count] = [len(sequence_ids) for sequence_ids in ids]
        for i, sequence_ids in enumerate(ids):
            self._ids[i, : len(sequence_ids)] = sequence_ids
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
