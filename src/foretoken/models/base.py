"""The ``LanguageModel`` protocol: a causal LM over *committed tokens + a scratch tree*.

Target and draft model alike are used through it.  ``forward`` appends nodes to a sequence's scratch tree, ``commit``
keeps one path of it and drops the rest.  Nothing else in the library touches a Transformers forward or cache.
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
    """A committed prefix and its scratch tree, as every model keeps it.

    Attributes:
        row: the cache row that holds it (a model's own business).
        cache: which cache the row is in, for a model that has several.
        tokens: committed token ids, exactly those whose KV is in the cache.
        regime: the length of text for which its tokens were read, where the model reads long texts in another way;
            0 for short ones.  Texts of one regime can take over keys and values from each other.
        provisional: whether the scratch nodes were run by a part of the network only: they can be drafted from, but
            not be kept, and the next whole forward states the tree anew.
        exit_states: per scratch node its hidden state [D] at layer ``exit_layer``, from which a whole forward goes on.
        exit_layer: how many leading layers the scratch nodes have behind them for good.
        scratch_tokens: token ids of the scratch nodes.
        scratch_parents: their parents; ``-1`` hangs from the last committed token.
        scratch_depths: their distance from the last committed token minus one.
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
        """Slots of its row that hold something: committed tokens, then the scratch."""
        return len(self.tokens) + len(self.scratch_tokens)

    def append(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Add nodes to the scratch tree (parents index the whole scratch)."""
        for token, parent in zip(tokens, parents, strict=True):
            self.scratch_tokens.append(token)
            self.scratch_parents.append(parent)
            self.scratch_depths.append(0 if parent < 0 else self.scratch_depths[parent] + 1)

    def drop_last(self, count: int) -> None:
        """Take back the last ``count`` scratch nodes."""
        length = len(self.scratch_tokens) - count
        for per_node in (self.scratch_tokens, self.scratch_parents, self.scratch_depths, self.exit_states):
            del per_node[length:]

    def clear_scratch(self) -> None:
        """Drop every scratch node."""
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
        sequence: where they go.
        tokens: n token ids.
        parents: n parents in scratch numbering (``-1``: the last committed token); ``None`` means a chain that hangs
            from the last scratch node, or from the last committed token if there is none.
        wanted: how many of the *last* rows need logits; ``None`` means all.
        after: hang the nodes from this many committed tokens instead of from all of them (to look at a text again).
        states: for a model that reads a hidden state with every token, those [n, D].
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
        """Whether its nodes hang from the end of the scratch, one from the other."""
        old = len(self.sequence.scratch_tokens)
        chain = range(old - 1, old - 1 + len(self.tokens))
        return self.after is None and (self.parents is None or list(self.parents) == list(chain))

    def parents_behind(self, old: int) -> Sequence[int]:
        """The parents of its nodes in a scratch that has ``old`` nodes already."""
        return range(old - 1, old - 1 + len(self.tokens)) if self.parents is None else self.parents


@contextmanager
def opened(model: LanguageModel, *texts: Sequence[int]) -> Iterator[list[SequenceState]]:
    """New sequences that have read these texts, which are released behind the block, the last one first."""
    sequences: list[SequenceState] = []
    try:
        for text in texts:
            sequences.append(model.open())
            model.prefill(sequences[-1], text)
        yield sequences
    finally:
        for sequence in reversed(sequences):
            model.release(sequence)


def check_distinct(feeds: Sequence[Feed]) -> None:
    """Refuse two feeds of one call for one sequence, by a ``ValueError``."""
    if len({id(feed.sequence) for feed in feeds}) < len(feeds):
        raise ValueError("two feeds of one forward belong to the same sequence: join them")


@dataclass(frozen=True)
class Rows:
    """What a forward gives back for one feed.

    Attributes:
        logits: [wanted, V] logits.
        taps: hidden states by name, each [n, D]: all fed rows, which may be taken out when they are looked up.
    """

    logits: Tensor
    taps: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a model keeps of a text, copied out of its cache.

    Attributes:
        tokens: n token ids.
        layers: per layer its keys and values [H, n, D*], ``None`` for a layer that keeps nothing.
        divisible: whether a beginning of it can be put back (recurrent states know the whole text only).
        regime: of the sequence that it was copied from.
    """

    tokens: Sequence[int]
    layers: Sequence[tuple[Tensor, Tensor] | None]
    divisible: bool = True
    regime: int = 0

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(part.numel() * part.element_size() for pair in self.layers if pair for part in pair)


class LanguageModel(ABC):
    """How a causal language model is run.

    Attributes:
        vocab_size: V, the width of the logits.
        context_length: most tokens that a sequence may hold.
        context_why: what limits it, in words; empty where that is the model's configuration alone.
        eos_token_ids: tokens that end a text.
        answer_start: tokens that follow every prompt before anything is drawn (a decoder's first ones).
        capabilities: what the model offers.
        run_s: seconds spent in the network so far (without masks and bookkeeping; on a GPU until it has done its work).
        run_rows: rows of hidden states that it computed in this time, padding included.
        threads: how many it computes with.
        forward_name: what computes its forwards: ``"public"`` for Transformers' own, ``"lean"``, ``"native"``.
        stored_as: how its weights are stored, where that is not in the dtype of its activations.
        exactness: ``"bitwise"``: the bits of a token's logits do not depend on what is scored beside it, so that text
            with drafts, in batches and alone is the same; ``"rounding"``: near-ties may fall differently.
        exactness_why: how that is known, in words.
        refused: faster paths that were tried at load and not taken.
        reads: whether its sequences must be fed the text; where not, :meth:`open_beside` takes it over from the target.
        path: the file that it runs from, where that holds everything about it (llama.cpp's models); else ``None``.
        weights_version: grows whenever :meth:`follow` finds the network changed: what was computed before is stale.
        copied_bytes: memory of packed weights that a fast forward keeps beside those of the model.
        prefill_chunk: most tokens of a prompt that are read in one call.
    """

    path: Path | None = None
    weights_version: int = 0
    copied_bytes: int = 0
    reads: bool = True
    forward_name: str = "public"
    stored_as: str = ""
    exactness: str = "rounding"
    exactness_why: str = "this kind of model was not tried"
    refused: tuple[Refusal, ...] = ()
    context_why: str = ""
    answer_start: tuple[int, ...] = ()
    run_s: float = 0.0
    run_rows: int = 0
    threads: int = 1
    prefill_chunk: int = sys.maxsize
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    capabilities: Capabilities

    @property
    def num_ids(self) -> int:
        """How many ids it can be fed: its vocabulary, and the rows that were added behind it."""
        return self.vocab_size

    @property
    def trouble(self) -> str | None:
        """Why it cannot run anything any more; ``None`` as long as it can."""
        return None

    def describe(self) -> dict[str, Any]:
        """How it runs: ``forward``, ``weights``, ``exactness``, ``exactness_why``, ``threads``, ``refused``,
        ``graphs_off``."""
        return {
            "forward": self.forward_name,
            "weights": " ".join(filter(None, (self.stored_as, str(getattr(self, "dtype", "")).removeprefix("torch.")))),
            "exactness": self.exactness,
            "exactness_why": self.exactness_why,
            "threads": self.threads,
            "refused": [asdict(refusal) for refusal in self.refused],
            "graphs_off": getattr(self, "graphs_off", f"{type(self).__name__} runs no fixed shapes"),
        }

    def follow(self) -> None:  # noqa: B027
        """Notice whether the network was changed from outside (its weights, its layers, hooks), and run it as it is
        now.  :meth:`open` does so; open sequences then hold what another network has computed."""

    def chains(self, feeds: Sequence[Feed], counts: Sequence[int], pick: Pick | None = None) -> list[list[int]] | None:
        """``counts`` tokens behind the last node of each feed, by default the likeliest, which become scratch nodes but
        for the last; ``None``, and nothing was done, where no way is faster than a :meth:`forward` for each."""
        return None

    @property
    def kv_bytes(self) -> int:
        """Memory that keys and values of open sequences take now; 0 where that is not known."""
        return 0

    @property
    def kv_peak_bytes(self) -> int:
        """The most that they have taken."""
        return 0

    @property
    def kv_bytes_per_token(self) -> int:
        """What they take per token; 0 where that is not known."""
        return 0

    def snapshot(self, sequence: SequenceState, length: int) -> Snapshot | None:
        """A copy of what is kept of the first ``length`` committed tokens; ``None`` where that cannot be copied."""
        return None

    def restore(self, sequence: SequenceState, snapshot: Snapshot, length: int) -> None:
        """Commit the first ``length`` tokens of a snapshot to an empty sequence without reading them.

        Raises:
            CapabilityError: the model gives no snapshots.
        """
        raise CapabilityError(f"{type(self).__name__} cannot take over what another text has left")

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take; 0 for a model without any."""
        return 0

    def unpack(self) -> None:  # noqa: B027
        """Give the model's packed linear layers (``pack=True``) their plain form back, with the same weights."""

    @abstractmethod
    def open(self) -> SequenceState:
        """A new, empty sequence."""

    def open_beside(self, source: SequenceState | None) -> SequenceState:
        """A new, empty sequence for a draft of the text in the target's ``source``, which not every model looks at."""
        return self.open()

    def expect(self, sequence: SequenceState, length: int) -> None:  # noqa: B027
        """The text of a sequence has ``length`` tokens, or will have them before anything is drawn: models that read a
        long text in another way from its first token on read it again."""

    def room(self, sequence: SequenceState) -> int:
        """Most tokens that a path of the scratch may hold: a longer one would be read otherwise than one by one."""
        return self.context_length - len(sequence.tokens)

    @abstractmethod
    def forward(self, feeds: Sequence[Feed], taps: Sequence[str] = ()) -> list[Rows]:
        """Append nodes to scratch trees and score them, all feeds in one call.

        ``taps`` names hidden states to hand out: ``"layer:i"`` is the output of the i-th layer (0 is the embedding),
        ``"last"`` the output of the final norm.
        """

    def forward_part(self, feeds: Sequence[Feed], plan: LayerPlan, taps: Sequence[str] = ()) -> list[Rows]:
        """Append *provisional* nodes: scored by a part of the network, to draft from, never to keep.

        A later :meth:`forward` of the sequence states its tree anew from the first node on.

        Raises:
            CapabilityError: the model has no layers to choose from.
        """
        reason = self.capabilities.missing.get("layer_windows", f"{type(self).__name__} has no layers")
        raise CapabilityError(f"this model cannot run a part of its layers: {reason}")

    def extra_embeddings(self, rows: Tensor) -> int:
        """Let ids behind the vocabulary be fed as probes, embedded as ``rows`` [k, D]; returns the first of the k ids.

        The tensor is held, not copied: changes of it show.  The same memory given again has the same ids.

        Raises:
            CapabilityError: the model has no token embedding that rows could be added to.
            ValueError: rows of another width.
        """
        raise CapabilityError(f"{type(self).__name__} has no token embedding that rows could be added to")

    @abstractmethod
    def commit(self, sequence: SequenceState, path: Sequence[int]) -> None:
        """Keep the scratch nodes of ``path`` (from the last committed token downwards), drop all others."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop all scratch nodes and what they have stored, which may be no finite number."""
        self.commit(sequence, ())

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Keep the first ``length`` committed tokens, drop the later ones and every scratch node.

        Raises:
            CapabilityError: the model cannot give back what it has read.
        """
        raise CapabilityError(f"{type(self).__name__} cannot give back committed tokens")

    @abstractmethod
    def release(self, sequence: SequenceState) -> None:
        """Free a sequence."""

    def prefill(self, sequence: SequenceState, tokens: Sequence[int], taps: Sequence[str] = ()) -> Mapping[str, Tensor]:
        """Commit ``tokens`` without making logits; returns the taps of all of them."""
        pieces: list[Mapping[str, Tensor]] = []
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            pieces.append(self.forward([Feed(sequence, chunk, wanted=0)], taps)[0].taps)
            self.commit(sequence, range(len(chunk)))
        return self._joined(pieces)

    def _joined(self, pieces: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Taps of a prompt from those of its pieces; none of a model that has none."""
        return pieces[0] if len(pieces) == 1 else {}

    def prefill_batch(
        self, texts: Sequence[tuple[SequenceState, Sequence[int]]], taps: Sequence[str] = ()
    ) -> list[Mapping[str, Tensor]]:
        """:meth:`prefill` of several sequences; override where one call is cheaper than several."""
        return [self.prefill(sequence, tokens, taps) for sequence, tokens in texts]

    def catch_up(self, sequence: SequenceState, tokens: Sequence[int]) -> Sequence[int]:
        """Make the committed part a prefix of ``tokens`` that is as long as the scratch allows; return what is missing.

        This is all the bookkeeping that a draft model needs: whatever was accepted, its scratch is matched against
        the committed text, the matching path is kept, and the rest is fed next time.
        """
        have = len(sequence.tokens)
        # The last token is always fed again: its logits are what the next draft starts from.
        path = sequence.matching_path(tokens[have:-1])
        if sequence.scratch_tokens:
            self.commit(sequence, path)
        self.expect(sequence, len(tokens))
        return tokens[len(sequence.tokens) :]
