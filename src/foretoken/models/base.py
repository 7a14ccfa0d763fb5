"""The ``LanguageModel`` protocol: a causal LM over *committed tokens + a scratch tree*.

Target and draft models share it.  ``forward`` appends nodes to a sequence's scratch tree, ``commit`` keeps one path of
it and drops the rest.  No other package touches a Transformers forward or cache.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.models.refusals import Capabilities as Capabilities
from foretoken.models.refusals import CapabilityError as CapabilityError
from foretoken.models.refusals import Refusal as Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.models.forward.native_chain import Pick
    from foretoken.models.network.layers import LayerPlan


@dataclass
class SequenceState:
    """Committed prefix and scratch tree of one sequence.

    Attributes:
        row: cache row of the sequence (internal to the model).
        cache: the cache that holds the row, for a model that has several.
        tokens: committed token ids, exactly those whose KV is in the cache.
        regime: text length under which its tokens were read, for models that read long texts differently; 0 for short
            ones.  Only sequences of one regime can share keys and values.
        provisional: whether only a part of the network scored the scratch nodes, which then serve drafting alone.
        exit_states: hidden state [D] of each scratch node at layer ``exit_layer``, where a full forward resumes.
        exit_layer: number of leading layers that are final for the scratch nodes.
        scratch_tokens: token ids of the scratch nodes.
        scratch_parents: parents of the scratch nodes; ``-1`` is the last committed token.
        scratch_depths: distance from the last committed token, minus one.
    """

    row: int
    tokens: list[int] = field(default_factory=list)
    scratch_tokens: list[int] = field(default_factory=list)
    scratch_parents: list[int] = field(default_factory=list)
    scratch_depths: list[int] = field(default_factory=list)
    provisional: bool = False
    exit_states: list[Tensor] = field(default_factory=list)
    exit_layer: int = 0
    cache: Any = field(default=None, repr=False, compare=False)
    regime: int = 0

    @property
    def num_slots(self) -> int:
        """Number of occupied slots in its row: committed tokens, then the scratch."""
        return len(self.tokens) + len(self.scratch_tokens)

    def append(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Add nodes to the scratch tree (parents index the whole scratch)."""
        for token, parent in zip(tokens, parents, strict=True):
            self.scratch_tokens.append(token)
            self.scratch_parents.append(parent)
            self.scratch_depths.append(0 if parent < 0 else self.scratch_depths[parent] + 1)

    def drop_last(self, count: int) -> None:
        """Remove the last ``count`` scratch nodes."""
        length = len(self.scratch_tokens) - count
        for per_node in (self.scratch_tokens, self.scratch_parents, self.scratch_depths, self.exit_states):
            del per_node[length:]

    def clear_scratch(self) -> None:
        """Remove all scratch nodes."""
        self.drop_last(len(self.scratch_tokens))
        self.provisional, self.exit_layer = False, 0

    def matching_path(self, tokens: Sequence[int]) -> list[int]:
        """The longest scratch path that spells a prefix of ``tokens`` (siblings may hold the same token)."""
        nodes = range(len(self.scratch_tokens))
        ends = [-1]
        for token in tokens:
            longer = [n for n in nodes if self.scratch_parents[n] in ends and self.scratch_tokens[n] == token]
            if not longer:
                break
            ends = longer
        path: list[int] = []
        node = ends[0]
        while node >= 0:
            path.append(node)
            node = self.scratch_parents[node]
        return path[::-1]


@dataclass(frozen=True)
class Feed:
    """Nodes to append to one sequence's scratch.

    Attributes:
        sequence: the sequence that receives them.
        tokens: n token ids.
        parents: n parents in scratch numbering (``-1``: the last committed token); ``None`` means a chain below the
            last scratch node, or below the last committed token if the scratch is empty.
        wanted: number of *last* rows that need logits; ``None`` means all.
        after: number of committed tokens that the nodes follow, instead of all of them (to score a text again).
        states: hidden states [n, D], for a model that reads one with every token.
    """

    sequence: SequenceState
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    wanted: int | None = None
    after: int | None = None
    states: Tensor | None = None

    @property
    def num_wanted(self) -> int:
        return len(self.tokens) if self.wanted is None else self.wanted

    @property
    def is_chain(self) -> bool:
        """Whether its nodes extend the end of the scratch as a chain."""
        old = len(self.sequence.scratch_tokens)
        chain = range(old - 1, old - 1 + len(self.tokens))
        return self.after is None and (self.parents is None or list(self.parents) == list(chain))

    def parents_behind(self, old: int) -> Sequence[int]:
        """Parents of its nodes in a scratch that already has ``old`` nodes."""
        return range(old - 1, old - 1 + len(self.tokens)) if self.parents is None else self.parents


@contextmanager
def opened(model: LanguageModel, *texts: Sequence[int]) -> Iterator[list[SequenceState]]:
    """Open sequences and prefill them with these texts; release them after the block, last one first."""
    sequences: list[SequenceState] = []
    try:
        for tokens in texts:
            sequences.append(model.open())
            model.prefill(sequences[-1], tokens)
        yield sequences
    finally:
        for sequence in reversed(sequences):
            model.release(sequence)


@dataclass(frozen=True)
class Rows:
    """Result of a forward for one feed.

    Attributes:
        logits: [wanted, V] logits.
        taps: hidden states [n, D] of all fed rows, by name; some are computed on access.
    """

    logits: Tensor
    taps: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Keys and values of a token sequence, copied out of a model's cache.

    Attributes:
        tokens: n token ids.
        layers: keys and values [H, n, D*] per layer, ``None`` for a layer without any.
        divisible: whether a prefix of it can be restored (recurrent states cover the whole text only).
        regime: regime of the sequence that it was copied from.
    """

    tokens: Sequence[int]
    layers: Sequence[tuple[Tensor, Tensor] | None]
    divisible: bool = True
    regime: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for pair in self.layers if pair for part in pair)


class LanguageModel(ABC):
    """Protocol of a causal language model.

    Attributes:
        vocab_size: V, the width of the logits.
        context_length: maximum number of tokens in a sequence.
        context_why: reason for that limit; empty if it comes from the model's configuration alone.
        eos_token_ids: tokens that end a sequence.
        answer_start: tokens that follow every prompt before the first drawn one (a decoder's start tokens).
        capabilities: what the model offers.
        run_s: seconds spent in the network so far, without masks and bookkeeping; on a GPU until its work is done.
        run_rows: rows of hidden states computed in this time, padding included.
        threads: number of compute threads.
        forward_name: the forward in use: ``"public"`` for Transformers' own, ``"lean"`` or ``"native"``.
        stored_as: storage format of the weights, if it differs from the dtype of the activations.
        exactness: ``"bitwise"`` if the bits of a token's logits do not depend on the other rows, so that drafts and
            batches do not change the output; ``"rounding"`` if near-ties may differ.
        exactness_why: the reason for ``exactness``.
        refused: faster paths that were tried at load and rejected.
        reads: whether its sequences must be fed; if not, :meth:`open_beside` takes the tokens over from the target.
        path: the file that it runs from, if that file holds everything about it (llama.cpp's models); else ``None``.
        weights_version: incremented whenever :meth:`follow` detects a changed network; earlier results are then stale.
        copied_bytes: size of the packed weights that a fast forward keeps beside those of the model.
        prefill_chunk: maximum number of prompt tokens per call.
        model, device, dtype: its network, and where and in which dtype the weights are; ``None`` without a network.
        graphs, graphs_off: its captured CUDA graphs, and the reason why it has none.
    """

    path: Path | None = None
    weights_version: int = 0
    copied_bytes: int = 0
    reads: bool = True
    forward_name: str = "public"
    stored_as: str = ""
    exactness: str = "rounding"
    exactness_why: str = "this kind of model was not tested"
    refused: tuple[Refusal, ...] = ()
    context_why: str = ""
    answer_start: tuple[int, ...] = ()
    run_s: float = 0.0
    run_rows: int = 0
    threads: int = 1
    prefill_chunk: int = sys.maxsize
    model: Any = None
    device: Any = None
    dtype: Any = None
    graphs: Any = None
    graphs_off: str = ""
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    capabilities: Capabilities

    @property
    def num_ids(self) -> int:
        """Number of valid ids: the vocabulary plus the rows added after it."""
        return self.vocab_size

    @property
    def uses_graphs(self) -> bool:
        """Whether its forwards run as CUDA graphs."""
        return self.graphs is not None and not self.graphs.stopped

    @property
    def trouble(self) -> str | None:
        """Reason why it can no longer run anything; ``None`` while it can."""
        return None

    def describe(self) -> dict[str, Any]:
        """Describe how it runs, under the keys of :meth:`foretoken.Llm.describe`."""
        off = self.graphs_off or f"{type(self).__name__} does not support fixed shapes"
        return {
            "forward": self.forward_name,
            "weights": " ".join(filter(None, (self.stored_as, str(self.dtype or "").removeprefix("torch.")))),
            "exactness": self.exactness,
            "exactness_why": self.exactness_why,
            "threads": self.threads,
            "refused": [asdict(refusal) for refusal in self.refused],
            "graphs_off": "" if self.uses_graphs else off,
        }

    def follow(self) -> None:  # noqa: B027
        """Check whether the network was changed from outside (weights, layers, hooks) and run it in its present state.
        :meth:`open` calls this; the caches of open sequences then come from the old network."""

    def chains(self, feeds: Sequence[Feed], counts: Sequence[int], pick: Pick | None = None) -> list[list[int]] | None:
        """Generate ``counts`` tokens after the last node of each feed, greedily by default; all but the last become
        scratch nodes.  Returns ``None``, with nothing done, if that is no faster than one :meth:`forward` per token."""
        return None

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of open sequences; 0 if unknown."""
        return 0

    @property
    def kv_peak_bytes(self) -> int:
        """Peak of :attr:`kv_bytes`."""
        return 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token; 0 if unknown."""
        return 0

    def snapshot(self, sequence: SequenceState, length: int) -> Snapshot | None:
        """Copy the cache of the first ``length`` committed tokens; ``None`` if that is impossible."""
        return None

    def restore(self, sequence: SequenceState, snapshot: Snapshot, length: int) -> None:
        """Commit the first ``length`` tokens of a snapshot to an empty sequence without reading them.

        Raises:
            CapabilityError: the model has no snapshots.
        """
        raise CapabilityError(f"{type(self).__name__} cannot reuse another sequence's KV cache")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights; 0 for a model without any."""
        return 0

    def unpack(self) -> None:  # noqa: B027
        """Restore the plain form of the model's packed linear layers (``pack=True``), with the same weights."""

    @abstractmethod
    def open(self) -> SequenceState:
        """Open a new, empty sequence."""

    def open_beside(self, source: SequenceState | None) -> SequenceState:
        """Open a new, empty sequence that drafts for the target's ``source``; most models ignore ``source``."""
        return self.open()

    def expect(self, sequence: SequenceState, length: int) -> None:  # noqa: B027
        """Announce that the sequence will have ``length`` tokens before the next draw, so that a model that reads long
        texts differently from the first token on can read it again."""

    def room(self, sequence: SequenceState) -> int:
        """Maximum number of tokens in a scratch path; a longer one would be read differently than token by token."""
        return self.context_length - len(sequence.tokens)

    @abstractmethod
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append nodes to scratch trees and score them, all feeds in one call.

        ``taps`` names the hidden states to return: ``"layer:i"`` is the output of the i-th layer (0 is the embedding),
        ``"last"`` the output of the final norm.
        """

    def forward_part(self, feeds: Sequence[Feed], plan: LayerPlan, taps: Sequence[str] = ()) -> list[Rows]:
        """Append *provisional* nodes, scored by a part of the network: for drafting only, never committed.

        A later :meth:`forward` of the sequence scores its tree again from the first node.

        Raises:
            CapabilityError: the model has no selectable layers.
        """
        reason = self.capabilities.missing.get("layer_windows", f"{type(self).__name__} has no layers")
        raise CapabilityError(f"this model cannot run a part of its layers: {reason}")

    def extra_embeddings(self, rows: Tensor, user: object = None) -> int:
        """Add ids after the vocabulary, embedded as ``rows`` [k, D], to feed as probes; return the first of the k ids.

        The tensor is referenced, not copied.  The same memory keeps its ids until its last ``user`` (if any) is gone.

        Raises:
            CapabilityError: the model has no token embedding to extend.
            ValueError: the rows have another width.
        """
        raise CapabilityError(f"{type(self).__name__} has no token embedding that rows could be added to")

    @abstractmethod
    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Keep the scratch nodes of ``path`` (from the last committed token down) and drop all others."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop all scratch nodes and their keys and values, which may not be finite."""
        self.commit(sequence, ())

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` committed tokens; drop later ones and all scratch nodes.

        Raises:
            CapabilityError: the model cannot undo what it has read.
        """
        raise CapabilityError(f"{type(self).__name__} cannot roll back committed tokens")

    @abstractmethod
    def release(self, sequence: SequenceState) -> None:
        """Free a sequence."""

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> Mapping[str, Tensor]:
        """Commit ``tokens`` without computing logits; return the taps of all of them."""
        pieces: list[Mapping[str, Tensor]] = []
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            pieces.append(self.forward([Feed(sequence, chunk, wanted=0)], taps)[0].taps)
            self.commit(sequence, range(len(chunk)))
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Join the taps of a prompt's chunks; empty for a model without taps."""
        return pieces[0] if len(pieces) == 1 else {}

    def prefill_batch(
        self, prompts: Sequence[tuple[SequenceState, Sequence[int]]], taps: Sequence[str] = ()
    ) -> list[Mapping[str, Tensor]]:
        """:meth:`prefill` for several sequences; override it if one call is cheaper than several."""
        return [self.prefill(sequence, tokens, taps) for sequence, tokens in prompts]

    def catch_up(self, sequence: SequenceState, tokens: Sequence[int]) -> Sequence[int]:
        """Commit the longest prefix of ``tokens`` that the scratch allows, and return the tokens after it."""
        have = len(sequence.tokens)
        # The last token is always fed again, because the next draft starts from its logits.
        path = sequence.matching_path(tokens[have:-1])
        if sequence.scratch_tokens:
            self.commit(sequence, path)
        self.expect(sequence, len(tokens))
        return tokens[len(sequence.tokens) :]
