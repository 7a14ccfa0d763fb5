"""A GGUF file as a :class:`LanguageModel`: trees over llama.cpp's C interface.

One context holds all sequences in one cache.  A scratch tree is stored as its leaf paths (see
:mod:`foretoken.models.other.branches`), with positions by depth; a commit moves sequence ids, but no numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from foretoken.models.base import (
    Capabilities,
    CapabilityError,
    Feed,
    LanguageModel,
    Rows,
    SequenceState,
)
from foretoken.models.other.branches import Branches, Removal
from foretoken.models.other.llama_context import CACHE_TYPES, MOST_IDS, PIECE, LlamaContext
from foretoken.models.other.llama_cpp import GgufError, Weights
from foretoken.models.runner import check_distinct

DEFAULT_CONTEXT = 4096
"""Most tokens of a sequence by default, because the cache allocates its memory at once."""
NO_LAYERS = "llama.cpp runs a file's layers as a whole and returns logits only"


class LlamaCppModel(LanguageModel):
    """Runs a GGUF file.

    Logits are those of llama.cpp with default settings, so speculation keeps the distribution that this file has in
    llama.cpp.  The cache starts with room for one sequence and grows as more are opened.

    Args:
        path: the file (the first, if split).
        context_length: maximum tokens per sequence; the model's own by default, at most 4096.
        threads: CPU threads; PyTorch's number by default.
        cache_type: type of keys and values, ``"f16"`` (llama.cpp's default), ``"q8_0"``, or ``"f32"``.  The last also
            disables flash attention, which rounds to float16: slower, but with logits within 1e-5 of exact.

    Attributes:
        dtype: llama.cpp's name of the file's weight format.
        rounds_like: dtype with rounding closest to llama.cpp's kernels here (``docs/gguf.md``), used by parity for
            ties.

    Raises:
        GgufError: the file cannot be opened or is not a causal language model, or llama-cpp-python is missing.
        ValueError: the context length or number of threads is below 1, or the cache type is unknown.
    """

    forward_name = "llama.cpp"
    prefill_chunk = PIECE
    path: Path

    def __init__(
        self,
        path: str | Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        cache_type: str = "f16",
    ) -> None:
        if context_length is not None and context_length < 1:
            raise ValueError(f"context_length must be at least 1, not {context_length}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if cache_type not in CACHE_TYPES:
            raise ValueError(f"unknown cache_type {cache_type!r}: choose one of {', '.join(CACHE_TYPES)}")
        self.cache_type = cache_type
        self.weights = Weights(path)
        self.path = self.weights.path
        self.capabilities = _capabilities_of(self.weights)
        c, handle = self.weights.library.c, self.weights.handle
        trained = int(c.llama_model_n_ctx_train(handle)) or DEFAULT_CONTEXT
        self.context_length = context_length or min(trained, DEFAULT_CONTEXT)
        if context_length is None and trained > DEFAULT_CONTEXT:
            self.context_why = (
                f"llama.cpp's cache has room for {DEFAULT_CONTEXT} of the model's {trained} by default; load "
                "foretoken.models.other.llama_cpp_model.LlamaCppModel(PATH, context_length=N) for more"
            )
        vocab = self.weights.vocab
        self.vocab_size = int(c.llama_vocab_n_tokens(vocab))
        self.eos_token_ids = frozenset(token for token in range(self.vocab_size) if c.llama_vocab_is_eog(vocab, token))
        self.device = torch.device("cpu")
        self.dtype = c.llama_ftype_name(c.llama_model_ftype(handle)).decode()
        self.rounds_like = _rounding(self.dtype, cache_type)
        self.threads = threads or torch.get_num_threads()
        self._sequences: list[SequenceState] = []
        self._branches: dict[int, Branches] = {}
        self._opened = 0
        # Room for one sequence and its scratch tree.  Few ids at first: llama.cpp compares all pairs of them in every
        # call, and a recurrent layer keeps a state per id, used or not.
        self._start(self.context_length + 256, 32 if self.capabilities.tree_mask else 4)

    @property
    def weight_bytes(self) -> int:
        return int(self.weights.library.c.llama_model_size(self.weights.handle))

    @property
    def identity(self) -> str:
        """Hash over the file's size and some of its bytes."""
        size = self.path.stat().st_size
        digest = hashlib.blake2b(str(size).encode(), digest_size=8)
        with self.path.open("rb") as file:
            for part in range(32):
                file.seek(size * part // 32)
                digest.update(file.read(4096))
        return f"{self.weights.architecture}-{digest.hexdigest()}"

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> SequenceState:
        if not self._free:
            self._make_room(0, 1)
        self._opened += 1
        sequence = SequenceState(row=self._opened)
        self._sequences.append(sequence)
        self._branches[sequence.row] = Branches(self._free.pop())
        return sequence

    def release(self, sequence: SequenceState) -> None:
        self._sequences.remove(sequence)
        for branch in self._branches.pop(sequence.row).ids:
            self._context.leave(branch, 0)
            self._free.append(branch)

    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Keep one scratch path; ids of other nodes lose their cells."""
        if not self.capabilities.rollback and len(path) < len(sequence.scratch_tokens):
            raise CapabilityError(self.capabilities.missing["rollback"])
        self._remove(self._branches[sequence.row].commit(path, len(sequence.tokens)))
        sequence.tokens.extend(sequence.scratch_tokens[node] for node in path)
        sequence.clear_scratch()

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` committed tokens; a recurrent model reads them again."""
        if length >= len(sequence.tokens) and not sequence.scratch_tokens:
            return
        branches = self._branches[sequence.row]
        branches.commit((), len(sequence.tokens))
        prefix = sequence.tokens[:length]
        again = 0 if not self.capabilities.rollback else length
        for branch in branches.ids:
            self._context.leave(branch, again)
        branches.rewind(again)
        del sequence.tokens[again:]
        sequence.clear_scratch()
        self.prefill(sequence, prefix[again:])

    def _remove(self, removals: Sequence[Removal]) -> None:
        if self.capabilities.rollback:
            for branch, start in removals:
                self._context.leave(branch, start)

    # -- forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append and score nodes, with the trees of all feeds in one decode.

        After a failure, the scratch trees of the fed sequences are empty.
        """
        if taps:
            raise CapabilityError(f"this target has no hidden states: {NO_LAYERS}")
        check_distinct(feeds)
        for feed in feeds:
            self._check(feed)
        try:
            self._reserve(feeds)
            return self._score(feeds)
        except BaseException:
            for feed in feeds:
                self._drop_scratch(feed.sequence)
            raise

    def _check(self, feed: Feed) -> None:
        if feed.after is not None or feed.states is not None:
            raise CapabilityError(f"this target reads tokens at the end of its sequence only: {NO_LAYERS}")
        if (
            not self.capabilities.rollback
            and feed.wanted != 0
            and len(feed.sequence.scratch_tokens) + len(feed.tokens) > 1
        ):
            raise CapabilityError(f"only one token at a time can be scored: {self.capabilities.missing['rollback']}")

    def _drop_scratch(self, sequence: SequenceState) -> None:
        if self.capabilities.rollback:  # otherwise the engine detects the nodes and drops the request
            branches, length = self._branches[sequence.row], len(sequence.tokens)
            self._remove([(branch, length) for branch in branches.ids])
            branches.commit((), length)
            sequence.clear_scratch()

    def _score(self, feeds: Sequence[Feed]) -> list[Rows]:
        tokens: list[int] = []
        positions: list[int] = []
        ids: list[list[int]] = []
        scored: list[bool] = []
        counts = []
        for feed in feeds:
            ids += self._append(feed)
            sequence, count = feed.sequence, len(feed.tokens)
            tokens += feed.tokens
            positions += [len(sequence.tokens) + depth for depth in sequence.scratch_depths[-count:]] if count else []
            counts.append(feed.num_wanted)
            scored += [position >= count - counts[-1] for position in range(count)]
        start_s = perf_counter()
        logits = self._context.decode(tokens, positions, ids, scored)
        self.run_s += perf_counter() - start_s
        self.run_rows += len(tokens)
        return [Rows(rows) for rows in logits.split(counts)]

    def _append(self, feed: Feed) -> list[list[int]]:
        """Append a feed's nodes to the scratch; return the ids of each."""
        sequence = feed.sequence
        sequence.append(feed.tokens, feed.parents_behind(len(sequence.scratch_tokens)))
        grown = self._branches[sequence.row].grow(
            sequence.scratch_parents, sequence.scratch_depths, len(sequence.tokens), self._free.pop
        )
        for source, target, start, end in grown[1]:
            self._context.join(source, target, start, end)
        return grown[0]

    # -- room --------------------------------------------------------------------------------------------------------

    def _start(self, cells: int, num_ids: int) -> None:
        self._context = LlamaContext(self.weights, cells, num_ids, self.threads, self.cache_type)
        self._free = list(range(num_ids))[::-1]

    def _reserve(self, feeds: Sequence[Feed]) -> None:
        """Ensure that there are enough cells and ids for the nodes of all feeds."""
        used = sum(len(sequence.tokens) + len(sequence.scratch_tokens) for sequence in self._sequences)
        cells = used + sum(len(feed.tokens) for feed in feeds)
        ids = 0
        for feed in feeds:
            branches, old = self._branches[feed.sequence.row], len(feed.sequence.scratch_tokens)
            parents = [*feed.sequence.scratch_parents, *feed.parents_behind(old)]
            ids += branches.needed(parents)
        if cells > self._context.cells or ids > len(self._free):
            self._make_room(cells, ids, {feed.sequence.row for feed in feeds})

    def _make_room(self, cells: int, ids: int, busy: set[int] | frozenset[int] = frozenset()) -> None:
        """Reclaim spare ids from sequences that are not ``busy``, and move to a larger context if necessary."""
        for row, branches in self._branches.items():
            while len(self._free) < ids and branches.spare and row not in busy:
                spare, _ = branches.spare.popitem()
                self._context.leave(spare, 0)
                self._free.append(spare)
        if cells <= self._context.cells and ids <= len(self._free):
            return
        # In a larger context, every sequence starts with one id.
        needed = (
            len(self._sequences)
            + ids
            + sum(len(self._branches[row].spare) + len(self._branches[row].used) for row in busy)
        )
        if needed > MOST_IDS:
            raise CapabilityError(
                f"llama.cpp supports {MOST_IDS} paths, and the trees of this round have {needed}: draft smaller "
                "trees or serve fewer requests together"
            )
        self._move(max(self._context.cells, 2 * cells if cells > self._context.cells else 0), needed)

    def _move(self, cells: int, num_ids: int) -> None:
        """Switch to a larger context: committed tokens are copied, scratch nodes run again."""
        before, owned = self._context, self._branches
        scratch = [(seq, list(seq.scratch_tokens), list(seq.scratch_parents)) for seq in self._sequences]
        for sequence in self._sequences:
            self._drop_scratch(sequence)
        self._start(cells, min(MOST_IDS, max(before.num_ids, 2 * num_ids)))
        self._branches = {row: Branches(self._free.pop()) for row in owned}
        for sequence in self._sequences:
            if sequence.tokens:
                self._context.restore(before.saved(owned[sequence.row].main), self._branches[sequence.row].main)
        before.close()
        feeds = [Feed(sequence, tokens, parents, wanted=0) for sequence, tokens, parents in scratch if tokens]
        if feeds:
            self._score(feeds)


def _capabilities_of(weights: Weights) -> Capabilities:
    c, handle, name = weights.library.c, weights.handle, weights.architecture
    causal = weights.metadata(f"{name}.attention.causal")
    if c.llama_model_has_encoder(handle) or c.llama_model_is_diffusion(handle) or causal == "false":
        raise GgufError(
            f"{weights.path} ({name}) is not a causal language model: give one that generates from left to right"
        )
    missing = dict.fromkeys(("taps", "layer_windows"), NO_LAYERS)
    if c.llama_model_is_recurrent(handle) or c.llama_model_is_hybrid(handle):
        reason = f"{name} has recurrent layers, whose state cannot be rolled back or branched"
        missing.update(dict.fromkeys(("tree_mask", "keep_path", "rollback"), reason))
        return Capabilities(False, False, False, False, False, missing)
    return Capabilities(taps=False, layer_windows=False, missing=missing)


def _rounding(weights: str, cache_type: str) -> torch.dtype:
    """Activations are rounded to the weights' format (8 bits for quantised ones), and flash attention sums in
    float16."""
    if weights == "all F32":
        return torch.float32 if cache_type == "f32" else torch.float16
    return torch.float16 if weights == "F16" else torch.bfloat16
