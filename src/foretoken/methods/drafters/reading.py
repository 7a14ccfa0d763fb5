"""Readers that feed the target's hidden states to a small network, up to each request's last token.

A drafter whose network reads every token is its own reader (eagle, block drafters, peagle); one where that is optional
has a ``reader`` (pard, hydra, kangaroo).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.core import Context, HiddenStates, HiddenText, Scores, TokenTree, Verdict
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.drafters.texts import TextReader, forget, level
from foretoken.models.base import Feed, Rows, SequenceState
from foretoken.models.forward.heads.features import FeatureModel
from foretoken.models.runner import PREFILL_CHUNK


@dataclass
class UnreadStates:
    """Stored hidden states of the target at positions that a network has not read.

    Attributes:
        start: first position.
        states: of consecutive positions; nothing is copied before they are read.
    """

    start: int = 0
    states: HiddenText = field(default_factory=HiddenText)

    def __len__(self) -> int:
        return self.states.count

    def add(self, context: Context, taps: Sequence[str]) -> None:
        """Store the new states of the last round (or the prompt); repeated calls for a round have no effect."""
        if taps[0] in context.hidden:
            count = self.start + len(self) - context.hidden_start
            self.states.add(HiddenStates.of(context.hidden).only(taps).at(slice(count, None)))

    def first(self, count: int) -> Mapping[str, Tensor]:
        """The states [count, D] of the first positions, by tap."""
        return self.states.first(count)

    def skip_to(self, position: int) -> None:
        """Drop the states before a position."""
        gone = min(position - self.start, len(self))
        if gone > 0:
            self.states.drop(gone)
            self.start += gone


class FeatureReader:
    """Feeds the network one position per committed token but the last: the next token and the target's true state.

    Args:
        wanted: number of last positions per reading that need logits.
    """

    taps: Sequence[str] = ("last",)
    skipped: int = 1
    """First tokens that the network does not read: the pair at position t holds token t + skipped."""

    def __init__(self, model: FeatureModel, wanted: int = 1) -> None:
        self.model, self.wanted = model, wanted

    def start(self, context: Context) -> None:
        unread = context.state[self, "pending"] = UnreadStates()
        unread.add(context, self.taps)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Store the round's features until the next draft is requested."""
        context.state[self, "pending"].add(context, self.taps)

    def finish(self, context: Context) -> None:
        forget(self, context)

    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        """Features [n, D] of the target's hidden states [n, D], by tap."""
        return hidden[self.taps[0]].float()

    def follow(self, contexts: Sequence[Context]) -> tuple[list[bool], dict[int, Rows]]:
        """Whether all tokens of each request have been read, and, by ``id``, the rows of requests that had any to read.

        Only true features are read, so that these positions can be kept.  The pair at position t is the token at t + 1
        and the feature of t; the last pair holds the root.
        """
        ready = self.read_up_to_end(contexts)
        ends = [c for c, is_level in zip(contexts, ready, strict=True) if is_level and c.state[self, "pending"]]
        rows_of: dict[int, Rows] = {}
        if ends:
            feeds = [self.feed(context, len(context.state[self, "pending"]), self.wanted) for context in ends]
            for context, rows in zip(ends, self.model.forward(feeds), strict=True):
                self.keep(context)
                rows_of[id(context)] = rows
        return ready, rows_of

    def read_up_to_end(self, contexts: Sequence[Context]) -> list[bool]:
        """Read all but the last positions of long sequences; return for each request whether only those were
        missing."""
        for context in contexts:
            context.state[self, "pending"].add(context, self.taps)
        sequences = [self.tokens_of(context)[self.skipped :] for context in contexts]
        return level(self, _PairReader(self), contexts, sequences)

    def tokens_of(self, context: Context) -> Sequence[int]:
        """The request's tokens in the network's ids."""
        return context.tokens

    def feed(self, context: Context, count: int, wanted: int) -> Feed:
        sequence: SequenceState = context.state[self]
        first = len(sequence.tokens) + self.skipped
        states = self.features(context.state[self, "pending"].first(count))
        return Feed(sequence, self.tokens_of(context)[first : first + count], wanted=wanted, states=states)

    def keep(self, context: Context) -> None:
        sequence: SequenceState = context.state[self]
        self.model.commit(sequence, range(len(sequence.scratch_tokens)))
        self.skip_read(context)

    def settle(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Drop draft tokens, whose features are not the target's."""
        if sequence.scratch_tokens:
            self.model.commit(sequence, ())

    def skip_read(self, context: Context) -> None:
        """Drop the features of committed positions."""
        sequence: SequenceState = context.state[self]
        context.state[self, "pending"].skip_to(len(sequence.tokens) - 1 + self.skipped)


class ReadingDrafter(Drafter):
    """A drafter with an optional reader beside its own model."""

    reader: FeatureReader | None = None

    def start(self, context: Context) -> None:
        super().start(context)
        if self.reader is not None:
            self.reader.start(context)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        if self.reader is not None:
            self.reader.observe(context, tree, scores, verdict)

    def finish(self, context: Context) -> None:
        try:
            super().finish(context)
        finally:
            if self.reader is not None:
                self.reader.finish(context)


class _PairReader(TextReader):
    """Reads pairs of a token and the feature before it."""

    def __init__(self, reader: FeatureReader) -> None:
        super().__init__(reader.model)
        self.reader = reader

    def settle(self, context: Context, sequence: SequenceState, tokens: Sequence[int]) -> int:
        """Drop the features of positions that are committed or restored from another sequence."""
        self.reader.settle(sequence, tokens)
        self.reader.skip_read(context)
        return len(context.state[self.reader, "pending"])

    def read(self, parts: Sequence[tuple[Context, SequenceState, Sequence[int]]]) -> None:
        for context, _, tokens in parts:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                self.model.forward([self.reader.feed(context, len(tokens[start : start + PREFILL_CHUNK]), 0)])
                self.reader.keep(context)
