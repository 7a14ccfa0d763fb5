"""Keeps a small network that reads the target's hidden states level with the text of every request."""

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
    """The target's hidden states at places that a network has not read, put aside as they come.

    Attributes:
        start: position of the first place.
        states: of places one after the other; nothing is copied before they are read.
    """

    start: int = 0
    states: HiddenText = field(default_factory=HiddenText)

    def __len__(self) -> int:
        return self.states.count

    def add(self, context: Context, taps: Sequence[str]) -> None:
        """Put aside what the last round (or the prompt) has that is new: a round may be shown more than once."""
        if taps[0] in context.hidden:
            count = self.start + len(self) - context.hidden_start
            self.states.add(HiddenStates.of(context.hidden).only(taps).at(slice(count, None)))

    def first(self, count: int) -> Mapping[str, Tensor]:
        """The states [count, D] of the first places, by tap."""
        return self.states.first(count)

    def skip_to(self, position: int) -> None:
        """Forget the places before a position."""
        gone = min(position - self.start, len(self))
        if gone > 0:
            self.states.drop(gone)
            self.start += gone


class FeatureReader:
    """Shows the network one place per committed token but the last: the next token and the target's true state.

    Args:
        wanted: of how many last places per reading it must make logits.
    """

    taps: Sequence[str] = ("last",)
    skipped: int = 1
    """First tokens of a text that the network does not read: the pair at place t holds token t + skipped."""

    def __init__(self, model: FeatureModel, wanted: int = 1) -> None:
        self.model, self.wanted = model, wanted

    def start(self, context: Context) -> None:
        """Put the prompt's features aside."""
        unread = context.state[self, "pending"] = UnreadStates()
        unread.add(context, self.taps)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Keep the features of the round: they are read when the next draft is asked for."""
        context.state[self, "pending"].add(context, self.taps)

    def finish(self, context: Context) -> None:
        """Free the row and the features."""
        forget(self, context)

    def features(self, hidden: Mapping[str, Tensor]) -> Tensor:
        """Features [n, D] of the target's hidden states [n, D], by tap."""
        return hidden[self.taps[0]].float()

    def follow(self, contexts: Sequence[Context]) -> tuple[list[bool], dict[int, Rows]]:
        """Which requests' texts have been read to the end, and, by ``id``, the rows of those that had an end to read.

        True features are read only, so that these places can be kept.  The pair at place t is the token at t + 1 and
        the feature of t; the last pair holds the root.
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
        """Read all but the last places of long texts; says for which requests that is all that was missing."""
        for context in contexts:
            context.state[self, "pending"].add(context, self.taps)
        texts = [self.tokens_of(context)[self.skipped :] for context in contexts]
        return level(self, _PairReader(self), contexts, texts)

    def tokens_of(self, context: Context) -> Sequence[int]:
        """The text in the network's own ids."""
        return context.tokens

    def feed(self, context: Context, count: int, wanted: int) -> Feed:
        """The next places that were not read."""
        sequence: SequenceState = context.state[self]
        first = len(sequence.tokens) + self.skipped
        states = self.features(context.state[self, "pending"].first(count))
        return Feed(sequence, self.tokens_of(context)[first : first + count], wanted=wanted, states=states)

    def keep(self, context: Context) -> None:
        """Keep the places that were fed."""
        sequence: SequenceState = context.state[self]
        self.model.commit(sequence, range(len(sequence.scratch_tokens)))
        self.skip_read(context)

    def settle(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Drop what was drafted: its features are not the target's."""
        if sequence.scratch_tokens:
            self.model.commit(sequence, ())

    def skip_read(self, context: Context) -> None:
        """Forget the features of places that were kept."""
        sequence: SequenceState = context.state[self]
        context.state[self, "pending"].skip_to(len(sequence.tokens) - 1 + self.skipped)


class ReadingDrafter(Drafter):
    """A drafter that has such a reader beside its own model, if it has one."""

    reader: FeatureReader | None = None

    def start(self, context: Context) -> None:
        super().start(context)
        if self.reader is not None:
            self.reader.start(context)

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        if self.reader is not None:
            self.reader.observe(context, tree, scores, verdict)

    def finish(self, context: Context) -> None:
        super().finish(context)
        if self.reader is not None:
            self.reader.finish(context)


class _PairReader(TextReader):
    """Reads a token and the feature before it at every place."""

    def __init__(self, reader: FeatureReader) -> None:
        super().__init__(reader.model)
        self.reader = reader

    def settle(self, context: Context, sequence: SequenceState, tokens: Sequence[int]) -> int:
        """Drop the features of places that were kept, or taken over from another text."""
        self.reader.settle(sequence, tokens)
        self.reader.skip_read(context)
        return len(context.state[self.reader, "pending"])

    def read(self, parts: Sequence[tuple[Context, SequenceState, Sequence[int]]]) -> None:
        for context, _, tokens in parts:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                self.model.forward([self.reader.feed(context, len(tokens[start : start + PREFILL_CHUNK]), 0)])
                self.reader.keep(context)
