"""Keeps a small network that reads the target's hidden states level with the text of every request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Context, Scores, TokenTree, Verdict
from foretoken.models.base import Feed, Rows, SequenceState
from foretoken.models.features import FeatureModel
from foretoken.models.huggingface import PREFILL_CHUNK


class FeatureReader:
    """Shows the network one place per committed token but the last: the next token and the target's true state.

    Args:
        model: the network.
        wanted: of how many last places per reading it must make logits.
    """

    taps: Sequence[str] = ("last",)

    def __init__(self, model: FeatureModel, wanted: int = 1) -> None:
        self.model, self.wanted = model, wanted

    def start(self, context: Context) -> None:
        """Open a row for the request."""
        context.state[self] = self.model.open()
        context.state[self, "pending"] = []

    def observe(self, context: Context, tree: TokenTree, scores: Scores, verdict: Verdict) -> None:
        """Keep the features of the round: they are read when the next draft is asked for."""
        self._collect(context)

    def finish(self, context: Context) -> None:
        """Free the row."""
        sequence = context.state.pop(self, None)
        context.state.pop((self, "pending"), None)
        if sequence is not None:
            self.model.release(sequence)

    def features(self, context: Context) -> Tensor:
        """True features [n, D] of the tokens from position ``context.hidden_start`` on."""
        return context.hidden[self.taps[0]].float()

    def _collect(self, context: Context) -> None:
        """Put aside the features that have not been seen yet (a round may be shown more than once)."""
        if self.taps[0] in context.hidden:
            pending: list[Tensor] = context.state[self, "pending"]
            have = len(context.state[self].tokens) + sum(map(len, pending))
            fresh = self.features(context)[have - context.hidden_start :]
            if len(fresh):
                pending.append(fresh)

    def follow(self, contexts: Sequence[Context]) -> dict[int, Rows]:
        """Rows of the requests that had anything to read; true features only, so that these places can be kept.

        The pair at place t is the token at t + 1 and the feature of t; the last pair holds the root.
        """
        found: dict[int, Rows] = {}
        unread: dict[int, Tensor] = {}
        for context in contexts:
            if context.state[self].scratch_tokens:
                self.model.commit(context.state[self], ())
            self._collect(context)
            if context.state[self, "pending"]:
                unread[id(context)] = torch.cat(context.state[self, "pending"])
                context.state[self, "pending"].clear()
        while unread:  # more than once for a long prompt only
            reading = [context for context in contexts if id(context) in unread]
            rows = self.model.forward([self._next_piece(context, unread) for context in reading])
            for context, row in zip(reading, rows, strict=True):
                sequence: SequenceState = context.state[self]
                self.model.commit(sequence, range(len(sequence.scratch_tokens)))
                found[id(context)] = row
        return found

    def _next_piece(self, context: Context, unread: dict[int, Tensor]) -> Feed:
        """At most a chunk of the pairs that have not been read; what is left stays in ``unread``."""
        sequence: SequenceState = context.state[self]
        states = unread.pop(id(context))
        if len(states) > PREFILL_CHUNK:
            unread[id(context)] = states[PREFILL_CHUNK:]
            states = states[:PREFILL_CHUNK]
        first = len(sequence.tokens) + 1
        return Feed(sequence, context.tokens[first : first + len(states)], wanted=self.wanted, states=states)
