"""What the models of drafters have read of a request's text: a draft model, or a trained head with a cache of its own.

Whoever drafts with such a model calls :func:`level` right before it drafts, so a text that nobody drafts for is never
read.  A text begins with what the engine has kept of another one with the same beginning.  What is missing is read in
pieces where the engine wants other requests' rounds to go on meanwhile; until it is whole nothing is drafted.

The texts of a request are known to the engine by their keys (a drafter's slots in ``context.state``), whatever drafter
they belong to, nested ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretoken.core import Context
from foretoken.core.portions import portions
from foretoken.models.base import LanguageModel, SequenceState, Snapshot
from foretoken.models.clock import now

BESIDE = 16
"""Tokens behind the last one that are read together with it when the draft begins: fewer are not worth a forward."""
ALL = 1 << 60


@dataclass(eq=False)
class DraftText:
    """One text in one model.

    Attributes:
        sequence: the text; its committed tokens are a beginning of the request's, in the model's own ids.
        version: of the model's weights when the text was opened.
        was_level: whether it has been whole before: what is read later was written by the request itself.
    """

    model: LanguageModel
    sequence: SequenceState
    version: int
    was_level: bool = False

    @property
    def is_current(self) -> bool:
        """Whether the model would read the same today."""
        return self.version == self.model.weights_version


@dataclass(eq=False)
class Pace:
    """What drafters may read beside the round that runs, for all requests together.

    Attributes:
        remaining: tokens that may still be read.
        spent_s: seconds that it took.
    """

    remaining: int = ALL
    spent_s: float = 0.0


Find = Callable[[Hashable, DraftText, Sequence[int]], "tuple[Snapshot, int] | None"]
"""What is kept of another text of the same key that begins with these tokens, and how many of them it has."""


@dataclass(eq=False)
class DraftTexts:
    """All texts of one request, as the engine hands it to drafters (``context.texts``).

    Attributes:
        find: looks for another text with the same beginning; ``None`` where nothing is kept.
        num_read: tokens that were read until the texts were whole for the first time.
        waits: whether a draft was given up in this round because a text is not whole yet.
        has_read: whether a text was opened or read in this round.
    """

    pace: Pace = field(default_factory=Pace)
    find: Find | None = None
    by_key: dict[Hashable, DraftText] = field(default_factory=dict)
    num_read: int = 0
    waits: bool = False
    has_read: bool = False

    @classmethod
    def of(cls, context: Context) -> DraftTexts:
        """Those of a request; without an engine they are read at once."""
        if context.texts is None:
            context.texts = cls()
        return context.texts


class TextReader:
    """How a model reads: these two may be replaced where it takes more than tokens."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def settle(self, context: Context, sequence: SequenceState, tokens: Sequence[int]) -> int:
        """Keep what was drafted and accepted; returns how many of ``tokens`` the model has not read."""
        return len(self.model.catch_up(sequence, tokens))

    def read(self, parts: Sequence[tuple[Context, SequenceState, Sequence[int]]]) -> None:
        """Read the next tokens of some texts."""
        self.model.prefill_batch([(sequence, tokens) for _, sequence, tokens in parts])


def level(key: Hashable, reader: TextReader, contexts: Sequence[Context], texts: Sequence[Sequence[int]]) -> list[bool]:
    """Let a model read what it lacks of some texts; says for each whether it can draft: only its end is missing.

    Args:
        key: the drafter's slot in ``context.state`` that gets the sequence.
    """
    model = reader.model
    ready = [len(tokens) <= model.context_length for tokens in texts]
    behind: dict[int, int] = {}
    start_s, opened = now(getattr(model, "device", None)), False
    for i in [i for i, fits in enumerate(ready) if fits]:
        opened = _open(key, model, contexts[i], texts[i]) or opened
        text = DraftTexts.of(contexts[i]).by_key[key]
        if model.reads:
            missing = reader.settle(contexts[i], text.sequence, texts[i])
            if missing - 1 > BESIDE:
                behind[i] = missing - 1
            else:
                _note_level(contexts[i], text, missing)
    if behind:
        pace = DraftTexts.of(contexts[next(iter(behind))]).pace
        sizes = portions(list(behind.values()), pace.remaining)
        chosen = {i: sizes[place] for place, i in enumerate(behind) if sizes.get(place)}
        pace.remaining -= sum(chosen.values())
        if chosen:
            parts = []
            for i, size in chosen.items():
                sequence = DraftTexts.of(contexts[i]).by_key[key].sequence
                have = len(sequence.tokens)
                parts.append((contexts[i], sequence, texts[i][have : have + size]))
            reader.read(parts)
        for i, size in behind.items():
            text = DraftTexts.of(contexts[i]).by_key[key]
            ready[i] = _note_read(contexts[i], text, chosen.get(i, 0), size)
    if behind or opened:
        spent = now(getattr(model, "device", None)) - start_s
        for pace in {id(p): p for p in (DraftTexts.of(context).pace for context in contexts)}.values():
            pace.spent_s += spent
    return ready


@contextmanager
def reading(context: Context) -> Iterator[None]:
    """What happens inside the block is reading, not drafting: its time is told apart."""
    texts = DraftTexts.of(context)
    start_s = now(None)
    try:
        yield
    finally:
        texts.has_read = True
        texts.pace.spent_s += now(None) - start_s


def forget(owner: object, context: Context) -> None:
    """Drop what is kept for a request under ``owner``, or under a pair that begins with it, and free texts."""
    texts = DraftTexts.of(context).by_key
    for key in [key for key in context.state if key is owner or (isinstance(key, tuple) and key[0] is owner)]:
        del context.state[key]
        if key in texts:
            text = texts.pop(key)
            text.model.release(text.sequence)


def _open(key: Hashable, model: LanguageModel, context: Context, tokens: Sequence[int]) -> bool:
    """Open a text that is not open, with what there is of its beginning; the last token is never taken over, since a
    draft begins with what the model says after it."""
    texts = DraftTexts.of(context)
    if key in texts.by_key:
        return False
    sequence = context.state[key] = model.open_beside(context.sequence)
    text = texts.by_key[key] = DraftText(model, sequence, model.weights_version)
    texts.has_read = True
    if model.reads and texts.find is not None:
        model.expect(sequence, len(tokens))
        beginning = texts.find(key, text, tokens[:-1])
        if beginning is not None:
            model.restore(sequence, *beginning)
    return True


def _note_read(context: Context, text: DraftText, size: int, missing: int) -> bool:
    """Count what was read of what was missing; says whether the text is whole but for its end."""
    texts = DraftTexts.of(context)
    texts.has_read = True
    if not text.was_level:
        texts.num_read += size
    if missing - size > BESIDE:
        texts.waits = True
        return False
    _note_level(context, text, missing - size + 1)
    return True


def _note_level(context: Context, text: DraftText, missing: int) -> None:
    """The draft's first forward reads what is missing."""
    if not text.was_level:
        text.was_level = True
        DraftTexts.of(context).num_read += missing
