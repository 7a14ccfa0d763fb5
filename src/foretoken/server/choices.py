"""Base of completions and chat completions: an answer of choices, whole or streamed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

from foretoken.engine.background import Ticket
from foretoken.engine.output import Output, Piece
from foretoken.engine.trace import RoundTrace
from foretoken.server.answering import Answer
from foretoken.server.logprobs import TokenTexts


class Choices(Answer):
    """One request and its choices.

    Attributes:
        chunk: type of a stream's objects, if it differs from the answer's.
        billed: completion tokens that are billed; ``None``: all generated tokens.
    """

    chunk: ClassVar[str] = ""
    billed: int | None = None

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.serving.llm.tokenizer, bool(self.body.return_tokens_as_token_ids))

    def head(self, kind: str) -> dict[str, Any]:
        """Common fields of all objects of a kind; the fingerprint is the same for answers that a seed would repeat."""
        settings, drafter = self.serving.settings, self.serving.llm.drafter
        fingerprint = f"foretoken-{settings.dtype}-{'none' if drafter is None else drafter.name}"
        head = {"id": self.id, "object": kind, "created": self.created, "model": settings.name}
        return {**head, "system_fingerprint": fingerprint}

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return {**self.head(self.kind), "choices": choices, **self.tail(self.billed), **self.also(outputs)}

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        options, head, sent = self.body.stream_options, self.head(self.chunk or self.kind), 0
        running = options is not None and options.continuous_usage_stats
        for choice in self.beginnings(len(tickets)):
            yield {**head, "choices": [choice], **({"usage": self.usage_so_far(0)} if running else {})}
        async for index, piece in self.gathered_pieces(tickets):
            chunk = {**head, "choices": [self.delta(index, piece)]}
            sent += len(piece.token_ids)
            if running:
                chunk["usage"] = self.usage_so_far(sent if self.billed is None else self.billed)
            yield chunk
        if options is not None and options.include_usage:
            yield {**head, "choices": [], **self.tail(self.billed)}

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """One choice of a complete answer."""

    def also(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Additional fields of a complete answer."""
        return {}

    @abstractmethod
    def beginnings(self, count: int) -> Iterator[dict[str, Any]]:
        """Entries that a stream of ``count`` choices sends before any token."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """New tokens of a choice in a stream."""

    def extras(self, ids: Sequence[int], answer: Output | Piece, **more: Any) -> dict[str, Any]:
        """Token ids (with ``more``) and round traces of a choice or a delta, if requested."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields |= {"token_ids": ids, **more, "origins": answer.origins[: len(ids)]}
        if self.body.speculative is not None and self.body.speculative.explain:
            fields["speculative"] = {**explained(answer.rounds, self.texts), "why": answer.why}
        return fields


def explained(rounds: Sequence[RoundTrace], texts: TokenTexts) -> dict[str, Any]:
    """Round traces with the texts of their tokens."""
    return {
        "rounds": [
            {
                **trace.as_dict(),
                "texts": [texts.shown(token) for token in trace.tokens],
                "next_text": texts.shown(trace.next_token),
            }
            for trace in rounds
        ]
    }
